// Products of rows and a block of weights in groups, in three ways: see grouped.py for the form of panels.
//
// A way widens a block of a panel, 32 inputs of 32 outputs, to its type, exactly, and multiplies rows of x by the
// block, group by group. Each way computes all numbers of rows alike, so that a row's bits depend on no other row.
#pragma once

#include "amx.h"
#include "few_rows.h"
#include "widener.h"

#include <algorithm>
#include <optional>

namespace infer {

constexpr int64_t kOutputs = 32;  // of a panel
constexpr int64_t kInputs = 32;   // of a block
constexpr int64_t kWeights = kOutputs * kInputs;
constexpr int64_t kTile = 32;  // rows of one product: two matrix tiles
constexpr int64_t kAhead = 4096;  // bytes of a panel that are fetched ahead

// A row of the table in grouped.py.
struct Panel {
  int64_t byte, first, outputs, bits, blocks, groups, mins;

  // Where a block and its unit begin.
  int64_t unit(int64_t block) const { return byte + block / blocks * unit_bytes(); }
  int64_t block(int64_t block) const { return unit(block) + header_bytes() + block % blocks * block_bytes(); }

  int64_t factors() const { return 1 + mins; }
  int64_t header_bytes() const { return 2 * kOutputs * factors(); }
  int64_t block_bytes() const { return kOutputs * (4 * bits + groups * factors()); }
  int64_t unit_bytes() const { return header_bytes() + blocks * block_bytes(); }
  int64_t sums() const { return std::max<int64_t>(groups, 1); }  // of a block
  int32_t zero() const { return mins || bits == 8 ? 0 : 1 << (bits - 1); }
};

inline const Panel* panels_of(const at::Tensor& table) {
  TORCH_CHECK(table.size(1) * sizeof(int64_t) == sizeof(Panel), "a panel has ", sizeof(Panel) / 8, " numbers");
  return reinterpret_cast<const Panel*>(table.const_data_ptr<int64_t>());
}

// to[i] = from[i], 32 float16 numbers.
inline void widen_halves(const uint8_t* from, float* to) {
#ifdef __F16C__
  for (int64_t i = 0; i < kOutputs; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
#else
  for (int64_t i = 0; i < kOutputs; ++i) to[i] = float(reinterpret_cast<const c10::Half*>(from)[i]);
#endif
}

// A block of a panel.
struct Place {
  const Panel& panel;
  const uint8_t *unit, *block;
  int64_t index = 0, in_unit = 0;

  Place(const uint8_t* bytes, const Panel& panel)
      : panel(panel), unit(bytes + panel.byte), block(unit + panel.header_bytes()) {}

  const uint32_t* words() const { return reinterpret_cast<const uint32_t*>(block); }
  const int8_t* codes() const { return reinterpret_cast<const int8_t*>(block + 4 * panel.bits * kOutputs); }

  void fetch_ahead() const {
    for (int64_t byte = 0; byte < panel.block_bytes(); byte += 64) __builtin_prefetch(block + kAhead + byte);
  }

  void advance() {
    ++index;
    block += panel.block_bytes();
    if (++in_unit == panel.blocks) {
      in_unit = 0;
      unit = block;
      block += panel.header_bytes();
    }
  }
};

// The scales of a block's groups, times a unit, and the mins of its only group.
struct Factors {
  alignas(64) float scales[2][kOutputs], mins[kOutputs];
};

class FactorReader {
 public:
  explicit FactorReader(float unit) : unit_(unit) {}

  // Returns the factors of a block, until the next is read. Blocks must be read in order.
  const Factors& read(const Place& at) {
    auto& [scales, mins] = factors_;
    const int64_t groups = at.panel.groups;
    float *scales_of_unit = groups ? unit_scales_ : scales[0], *mins_of_unit = groups ? unit_mins_ : mins;
    if (at.in_unit == 0) {
      widen_halves(at.unit, scales_of_unit);
      for (int64_t i = 0; i < kOutputs; ++i) scales_of_unit[i] *= unit_;
      if (at.panel.mins) widen_halves(at.unit + 2 * kOutputs, mins_of_unit);
    }
    for (int64_t group = 0; group < groups; ++group) multiply(unit_scales_, at.codes() + group * kOutputs, scales[group]);
    if (groups && at.panel.mins) multiply(unit_mins_, at.codes() + groups * kOutputs, mins);
    return factors_;
  }

 private:
  Factors factors_;
  alignas(64) float unit_scales_[kOutputs], unit_mins_[kOutputs];
  float unit_;

  static void multiply(const float* units, const int8_t* codes, float* to) {
    for (int64_t i = 0; i < kOutputs; i += kWide) store(load(units + i) * widened(codes + i), to + i);
  }
};

// Calls function(i) with the constants 0 to count - 1.
template <int count, typename Function>
void for_constants(const Function& function) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (function(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, count>{});
}

// Calls function(bits) with a constant.
template <typename Function>
void with_bits(int64_t bits, const Function& function) {
  switch (bits) {
    case 4: return function(std::integral_constant<int64_t, 4>{});
    case 5: return function(std::integral_constant<int64_t, 5>{});
    case 6: return function(std::integral_constant<int64_t, 6>{});
    case 8: return function(std::integral_constant<int64_t, 8>{});
    default: TORCH_CHECK(false, "no weights of ", bits, " bits");
  }
}

// Returns q of an input in a block, for one output: word(w) is its word w.
template <int64_t bits, typename Word>
int32_t number_at(int64_t input, int32_t zero, const Word& word) {
  if constexpr (bits == 8) {
    return word(input / 4) << (24 - input % 4 * 8) >> 24;
  } else {
    const int64_t half = input % 2 * 16, nibble = input / 2 % 2 * 2 + input / 16, w = input % 16 / 4;
    int32_t number = (word(w) >> (half + 4 * nibble)) & 15;
    for (int64_t bit = 4; bit < bits; ++bit) number |= ((word(bit) >> (half + 4 * w + nibble)) & 1) << bit;
    return number - zero;
  }
}

// ---------------------------------------------------------------------- x

// x in the order in which panels meet it, slab after slab of rows: [slabs, blocks, rows of a slab, 32] in type T, and
// each block's sum, [slabs, blocks, rows of a slab] in float32. Rows beyond those of x are zeros, up to `padded`.
template <typename T>
struct Blocks {
  int64_t rows, padded, slab, blocks;
  Buffer<T> numbers;
  Buffer<float> sums;

  template <typename From>
  Blocks(const From* x, int64_t stride, int64_t rows, int64_t inputs, int64_t padded, int64_t slab)
      : rows(rows), padded(padded), slab(slab), blocks(inputs / kInputs) {
    const int64_t held = (padded + slab - 1) / slab * slab;
    numbers.hold(held * inputs);
    sums.hold(held * blocks);
    parallel_for(padded, rows_per_task(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t block = 0; block < blocks; ++block) {
          T* to = numbers.data() + place(block, row) * kInputs;
          float parts[kLanes] = {};
          for (int64_t i = 0; i < kInputs; ++i) {
            const From number = row < rows ? x[row * stride + block * kInputs + i] : From(0.0f);
            if constexpr (std::is_same_v<T, From>)
              to[i] = number;
            else
              to[i] = to_float(number);
            parts[i % kLanes] += to_float(number);
          }
          sums.data()[place(block, row)] = fold(parts, [](float a, float b) { return a + b; });
        }
    });
  }

  int64_t place(int64_t block, int64_t row) const { return (row / slab * blocks + block) * slab + row % slab; }
  const T* block(int64_t index, int64_t row) const { return numbers.data() + place(index, row) * kInputs; }
  const float* sum(int64_t index, int64_t row) const { return sums.data() + place(index, row); }
};

// ---------------------------------------------------------------------- float32

using Words = Vector<uint32_t>;
typedef int8_t Bytes __attribute__((vector_size(sizeof(Words))));
typedef uint16_t Halves __attribute__((vector_size(sizeof(Words))));

// Returns numbers 4 step to 4 step + 3 of a register of outputs, in the order of `kInputOfByte`: a byte with a sign each.
// word(i) is the word i of these outputs.
template <int64_t bits, typename Word>
Words four_numbers(uint64_t step, Bytes zero, const Word& word) {
  if constexpr (bits == 8) return word(step);
  const uint64_t half = step / 4, w = step % 4;
  Words numbers = (word(w) >> 4 * half) & 0x0f0f0f0f;
  if constexpr (bits > 4) {
    // Bits 0 and 2 of each half belong to its two bytes. A product moves both to their places, and to others.
    const auto plane = [&](int64_t bit) { return (word(bit) >> (4 * w + half)) & 0x00050005; };
    Words further = plane(4);
    if constexpr (bits > 5) further |= plane(5) << 1;
    const auto moved = reinterpret_cast<Words>(reinterpret_cast<Halves>(further) * 0x0410);
    numbers |= moved & (bits == 5 ? 0x10101010 : 0x30303030);
  }
  return reinterpret_cast<Words>(reinterpret_cast<Bytes>(numbers) - zero);
}

template <int64_t bits>
constexpr int64_t kInputOfByte[4] = {0, bits == 8 ? 1 : 2, bits == 8 ? 2 : 1, 3};

// Returns byte `byte` of each word as the highest byte of an int32: the number times 2^24, exactly.
template <int64_t byte>
Vector<float> widened_byte(Words words) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // one instruction instead of two
  constexpr int32_t kZeros = 0x00808080, a = byte << 24 | kZeros, b = a + (4 << 24), c = a + (8 << 24), d = a + (12 << 24);
  const __m256i places = _mm256_set_epi32(d, c, b, a, d, c, b, a);
  return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(reinterpret_cast<__m256i>(words), places));
#else
  const Words highest = (words << (24 - 8 * byte)) & 0xff000000;
  return __builtin_convertvector(reinterpret_cast<Vector<int32_t>>(highest), Vector<float>);
#endif
}

constexpr float kByteUnit = 0x1p24f;

// The numbers of a block for `parts` registers of outputs, widened where rows meet them. `words` begins at the first of
// these outputs.
template <int64_t parts, int64_t bits>
class Stored {
 public:
  Stored(const uint32_t* words, const Panel& panel) : words_(words), zero_(Bytes{} + int8_t(panel.zero())) {}

  void read(uint64_t step) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = part * kWide;
      const uint32_t* own = words_ + first / kLanes * bits * kLanes + first % kLanes;
      numbers_[part] = four_numbers<bits>(step, zero_, [&](int64_t index) { return load(own + index * kLanes); });
    }
  }

  template <int64_t byte>
  Vector<float> number(int64_t part) const {
    return widened_byte<byte>(numbers_[part]);
  }

 private:
  const uint32_t* words_;
  Bytes zero_;
  Words numbers_[parts];
};

// The same of a block that was widened before: [32 inputs in the order in which they are met, 32 outputs].
class Widened {
 public:
  explicit Widened(const float* from) : from_(from) {}

  void read(uint64_t step) { own_ = from_ + 4 * step * kOutputs; }

  template <int64_t byte>
  Vector<float> number(int64_t part) const {
    return load(own_ + byte * kOutputs + part * kWide);
  }

 private:
  const float *from_, *own_ = from_;
};

// Widens a block as `Widened` reads it.
template <int64_t bits>
void widen_block(const uint32_t* words, const Panel& panel, float* to) {
  constexpr int64_t parts = kOutputs / kWide;
  Stored<parts, bits> numbers(words, panel);
  for (uint64_t step = 0; step < 8; ++step, to += 4 * kOutputs) {
    numbers.read(step);
    for_constants<4>([&](auto byte) {
      for (int64_t part = 0; part < parts; ++part)
        store(numbers.template number<byte>(part), to + byte * kOutputs + part * kWide);
    });
  }
}

// Adds a block's products to sums [rows, 32], for `parts` registers of outputs. All rows of x [rows, 32] meet a number
// in registers. A group's sum adds input after input. Then the group's scale, divided by `kByteUnit`, multiplies it.
// Numbers, scales, mins and sums begin at the first of these outputs. Not inlined: in a long function the compiler
// would keep sums in memory.
template <int64_t rows, int64_t parts, int64_t bits, typename Numbers>
__attribute__((noinline)) void add_block(
    Numbers numbers, const Panel& panel, const float* scales, const float* mins, const float* x, const float* totals,
    float* sums) {
  const uint64_t steps = panel.groups == 2 ? 4 : 8;
  for (uint64_t begin = 0; begin < 8; begin += steps, scales += kOutputs) {
    Vector<float> held[rows][parts] = {};
    for (uint64_t step = begin; step < begin + steps; ++step) {
      numbers.read(step);
      for_constants<4>([&](auto byte) {
        const float* own = x + 4 * step + kInputOfByte<bits>[byte];
        Vector<float> widened[parts];
        for (int64_t part = 0; part < parts; ++part) widened[part] = numbers.template number<byte>(part);
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t part = 0; part < parts; ++part) held[row][part] += widened[part] * own[row * kInputs];
      });
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t part = 0; part < parts; ++part) {
        float* to = sums + row * kOutputs + part * kWide;
        auto sum = load(to) + load(scales + part * kWide) * held[row][part];
        if (panel.mins) sum -= load(mins + part * kWide) * totals[row];
        store(sum, to);
      }
  }
}

// Computes with float32. A slab is the rows of one call.
struct ByFloats {
  using T = float;
  static constexpr int64_t kRows = kFloatSums / 2;
  static constexpr int64_t kBlocks = 8;  // widened at a time: 32 kB

  alignas(64) float weights[kBlocks][kWeights];
  Factors factors[kBlocks];

  static int64_t padded(int64_t rows) { return rows; }
  static int64_t slab(int64_t rows) { return std::clamp<int64_t>(rows, 1, kRows); }
  void prepare(const Panel&, int64_t) {}
};

// ---------------------------------------------------------------------- bfloat16

#ifdef INFER_FEW_ROWS

// The bfloat16 numbers that stored ones stand for, for all bits that an instruction reads.
struct Numbers {
  alignas(64) uint16_t bits[64];
  Numbers(int64_t count, int64_t zero) {
    for (int64_t i = 0; i < 64; ++i) bits[i] = from_float<c10::BFloat16>(float(i % count - zero)).x;
  }
};

template <int64_t bits>
const Numbers& numbers_of(const Panel& panel) {
  static const Numbers counted(1 << bits, 0), with_signs(1 << bits, 1 << (bits - 1));
  return panel.mins ? counted : with_signs;
}

// Moves bit `from` of each 16-bit number to bit `to`.
template <int from, int to>
__m512i moved(__m512i numbers) {
  if constexpr (from < to) return _mm512_slli_epi16(numbers, to - from);
  if constexpr (from > to) return _mm512_srli_epi16(numbers, from - to);
  return numbers;
}

// Returns the bits of `a` where `mask` has ones, and of `b` elsewhere.
inline __m512i select(__m512i a, __m512i b, int16_t mask) {
  return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi16(mask), 0xe4);
}

// Computes with pairs of bfloat16. Two sums of a group take even and odd pairs, so that an addition need not wait for
// the one before it.
struct ByPairs {
  using T = c10::BFloat16;
  static constexpr int64_t kRows = kTile;

  // All rows are one slab. Beyond a tile, rows are added up to whole tiles.
  static int64_t padded(int64_t rows) {
    return rows <= kTile / 2 ? rows : (rows + kTile / 2 - 1) / (kTile / 2) * (kTile / 2);
  }
  static int64_t slab(int64_t rows) { return std::max<int64_t>(padded(rows), 1); }
  void prepare(const Panel&, int64_t) {}

  // A block's words [2, bits, 16] -> weights [2 halves, 16 pairs of inputs, 16 outputs, 2].
  template <int64_t bits>
  static void widen(const uint32_t* words, const Panel& panel, c10::BFloat16* to) {
    const auto word = [&](int64_t index) { return _mm512_loadu_si512(words + index * kLanes); };
    const auto put = [&](int64_t pair, __m512i numbers) { std::memcpy(to + pair * 2 * kLanes, &numbers, 64); };
    if constexpr (bits == 8) {
      const Widener widener;
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t i = 0; i < 8; ++i) {
          __m512i first, second;
          widener.by_fours(word(half * bits + i), first, second);
          put(half * 16 + 2 * i, first);
          put(half * 16 + 2 * i + 1, second);
        }
    } else {
      const Numbers& numbers = numbers_of<bits>(panel);
      const __m512i low = _mm512_load_si512(numbers.bits), high = _mm512_load_si512(numbers.bits + 32);
      for (int64_t half = 0; half < 2; ++half) {
        const auto one = [&](auto w, auto nibble) {
          // Bits above those of a number stay: the instruction that looks up does not read them.
          __m512i index = _mm512_srli_epi16(word(half * bits + w), 4 * nibble);
          if constexpr (bits > 4) index = select(index, moved<w * 4 + nibble, 4>(word(half * bits + 4)), 0xf);
          if constexpr (bits > 5) index = select(index, moved<w * 4 + nibble, 5>(word(half * bits + 5)), 0x1f);
          put(half * 16 + 2 * w + nibble / 2 + nibble % 2 * 8,
              bits > 5 ? _mm512_permutex2var_epi16(low, index, high) : _mm512_permutexvar_epi16(index, low));
        };
        for_constants<4>([&](auto w) { for_constants<4>([&](auto nibble) { one(w, nibble); }); });
      }
    }
  }

  template <int64_t rows>
  static void multiply_rows(
      const c10::BFloat16* x, const c10::BFloat16* weights, int64_t begin, int64_t end, float* products) {
    for (int64_t half = 0; half < 2; ++half) {
      __m512 sums[rows][2] = {};
      for (int64_t pair = begin; pair < end; pair += 2)
        for (int64_t i = 0; i < 2; ++i) {
          const auto factors = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weights + (half * 16 + pair + i) * kInputs));
          for (int64_t row = 0; row < rows; ++row)
            sums[row][i] =
                _mm512_dpbf16_ps(sums[row][i], pair_in_all_lanes(x + row * kInputs + 2 * (pair + i)), factors);
        }
      for (int64_t row = 0; row < rows; ++row)
        _mm512_storeu_ps(products + row * kOutputs + half * kLanes, sums[row][0] + sums[row][1]);
    }
  }

  void multiply(
      const c10::BFloat16* x, int64_t rows, const c10::BFloat16* weights, int64_t group, int64_t groups,
      float* products) {
    const int64_t pairs = kInputs / 2 / groups, first = group * pairs;
    in_groups<8>(rows, [&](auto n, int64_t row) {
      multiply_rows<n>(x + row * kInputs, weights, first, first + pairs, products + row * kOutputs);
    });
  }
};

#endif

#ifdef INFER_AMX

// Computes with matrix tiles: one instruction has the sums of 32 inputs, in an order of its own.
struct ByTiles : ByPairs {
  std::optional<AmxShapes> shapes;
  int64_t groups = 0;

  void prepare(const Panel& panel, int64_t rows) {
    if (groups == panel.sums()) return;
    groups = panel.sums();
    shapes.emplace(rows, kInputs / groups);
  }

  void multiply(
      const c10::BFloat16* x, int64_t rows, const c10::BFloat16* weights, int64_t group, int64_t groups,
      float* products) {
    const int64_t inputs = kInputs / groups;
    const c10::BFloat16 *from = weights + group * inputs * kLanes, *others = from + kInputs * kLanes;
    tiles_read_memory();
    _tile_loadd(6, from, 64);
    _tile_loadd(7, others, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, x + group * inputs, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > kAmxRows) {
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(5, x + kAmxRows * kInputs + group * inputs, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_stored(2, products + kAmxRows * kOutputs, 4 * kOutputs);
      _tile_stored(3, products + kAmxRows * kOutputs + kLanes, 4 * kOutputs);
    }
    _tile_stored(0, products, 4 * kOutputs);
    _tile_stored(1, products + kLanes, 4 * kOutputs);
    tiles_read_memory();
  }
};

#endif

}  // namespace infer
