// A linear layer on a CPU, on weights packed for it: see linear.py for what it is and for the shapes.
#include "native.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>

namespace infer {
namespace {

// Outputs that are computed together, and rows of x that meet them at a time. A panel of 64 outputs by 2048 inputs is
// 256 kB of bfloat16: it stays in a core's second-level cache while all rows meet it.
constexpr int64_t kPanel = 64;
constexpr int64_t kTileRows = 32;

// Neighbouring inputs that lie side by side in a panel: the two that a bfloat16 dot-product instruction adds at once.
int64_t group_of(at::ScalarType type) { return type == at::kFloat ? 1 : 2; }

// weight [N, K] -> [ceil(N / 64), K / group, 64, group], missing outputs zero.
at::Tensor pack_linear(const at::Tensor& weight) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), group = group_of(weight.scalar_type());
  TORCH_CHECK(inputs % group == 0, "an odd number of inputs cannot be packed: ", inputs);
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  auto packed = at::empty({panels, inputs / group, kPanel, group}, weight.options());
  with_type(weight, [&](auto element) {
    using T = decltype(element);
    const T* from = weight.const_data_ptr<T>();
    T* to = packed.mutable_data_ptr<T>();
    at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel)
        for (int64_t output = 0; output < kPanel; ++output) {
          const int64_t row = panel * kPanel + output;
          for (int64_t input = 0; input < inputs; ++input)
            to[(panel * inputs + input / group * group) * kPanel + output * group + input % group] =
                row < outputs ? from[row * weight.stride(0) + input] : T(0);
        }
    });
  });
  return packed;
}

// One tile of rows by one panel of outputs, with a product for every input in float32.
template <typename T>
void compute_tile(
    const T* x, int64_t stride, int64_t rows, const T* panel, int64_t inputs, const T* bias, T* out,
    int64_t out_stride, int64_t outputs) {
  alignas(64) float sums[kTileRows * kPanel];
  at::native::cpublas::brgemm(
      rows, kPanel, inputs, stride, kPanel, kPanel, /*add_C=*/false, x, panel, sums, /*is_vnni=*/sizeof(T) == 2);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t output = 0; output < outputs; ++output)
      out[row * out_stride + output] =
          from_float<T>(sums[row * kPanel + output] + (bias ? to_float(bias[output]) : 0.0f));
}

// x [T, K] any row stride, packed as above, bias [N] or none -> [T, N].
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias) {
  const int64_t tokens = x.size(0), inputs = x.size(1), panels = packed.size(0);
  auto out = at::empty({tokens, outputs}, x.options());
  const int64_t tiles = (tokens + kTileRows - 1) / kTileRows;
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    const T *from = x.const_data_ptr<T>(), *weights = packed.const_data_ptr<T>();
    const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
    T* to = out.mutable_data_ptr<T>();
    // Task i is tile i % tiles of panel i / tiles: a panel meets all its rows before the next one comes.
    at::parallel_for(0, panels * tiles, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t panel = task / tiles, row = task % tiles * kTileRows, output = panel * kPanel;
        compute_tile(
            from + row * x.stride(0), x.stride(0), std::min(kTileRows, tokens - row),
            weights + panel * inputs * kPanel, inputs, biases ? biases + output : nullptr,
            to + row * outputs + output, outputs, std::min(kPanel, outputs - output));
      }
      at::native::cpublas::brgemm_release(/*is_vnni=*/sizeof(T) == 2);
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("pack_linear", &pack_linear);
  library.impl("linear", &linear);
}

}  // namespace infer
