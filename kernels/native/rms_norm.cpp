// RMSNorm on a CPU: see rms_norm.py for what it is and for the shapes.
#include "native.h"

#include <cmath>

namespace infer {
namespace {

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), one row. Read twice: the second time it is in the cache.
template <typename T, typename W, typename Out>
void normalise(const T* x, const W* weight, Out* out, int64_t columns, float eps, float offset) {
  OrderedSum squares;
  squares.add(columns, [&](int64_t i) {
    const float value = to_float(x[i]);
    return value * value;
  });
  const float scale = 1.0f / std::sqrt(squares.total() / float(columns) + eps);
  for (int64_t i = 0; i < columns; ++i)
    out[i] = from_float<Out>(to_float(x[i]) * scale * (to_float(weight[i]) + offset));
}

// x [groups, rows, columns], any strides but the last, which is 1 -> the same, contiguous.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, double offset) {
  const int64_t rows = x.size(1), columns = x.size(2);
  auto out = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto element) {
    with_type(weight, [&](auto weight_element) {
      using T = decltype(element);
      using W = decltype(weight_element);
      const T* from = x.const_data_ptr<T>();
      const W* scales = weight.const_data_ptr<W>();
      T* to = out.mutable_data_ptr<T>();
      parallel_for(x.size(0) * rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T* source = from + row / rows * x.stride(0) + row % rows * x.stride(1);
          normalise(source, scales, to + row * columns, columns, float(eps), float(offset));
        }
      });
    });
  });
  return out;
}

// x [rows, columns], residual [rows, columns] float32, any row stride -> (norm of their sum, their sum), contiguous, of
// the same types.
std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps, double offset) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto normed = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), residual.options());
  const float* right = residual.const_data_ptr<float>();
  float* sums = total.mutable_data_ptr<float>();
  with_type(x, [&](auto element) {
    with_type(weight, [&](auto weight_element) {
      using T = decltype(element);
      using W = decltype(weight_element);
      const T* left = x.const_data_ptr<T>();
      const W* scales = weight.const_data_ptr<W>();
      T* to = normed.mutable_data_ptr<T>();
      parallel_for(rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T* a = left + row * x.stride(0);
          const float* b = right + row * residual.stride(0);
          float* sum = sums + row * columns;
          for (int64_t i = 0; i < columns; ++i) sum[i] = to_float(a[i]) + b[i];
          normalise(sum, scales, to + row * columns, columns, float(eps), float(offset));
        }
      });
    });
  });
  return {normed, total};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor");
  library.def(
      "fused_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("rms_norm", &rms_norm);
  library.impl("fused_add_rms_norm", &fused_add_rms_norm);
}

}  // namespace infer
