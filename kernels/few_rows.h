// Few rows times bfloat16 numbers, written out: the sums stay in registers, and numbers are read where they lie.
//
// PyTorch's small product has a start and an end in every call, takes its right side in a form of its own, and computes
// sixteen rows where there are three. For few rows that takes longer than the product. The loops here add pairs of
// neighbouring numbers in their order, one sum for each output, by the same instruction as the library. So they have
// its bits, and a row may be computed either way. `has_librarys_bits` tries that once: on a processor with matrix tiles
// (AMX) the library uses those, and adds in an order of their own. Then it computes few rows, too.
#pragma once

#include "native.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define INFER_FEW_ROWS  // the instructions for it
#endif

namespace infer {

#ifdef INFER_FEW_ROWS

// Two neighbouring bfloat16 numbers in all lanes.
inline __m512bh pair_in_all_lanes(const c10::BFloat16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

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

// Returns whether sums of a thousand products have the library's bits, tried once.
inline bool has_librarys_bits() {
  static const bool same = [] {
    constexpr int64_t kInputs = 1024, kTried = 32;  // rows, and outputs
    std::vector<c10::BFloat16> x(kTried * kInputs), panel(kInputs * kTried);
    uint32_t state = 1;
    for (auto* values : {&x, &panel})
      for (auto& value : *values)
        value = from_float<c10::BFloat16>(float(int32_t(state = state * 1664525 + 1013904223)) * 0x1p-31f);
    alignas(64) float theirs[kTried * kTried], ours[kTried * kTried];
    at::native::cpublas::brgemm(
        kTried, kTried, kInputs, kInputs, kTried, kTried, false, x.data(), panel.data(), theirs, true);
    at::native::cpublas::brgemm_release(true);
    for (int64_t row = 0; row < kTried; ++row)
      for (int64_t output = 0; output < kTried; output += kLanes) {
        __m512 sum = {};
        for (int64_t input = 0; input < kInputs; input += 2) {
          const auto factors = _mm512_loadu_si512(panel.data() + input * kTried + 2 * output);
          const auto pair = pair_in_all_lanes(x.data() + row * kInputs + input);
          sum = _mm512_dpbf16_ps(sum, pair, reinterpret_cast<__m512bh>(factors));
        }
        _mm512_store_ps(ours + row * kTried + output, sum);
      }
    return std::memcmp(ours, theirs, sizeof(ours)) == 0;
  }();
  return same;
}

#else

inline bool has_librarys_bits() { return false; }

#endif

}  // namespace infer
