// Gated activations on a CPU: see gated_act.py for what they are and for the shapes.
#include "native.h"

namespace infer {
namespace {

inline float sigmoid(float x) {
  const float small = exp_of_nonpositive(x > 0 ? -x : x);
  return (x > 0 ? 1.0f : small) / (1.0f + small);
}

// gate * sigmoid(gate) is SiLU; with the gate steepened it is the tanh form of GELU (see gated_act.py).
template <bool silu>
inline float openness(float gate) {
  return sigmoid(silu ? gate : 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate));
}

template <typename T, bool silu>
void activate(const at::Tensor& gate_up, at::Tensor& out) {
  const int64_t rows = out.size(0), size = out.size(1), stride = gate_up.stride(0);
  const T* from = gate_up.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, rows, rows_per_task(4 * size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gates = from + row * stride, *ups = gates + size;
      T* result = to + row * size;
      for (int64_t i = 0; i < size; ++i) {
        const float gate = to_float(gates[i]);
        result[i] = from_float<T>(gate * openness<silu>(gate) * to_float(ups[i]));
      }
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
