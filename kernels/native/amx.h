// Few bfloat16 rows times a panel of weights by matrix tiles, on processors that have them (Intel AMX).
//
// A tile is a register of 16 rows of 64 bytes. One instruction multiplies two tiles and adds the product to a third:
//
//     x        [up to 16 rows, 32 inputs]
//     weights  [16 pairs of inputs, 16 outputs, 2], as they lie in a panel
//     sums     [up to 16 rows, 16 outputs] in float32
//
// For each sum the instruction adds the products of the 16 even inputs in order, and those of the 16 odd inputs
// likewise. It adds these two to each other, and the result to the sum. A row's sums do not depend on other rows.
// PyTorch's product takes the inputs in order, too, 32 at a time, so both give a row the same bits.
// `amx_has_librarys_bits` tries that once.
#pragma once

#include "few_rows.h"

#if defined(INFER_FEW_ROWS) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define INFER_AMX

#include <ATen/cpu/Utils.h>

namespace infer {

constexpr int64_t kAmxRows = 16;    // of a tile
constexpr int64_t kAmxInputs = 32;  // of one instruction

// The compiler does not know that tiles are loaded from memory: it must not move stores behind this.
inline void tiles_read_memory() { asm volatile("" ::: "memory"); }

// Sets the shapes of this thread's tile registers for 1 to 32 rows and 16 or 32 inputs, and clears them at its end.
// Registers 0 to 3 hold sums, 4 and 5 hold x, 6 and 7 hold weights. With more than 16 rows, 2, 3 and 5 hold the rows
// after the first 16.
class AmxShapes {
 public:
  explicit AmxShapes(int64_t rows, int64_t inputs = kAmxInputs) {
    struct {  // as the instruction reads it
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const int64_t first = std::min(rows, kAmxRows), others = rows > kAmxRows ? rows - kAmxRows : first;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes[tile] = tile == 4 || tile == 5 ? uint16_t(2 * inputs) : 64;
      shapes.rows[tile] = uint8_t(tile > 5 ? inputs / 2 : tile == 2 || tile == 3 || tile == 5 ? others : first);
    }
    tiles_read_memory();
    _tile_loadconfig(&shapes);
  }
  // The library keeps its shapes from one product to the next of the same size, so it must be told that they are gone.
  ~AmxShapes() {
    _tile_release();
    at::native::cpublas::brgemm_release(true);
  }
  AmxShapes(const AmxShapes&) = delete;
};

// x [rows, inputs] times weights -> sums [rows, outputs], for rows in one tile and 32 or 64 outputs, or for rows in two
// tiles and 32 outputs. Rows of sums, and pairs of inputs among the weights, are `panel` outputs apart.
//
// weights_of(input) returns the weights of 32 inputs, from that one on. It is called one step early: weights that it
// writes are then in the first-level cache when they are loaded. A load of a tile would wait for stores that are not,
// so it should write to two places in turn.
template <int64_t row_tiles, int64_t outputs, int64_t panel, typename WeightsOf>
void multiply_by_amx(const c10::BFloat16* x, int64_t stride, int64_t inputs, float* sums, WeightsOf weights_of) {
  static_assert(row_tiles * outputs == 32 || row_tiles * outputs == 64);
  constexpr int64_t kRowBytes = 4 * panel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const c10::BFloat16* next = weights_of(0);
  for (int64_t input = 0; input < inputs; input += kAmxInputs) {
    const c10::BFloat16* weights = next;
    if (input + kAmxInputs < inputs) next = weights_of(input + kAmxInputs);
    tiles_read_memory();
    _tile_loadd(4, x + input, 2 * stride);
    _tile_loadd(6, weights, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 32, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (row_tiles == 2) {
      _tile_loadd(5, x + kAmxRows * stride + input, 2 * stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else if constexpr (outputs == 64) {
      _tile_loadd(6, weights + 64, kRowBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, weights + 96, kRowBytes);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, kRowBytes);
  _tile_stored(1, sums + 16, kRowBytes);
  if constexpr (row_tiles * outputs == 64) {
    float* others = sums + (row_tiles == 2 ? kAmxRows * panel : 32);
    _tile_stored(2, others, kRowBytes);
    _tile_stored(3, others + 16, kRowBytes);
  }
}

// Returns whether this process may use tiles. Linux asks for permission, once.
inline bool may_use_amx() {
  static const bool may = at::cpu::init_amx();
  return may;
}

// Returns whether this process may use tiles, and sums of 1,024 products then have the library's bits. Tried once.
inline bool amx_has_librarys_bits() {
  constexpr int64_t kTried = 32;  // rows, and outputs
  static const bool same =
      may_use_amx() &&
      has_librarys_bits_with<c10::BFloat16, kTried, kTried>(
          [](const c10::BFloat16* x, const c10::BFloat16* panel, int64_t inputs, float* sums) {
            const AmxShapes shapes(kTried);
            multiply_by_amx<2, kTried, kTried>(
                x, inputs, inputs, sums, [=](int64_t input) { return panel + input * kTried; });
          });
  return same;
}

}  // namespace infer

#endif
