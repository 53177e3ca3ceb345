// What the CPU kernels share: numbers in and out of float32, a sum whose order is fixed, and an exp that loops can
// be vectorised around.
//
// The kernels are plain loops over floats. GCC and Clang turn the innermost ones into vector instructions of whatever
// width the machine has (-O3 -march=native). So the same sources build on x86 and on ARM; the one place that names an
// instruction (`round_all`) has a plain twin.
#pragma once

#include "team.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace infer {

// ---------------------------------------------------------------------- numbers

inline float to_float(float x) { return x; }

inline float to_float(c10::BFloat16 x) {  // bfloat16 is the upper half of a float32
  const uint32_t bits = uint32_t(x.x) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float to_float(c10::Half x) { return float(x); }

// Rounded to nearest, ties to even; NaN stays NaN. (c10's own conversion has a branch, which keeps loops scalar.)
template <typename T>
inline T from_float(float x) {
  return T(x);
}

template <>
inline c10::BFloat16 from_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return c10::BFloat16(uint16_t(is_nan ? 0x7fc0 : rounded), c10::BFloat16::from_bits());
}

// to[i] = from_float(from[i]).
template <typename T>
inline void round_all(const float* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
}

#ifdef __AVX512BF16__
// There is an instruction for 32 of them, which the compiler does not find by itself: the loop above takes some twenty.
// It makes zero of denormal numbers (below 1.2e-38).
template <>
inline void round_all(const float* from, c10::BFloat16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    std::memcpy(to + i, &rounded, sizeof(rounded));
  }
  for (; i < count; ++i) to[i] = from_float<c10::BFloat16>(from[i]);
}
#endif

// ---------------------------------------------------------------------- memory

// Numbers that begin at a cache line: otherwise a load of a register would take two lines.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count = 0) { hold(count); }
  T* data() { return reinterpret_cast<T*>(lines_.data()); }
  const T* data() const { return reinterpret_cast<const T*>(lines_.data()); }

  // Makes room for `count` numbers at least.
  void hold(int64_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (lines > lines_.size()) lines_.resize(lines);
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

// ---------------------------------------------------------------------- a sum

constexpr int64_t kLanes = 16;

// Joins the upper half of the lanes to the lower, until one is left.
template <int64_t kHalf = kLanes / 2, typename Join>
inline float fold(float* lanes, Join join) {
  for (int64_t lane = 0; lane < kHalf; ++lane) lanes[lane] = join(lanes[lane], lanes[lane + kHalf]);
  if constexpr (kHalf > 1)
    return fold<kHalf / 2>(lanes, join);
  else
    return lanes[0];
}

// Sixteen running sums, element i to number i % 16, folded in halves at the end. The order depends on nothing but the
// index: not on the vector width, the alignment or the number of threads, so a row's sum has the same bits wherever
// and beside whomever it is computed.
class OrderedSum {
 public:
  // Adds term(0) + … + term(count - 1).
  template <typename Term>
  void add(int64_t count, Term term) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes_[lane] += term(i + lane);  // one vector addition
    for (; i < count; ++i) lanes_[i % kLanes] += term(i);
  }

  float total() const {
    float lanes[kLanes];
    std::memcpy(lanes, lanes_, sizeof(lanes));
    return fold(lanes, [](float a, float b) { return a + b; });
  }

 private:
  float lanes_[kLanes] = {};
};

// The largest of `count` values, a multiple of sixteen; NaN is passed over.
inline float largest_of(const float* values, int64_t count) {
  // Sixteen floats as one: a type of GCC and Clang, with the operators of a number. A loop over sixteen floats that
  // compares would be taken apart instead.
  typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));
  Lanes largest = Lanes{} - std::numeric_limits<float>::infinity(), next;
  for (int64_t i = 0; i < count; i += kLanes) {
    std::memcpy(&next, values + i, sizeof(next));
    largest = next > largest ? next : largest;
  }
  float lanes[kLanes];
  std::memcpy(lanes, &largest, sizeof(lanes));
  return fold(lanes, [](float a, float b) { return b > a ? b : a; });
}

// ---------------------------------------------------------------------- exp

// e^x for x <= 0, to within two units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (the
// coefficients of Cephes' expf), and 2^n put into the exponent. Below -87.3, where float32 would have to become
// denormal, 0; NaN stays NaN. The library's expf is as exact, but a call, and a loop with a call is not vectorised.
inline float exp_of_nonpositive(float x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kLowest = -87.3f;
  // Added to a small number it leaves no room for a fraction: the sum is rounded, and its last bits are the integer.
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  const float clamped = x < kLowest ? kLowest : x;
  const float rounded = clamped * kLog2e + kRounder, n = rounded - kRounder;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < kLowest ? 0.0f : p * power;
}

// ---------------------------------------------------------------------- activations

inline float sigmoid(float x) {
  const float small = exp_of_nonpositive(x > 0 ? -x : x);
  return (x > 0 ? 1.0f : small) / (1.0f + small);
}

// gate * sigmoid(gate) is SiLU; with the gate steepened it is the tanh form of GELU (see gated_act.py).
template <bool silu>
inline float activated(float gate) {
  return gate * sigmoid(silu ? gate : 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate));
}

// ---------------------------------------------------------------------- types

// Calls `function` with a number of a tensor's element type.
template <typename Function>
void with_type(const at::Tensor& tensor, Function function) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return function(float{});
    case at::kBFloat16:
      return function(c10::BFloat16{});
    case at::kHalf:
      return function(c10::Half{});
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "float32, bfloat16 or float16, not ", tensor.scalar_type());
  }
}

// The same for kernels that are made of matrix products, which come in two types.
template <typename Function>
void with_product_type(const at::Tensor& tensor, Function function) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return function(float{});
    case at::kBFloat16:
      return function(c10::BFloat16{});
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "float32 or bfloat16, not ", tensor.scalar_type());
  }
}

// Rows that a thread should take at least: fewer, and handing them out costs more than computing them.
inline int64_t rows_per_task(int64_t columns) {
  constexpr int64_t kElements = 16384;
  return columns >= kElements ? 1 : kElements / (columns > 0 ? columns : 1);
}

}  // namespace infer
