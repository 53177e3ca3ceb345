// A linear layer on a CPU, on weights packed for it: see linear.py for what it is and for the shapes.
#include "native.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>

namespace infer {
namespace {

// A tile of a product: so many rows of x meet so many outputs. A panel of 64 outputs by 2048 inputs is 256 kB of
// bfloat16 and stays in a core's second-level cache while tile after tile of rows meets it.
constexpr int64_t kPanel = 64;
constexpr int64_t kTileRows = 32;

// Of a long x, so much is kept in that cache while all panels pass by: read anew for every panel, it would come from
// memory each time. Where that is but a few tiles, it is the panels that would be read too often: x is taken whole.
constexpr int64_t kBlockBytes = 768 * 1024;
constexpr int64_t kFewTiles = 4;

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

// Computes x [T, K] times all panels, tile by tile, and hands each tile's float32 sums to
// finish(sums [rows, 64], first row, rows, panel).
//
// An output is one sum over its inputs, in order, by one call: neither the tile nor the block that a row is in, nor the
// thread that computes it, makes a difference to its bits.
template <typename T, typename Finish>
void multiply(const at::Tensor& x, const at::Tensor& packed, Finish finish) {
  const int64_t tokens = x.size(0), inputs = x.size(1), stride = x.stride(0), panels = packed.size(0);
  const int64_t tiles = (tokens + kTileRows - 1) / kTileRows;
  const int64_t fitting = kBlockBytes / (kTileRows * inputs * int64_t(sizeof(T)));
  const int64_t block = fitting < kFewTiles ? tiles : fitting;  // tiles of rows that all panels meet in turn
  const T *from = x.const_data_ptr<T>(), *weights = packed.const_data_ptr<T>();
  constexpr bool paired = sizeof(T) == 2;
  // Tasks are numbered block by block, within a block panel by panel, within a panel tile by tile.
  at::parallel_for(0, panels * tiles, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kTileRows * kPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / (block * panels) * block, in_block = std::min(block, tiles - first);
      const int64_t place = task - first * panels, panel = place / in_block;
      const int64_t row = (first + place % in_block) * kTileRows, rows = std::min(kTileRows, tokens - row);
      at::native::cpublas::brgemm(
          rows, kPanel, inputs, stride, kPanel, kPanel, /*add_C=*/false, from + row * stride,
          weights + panel * inputs * kPanel, sums, paired);
      finish(sums, row, rows, panel);
    }
    at::native::cpublas::brgemm_release(paired);
  });
}

// x [T, K] any row stride, packed as above, bias [N] or none -> [T, N].
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias) {
  auto out = at::empty({x.size(0), outputs}, x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
    T* to = out.mutable_data_ptr<T>();
    multiply<T>(x, packed, [=](float* sums, int64_t first, int64_t rows, int64_t panel) {
      const int64_t begin = panel * kPanel, width = std::min(kPanel, outputs - begin);
      for (int64_t row = 0; row < rows; ++row) {
        float* sum = sums + row * kPanel;
        if (biases)
          for (int64_t i = 0; i < width; ++i) sum[i] += to_float(biases[begin + i]);
        round_all(sum, to + (first + row) * outputs + begin, width);
      }
    });
  });
  return out;
}

// x [T, K], packed with 32 gates and then their 32 ups in a panel, bias [2 size], gates first, or none -> [T, size].
// A tile has all that an activation takes, so the product, twice as wide as what is left of it, is never in memory.
template <typename T, bool silu>
void multiply_and_activate(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, at::Tensor& out) {
  constexpr int64_t half = kPanel / 2;
  const int64_t size = out.size(1);
  const T* biases = bias ? bias->const_data_ptr<T>() : nullptr;
  T* to = out.mutable_data_ptr<T>();
  multiply<T>(x, packed, [=](float* sums, int64_t first, int64_t rows, int64_t panel) {
    const int64_t begin = panel * half, width = std::min(half, size - begin);
    for (int64_t row = 0; row < rows; ++row) {
      float *gates = sums + row * kPanel, *ups = gates + half;
      if (biases)
        for (int64_t i = 0; i < width; ++i) {
          gates[i] += to_float(biases[begin + i]);
          ups[i] += to_float(biases[size + begin + i]);
        }
      // A loop of constant length, over what nothing else points to: a few vector instructions without a test.
      float values[half];
      for (int64_t i = 0; i < half; ++i) values[i] = activated<silu>(gates[i]) * ups[i];
      round_all(values, to + (first + row) * size + begin, width);
    }
  });
}

at::Tensor gated_linear(
    const at::Tensor& x, const at::Tensor& packed, int64_t size, const std::optional<at::Tensor>& bias, bool silu) {
  auto out = at::empty({x.size(0), size}, x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    silu ? multiply_and_activate<T, true>(x, packed, bias, out) : multiply_and_activate<T, false>(x, packed, bias, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias) -> Tensor");
  library.def("gated_linear(Tensor x, Tensor packed, int size, Tensor? bias, bool silu) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("pack_linear", &pack_linear);
  library.impl("linear", &linear);
  library.impl("gated_linear", &gated_linear);
}

}  // namespace infer
