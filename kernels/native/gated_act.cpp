// Gated activations on a CPU: see gated_act.py for what they are and for the shapes.
#include "native.h"

namespace infer {
namespace {

template <typename T, bool silu>
void activate(const at::Tensor& gate_up, at::Tensor& out) {
  const int64_t rows = out.size(0), size = out.size(1), stride = gate_up.stride(0);
  const T* from = gate_up.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  parallel_for(rows, rows_per_task(4 * size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gates = from + row * stride, *ups = gates + size;
      T* result = to + row * size;
      for (int64_t i = 0; i < size; ++i)
        result[i] = from_float<T>(activated<silu>(to_float(gates[i])) * to_float(ups[i]));
    }
  });
}

// gate_up [T, 2F], any row stride -> [T, F].
at::Tensor gated_act(const at::Tensor& gate_up, bool silu) {
  auto out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  with_type(gate_up, [&](auto element) {
    using T = decltype(element);
    silu ? activate<T, true>(gate_up, out) : activate<T, false>(gate_up, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) { library.def("gated_act(Tensor gate_up, bool silu) -> Tensor"); }

TORCH_LIBRARY_IMPL(infer, CPU, library) { library.impl("gated_act", &gated_act); }

}  // namespace infer
