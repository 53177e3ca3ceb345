// int8 numbers to bfloat16, exactly, on processors that multiply pairs of bfloat16 (AVX-512).
#pragma once

#include "few_rows.h"

#ifdef INFER_FEW_ROWS

namespace infer {

// The lower and upper bytes of the bfloat16 numbers 0 to 127.
struct BytesOfNumbers {
  alignas(64) uint8_t lower[128], upper[128];
  BytesOfNumbers() {
    for (int i = 0; i < 128; ++i) {
      const uint16_t bits = from_float<c10::BFloat16>(float(i)).x;
      lower[i] = uint8_t(bits);
      upper[i] = uint8_t(bits >> 8);
    }
  }
};
inline const BytesOfNumbers kBytes;

// Widens 64 weights at a time by looking up both bytes of their magnitudes, 64 bytes by one instruction: fewer
// instructions than by way of int32 and float32.
class Widener {
 public:
  // 64 weights -> 32 in each of two registers, in order.
  void operator()(const int8_t* from, __m512i& first, __m512i& second) const {
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    unpack(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(from)), first, second);
  }

  // Sixteen fours of weights -> the first two of each four, and the last two of each.
  void by_fours(__m512i fours, __m512i& first, __m512i& second) const {
    const __m512i order = _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100);
    unpack(_mm512_shuffle_epi8(fours, order), first, second);
  }

 private:
  // Of each lane of 16 weights, the lower half goes to `first`, the upper one to `second`.
  void unpack(__m512i weights, __m512i& first, __m512i& second) const {
    const __m512i magnitudes = _mm512_abs_epi8(weights);
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], magnitudes, lower_[1]);
    __m512i upper = _mm512_permutex2var_epi8(upper_[0], magnitudes, upper_[1]);
    const __m512i sign = _mm512_set1_epi8(-128);
    upper = _mm512_ternarylogic_epi32(upper, weights, sign, 0xf8);  // upper | weights & sign
    // -128 has no magnitude among those; its lower byte is that of 0.
    upper = _mm512_mask_mov_epi8(upper, _mm512_cmpeq_epi8_mask(weights, sign), _mm512_set1_epi8(int8_t(0xc3)));
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
  }

  __m512i lower_[2] = {_mm512_load_si512(kBytes.lower), _mm512_load_si512(kBytes.lower + 64)};
  __m512i upper_[2] = {_mm512_load_si512(kBytes.upper), _mm512_load_si512(kBytes.upper + 64)};
};

}  // namespace infer

#endif
