// Rotary embedding on a CPU: see rope.py for what it is and for the shapes.
#include "native.h"

namespace infer {
namespace {

// Turns one head: pair i is (x[i], x[i + half]).
template <typename T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[i + half]);
    out[i] = from_float<T>(first * cos[i] - second * sin[i]);
    out[i + half] = from_float<T>(second * cos[i] + first * sin[i]);
  }
}

template <typename T>
void rotate_heads(const at::Tensor& x, int64_t token, const float* cos, const float* sin, at::Tensor& out) {
  const int64_t heads = x.size(1), size = x.size(2);
  const T* from = x.const_data_ptr<T>() + token * x.stride(0);
  T* to = out.mutable_data_ptr<T>() + token * heads * size;
  for (int64_t head = 0; head < heads; ++head)
    rotate(from + head * x.stride(1), cos, sin, to + head * size, size / 2);
}

// q [T, Hq, D], k [T, Hkv, D], cos and sin [T, D / 2] -> both rotated, contiguous.
std::tuple<at::Tensor, at::Tensor> rope(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t tokens = q.size(0), half = q.size(2) / 2;
  auto q_out = at::empty(q.sizes(), q.options()), k_out = at::empty(k.sizes(), k.options());
  const float *cosines = cos.const_data_ptr<float>(), *sines = sin.const_data_ptr<float>();
  with_type(q, [&](auto element) {
    using T = decltype(element);
    const int64_t columns = (q.size(1) + k.size(1)) * q.size(2);
    parallel_for(tokens, rows_per_task(columns), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        rotate_heads<T>(q, token, cosines + token * half, sines + token * half, q_out);
        rotate_heads<T>(k, token, cosines + token * half, sines + token * half, k_out);
      }
    });
  });
  return {q_out, k_out};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) { library.impl("rope", &rope); }

}  // namespace infer
