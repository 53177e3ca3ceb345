// Few rows times a matrix, written out: the sums stay in registers, and numbers are read where they lie.
//
// PyTorch's small product has a start and an end in every call, takes its right side in a form of its own, and computes
// sixteen rows where there are three. For few rows that takes longer than the product. The loops here add the same
// numbers in the same order, one sum for each output, by the same instructions as the library. So they have its bits,
// and a row may be computed either way. `has_librarys_bits` tries that once: on a processor with matrix tiles the
// library uses those for bfloat16, and adds in another order (see amx.h).
//
// float32 is written in a vector type of GCC and Clang, for any processor, and its right side may be narrower: numbers
// are widened on their way to the registers. bfloat16 is written for processors that multiply pairs of it (AVX-512).
#pragma once

#include "native.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define INFER_FEW_ROWS  // the instructions for it
#endif

namespace infer {

// Calls function(n) with a constant n from 1 to `most` that equals `value`.
template <int64_t most, typename Function>
void with_constant(int64_t value, const Function& function) {
  if constexpr (most > 1)
    if (value < most) return with_constant<most - 1>(value, function);
  function(std::integral_constant<int64_t, most>{});
}

// Calls function(n, first) for `rows` rows in nearly equal groups: n rows, a constant of at most `most`, from `first`.
template <int64_t most, typename Function>
void in_groups(int64_t rows, const Function& function) {
  const int64_t groups = (rows + most - 1) / most, each = (rows + groups - 1) / groups;
  for (int64_t first = 0; first < rows; first += each)
    with_constant<most>(std::min(each, rows - first), [&](auto count) { function(count, first); });
}

// Pseudo-random numbers between -1 and 1, the same in every call.
template <typename T>
std::vector<T> numbers_to_try(int64_t count, uint32_t state) {
  std::vector<T> numbers(count);
  for (auto& number : numbers)
    number = from_float<T>(float(int32_t(state = state * 1664525 + 1013904223)) * 0x1p-31f);
  return numbers;
}

// Returns whether multiply(x, panel, sums) has the bits of the library's product, for 1,024 inputs: x [rows, 1024]
// and panel [1024 / pair, outputs, pair] are T, sums [rows, outputs] float32. bfloat16 numbers come in pairs.
template <typename T, int64_t rows, int64_t outputs, typename Multiply>
bool has_librarys_bits_with(Multiply multiply) {
  constexpr int64_t kInputs = 1024;
  constexpr bool paired = sizeof(T) == 2;
  const auto x = numbers_to_try<T>(rows * kInputs, 1), panel = numbers_to_try<T>(kInputs * outputs, 2);
  alignas(64) float theirs[rows * outputs], ours[rows * outputs];
  at::native::cpublas::brgemm(
      rows, outputs, kInputs, kInputs, outputs, outputs, false, x.data(), panel.data(), theirs, paired);
  at::native::cpublas::brgemm_release(paired);
  multiply(x.data(), panel.data(), kInputs, ours);
  return std::memcmp(ours, theirs, sizeof(ours)) == 0;
}

// ---------------------------------------------------------------------- float32

#ifdef __AVX512F__
constexpr int64_t kWide = 16;       // numbers in a register
constexpr int64_t kFloatSums = 24;  // registers that hold sums; the others hold what is multiplied
#else
constexpr int64_t kWide = 8;
constexpr int64_t kFloatSums = 12;
#endif

template <typename Number>
struct VectorOf {
  typedef Number type __attribute__((vector_size(kWide * sizeof(Number))));
};
template <typename Number>
using Vector = typename VectorOf<Number>::type;

// The same anywhere in memory.
typedef Vector<float> Unaligned __attribute__((aligned(alignof(float)), may_alias));

template <typename Number>
Vector<Number> load(const Number* from) {
  Vector<Number> numbers;
  std::memcpy(&numbers, from, sizeof(numbers));
  return numbers;
}

inline void store(const Vector<float>& numbers, float* to) { *reinterpret_cast<Unaligned*>(to) = numbers; }

// A register of numbers as float32, which holds each of them exactly.
inline Vector<float> widened(const float* from) { return load(from); }

#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC takes these vectors apart in conversions
inline Vector<float> widened(const c10::BFloat16* from) {
  const __m256i numbers = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(numbers, 16));
}

inline Vector<float> widened(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#else
inline Vector<float> widened(const c10::BFloat16* from) {
  const auto numbers = __builtin_convertvector(load(reinterpret_cast<const uint16_t*>(from)), Vector<uint32_t>);
  return reinterpret_cast<Vector<float>>(numbers << 16);
}

#ifdef __AVX512F__  // GCC converts these one by one
inline Vector<float> widened(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#else
inline Vector<float> widened(const int8_t* from) { return __builtin_convertvector(load(from), Vector<float>); }
#endif
#endif

// sums [rows, parts registers] += x [rows, inputs] times the numbers that begin at place(input), for all inputs in
// order. If `begun` is false, the sums begin at zero. Not inlined: in a long function the compiler would keep the sums
// in memory.
template <int64_t rows, int64_t parts, typename Place>
__attribute__((noinline)) void add_products(
    const float* x, int64_t stride, int64_t inputs, Place place, float* sums, int64_t sums_stride, bool begun) {
  Vector<float> held[rows][parts];
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t part = 0; part < parts; ++part)
      held[row][part] = begun ? load(sums + row * sums_stride + part * kWide) : Vector<float>{};
  for (int64_t input = 0; input < inputs; ++input) {
    const auto* from = place(input);
    Vector<float> factors[parts];
    for (int64_t part = 0; part < parts; ++part) factors[part] = widened(from + part * kWide);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t part = 0; part < parts; ++part) held[row][part] += factors[part] * x[row * stride + input];
  }
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t part = 0; part < parts; ++part) store(held[row][part], sums + row * sums_stride + part * kWide);
}

// Returns whether sums of 1,024 float32 products have the library's bits, tried once.
inline bool has_librarys_bits(float) {
  constexpr int64_t kRows = 4, kOutputs = 2 * kWide;
  static const bool same = has_librarys_bits_with<float, kRows, kOutputs>(
      [](const float* x, const float* panel, int64_t inputs, float* sums) {
        const auto place = [=](int64_t input) { return panel + input * kOutputs; };
        add_products<kRows, 2>(x, inputs, inputs, place, sums, kOutputs, false);
      });
  return same;
}

// ---------------------------------------------------------------------- bfloat16

#ifdef INFER_FEW_ROWS

// Two neighbouring bfloat16 numbers in all lanes.
inline __m512bh pair_in_all_lanes(const c10::BFloat16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// Returns whether sums of 1,024 bfloat16 products have the library's bits, tried once.
inline bool has_librarys_bits(c10::BFloat16) {
  constexpr int64_t kTried = 32;  // rows, and outputs
  static const bool same = has_librarys_bits_with<c10::BFloat16, kTried, kTried>(
      [](const c10::BFloat16* x, const c10::BFloat16* panel, int64_t inputs, float* sums) {
        for (int64_t row = 0; row < kTried; ++row)
          for (int64_t output = 0; output < kTried; output += kLanes) {
            __m512 sum = {};
            for (int64_t input = 0; input < inputs; input += 2) {
              const auto factors = _mm512_loadu_si512(panel + input * kTried + 2 * output);
              const auto pair = pair_in_all_lanes(x + row * inputs + input);
              sum = _mm512_dpbf16_ps(sum, pair, reinterpret_cast<__m512bh>(factors));
            }
            _mm512_store_ps(sums + row * kTried + output, sum);
          }
      });
  return same;
}

#else

inline bool has_librarys_bits(c10::BFloat16) { return false; }

#endif

}  // namespace infer
