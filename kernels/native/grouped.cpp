// Linear layers on weights in groups: see grouped.py for the form of panels.
//
// A block of a panel, 32 inputs of 32 outputs, is widened to the type of x in the first-level cache, exactly. Rows of x
// meet it there, and a group's float32 sums are multiplied by its scales and added to those of the groups before it.
// All numbers of rows take this way. So the order of every sum, and with it a row's bits, depends on the number of
// inputs alone.
#include "amx.h"
#include "few_rows.h"
#include "widener.h"

#include <array>
#include <optional>

namespace infer {
namespace {

constexpr int64_t kOutputs = 32;      // of a panel
constexpr int64_t kInputs = 32;       // of a block
constexpr int64_t kWeights = kOutputs * kInputs;
constexpr int64_t kRowsAtOnce = 128;  // that meet a block: their sums, 16 kB, stay in the first-level cache
constexpr int64_t kTile = 32;         // rows of one product: two tiles of AMX
constexpr int64_t kAhead = 4096;      // bytes of a panel that are fetched ahead

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

const Panel* panels_of(const at::Tensor& table) {
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

// Returns q of an input in a block, for one output or a register of them: word(w) is the word w of those.
template <int64_t bits, typename Word>
auto number_at(int64_t input, int32_t zero, const Word& word) {
  if constexpr (bits == 8) {
    return word(input / 4) << (24 - input % 4 * 8) >> 24;
  } else {
    const int64_t half = input % 2 * 16, nibble = input / 2 % 2 * 2 + input / 16, w = input % 16 / 4;
    auto number = (word(w) >> (half + 4 * nibble)) & 15;
    for (int64_t bit = 4; bit < bits; ++bit) number |= ((word(bit) >> (half + 4 * w + nibble)) & 1) << bit;
    return number - zero;
  }
}

// ---------------------------------------------------------------------- x

// x in the order in which panels meet it: [blocks, rows, 32] in type T, and each block's sum, [blocks, rows] in
// float32. Beyond a tile, rows are added up to whole tiles.
template <typename T>
struct Blocks {
  int64_t rows, padded;
  Buffer<T> numbers;
  Buffer<float> sums;

  template <typename From>
  Blocks(const From* x, int64_t stride, int64_t count, int64_t inputs)
      : rows(count), padded(count <= kTile / 2 ? count : (count + kTile / 2 - 1) / (kTile / 2) * (kTile / 2)) {
    const int64_t blocks = inputs / kInputs;
    numbers.hold(blocks * padded * kInputs);
    sums.hold(blocks * padded);
    at::parallel_for(0, padded, rows_per_task(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        for (int64_t block = 0; block < blocks; ++block) {
          T* to = numbers.data() + (block * padded + row) * kInputs;
          float parts[kLanes] = {};
          for (int64_t i = 0; i < kInputs; ++i) {
            const From number = row < rows ? x[row * stride + block * kInputs + i] : From(0.0f);
            if constexpr (std::is_same_v<T, From>)
              to[i] = number;
            else
              to[i] = to_float(number);
            parts[i % kLanes] += to_float(number);
          }
          sums.data()[block * padded + row] = fold(parts, [](float a, float b) { return a + b; });
        }
    });
  }

  const T* block(int64_t index, int64_t row) const { return numbers.data() + (index * padded + row) * kInputs; }
  const float* sum(int64_t index, int64_t row) const { return sums.data() + index * padded + row; }
};

// ---------------------------------------------------------------------- float32

// Computes with float32: each group's sum adds input after input.
struct ByFloats {
  using T = float;

  void prepare(const Panel&, int64_t) {}

  // A block's words [2, bits, 16] -> weights [32 inputs, 32 outputs].
  template <int64_t bits>
  static void widen(const uint32_t* words, const Panel& panel, float* to) {
    for (int64_t output = 0; output < kOutputs; output += kWide) {
      const auto* own = reinterpret_cast<const int32_t*>(words) + output / kLanes * bits * kLanes + output % kLanes;
      const auto word = [&](int64_t index) { return load(own + index * kLanes); };
      for (int64_t input = 0; input < kInputs; ++input) {
        const auto number = number_at<bits>(input, panel.zero(), word);
        store(__builtin_convertvector(number, Vector<float>), to + input * kOutputs + output);
      }
    }
  }

  // x [rows, 32] times group `group` of `groups` of a block -> products [rows, 32].
  void multiply(const float* x, int64_t rows, const float* weights, int64_t group, int64_t groups, float* products) {
    constexpr int64_t parts = kOutputs / kWide;
    const int64_t inputs = kInputs / groups, first = group * inputs;
    in_groups<kFloatSums / parts / 2>(rows, [&](auto n, int64_t row) {
      const auto place = [=](int64_t input) { return weights + (first + input) * kOutputs; };
      add_products<n, parts>(
          x + row * kInputs + first, kInputs, inputs, place, products + row * kOutputs, kOutputs, /*begun=*/false);
    });
  }
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

// ---------------------------------------------------------------------- panels

// sums [rows, 32] += scales [32] * products [rows, 32] - mins [32] * totals [rows].
inline void add_group(
    const float* products, int64_t rows, const float* scales, const float* mins, const float* totals, float* sums) {
  for (int64_t output = 0; output < kOutputs; output += kWide) {
    const auto scale = load(scales + output), min = load(mins + output);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = sums + row * kOutputs + output;
      store(load(to) + scale * load(products + row * kOutputs + output) - min * totals[row], to);
    }
  }
}

// A block of a panel.
struct Place {
  const Panel& panel;
  const uint8_t *unit, *block;
  int64_t index = 0, in_unit = 0;

  Place(const uint8_t* bytes, const Panel& panel)
      : panel(panel), unit(bytes + panel.byte), block(unit + panel.header_bytes()) {}

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

// Products of some rows and a group, to be added to the rows' sums.
struct Product {
  alignas(64) float numbers[kTile * kOutputs];
  int64_t rows;
  const float *scales, *mins, *totals;
  float* to;

  void add() const { add_group(numbers, rows, scales, mins, totals, to); }
};

// Rows of x from `row` on times a panel -> sums [rows, 32].
template <typename By, int64_t bits>
void multiply_panel(
    By& by, const Blocks<typename By::T>& x, int64_t row, int64_t rows, const uint8_t* bytes, const Panel& panel,
    int64_t inputs, float* sums) {
  using T = typename By::T;
  const int64_t blocks = inputs / kInputs;
  alignas(64) T weights[2][kWeights];
  alignas(64) float units[2][kOutputs] = {}, factors[2][2][kOutputs] = {};
  Product products[2];
  int64_t count = 0, groups = 0;  // of products, and of groups before this
  std::memset(sums, 0, rows * kOutputs * sizeof(float));
  const auto widen = [&](const Place& at) {
    for (int64_t byte = 0; byte < panel.block_bytes(); byte += 64) __builtin_prefetch(at.block + kAhead + byte);
    By::template widen<bits>(reinterpret_cast<const uint32_t*>(at.block), panel, weights[at.index % 2]);
  };
  Place at(bytes, panel), next(bytes, panel);
  widen(at);
  for (; at.index < blocks; at.advance()) {
    // One block ahead: a load of a tile would wait for stores that are not in the cache yet.
    next.advance();
    if (next.index < blocks) widen(next);
    if (at.in_unit == 0)
      for (int64_t i = 0; i < panel.factors(); ++i) widen_halves(at.unit + 2 * kOutputs * i, units[i]);
    const auto* codes = reinterpret_cast<const int8_t*>(at.block + 4 * bits * kOutputs);
    for (int64_t group = 0; group < panel.sums(); ++group, ++groups) {
      auto& own = factors[groups % 2];
      for (int64_t i = 0; i < panel.factors(); ++i)
        for (int64_t output = 0; output < kOutputs; output += kWide) {
          auto factor = load(units[i] + output);
          if (panel.groups) factor *= widened(codes + (i * panel.groups + group) * kOutputs + output);
          store(factor, own[i] + output);
        }
      for (int64_t tile = 0; tile < rows; tile += kTile, ++count) {
        Product& product = products[count % 2];
        product.rows = std::min(kTile, rows - tile);
        product.scales = own[0];
        product.mins = own[1];
        product.totals = x.sum(at.index, row + tile);
        product.to = sums + tile * kOutputs;
        by.multiply(x.block(at.index, row + tile), product.rows, weights[at.index % 2], group, panel.sums(), product.numbers);
        if (count) products[1 - count % 2].add();
      }
    }
  }
  products[1 - count % 2].add();
}

template <typename By>
void multiply(
    By& by, const Blocks<typename By::T>& x, int64_t row, int64_t rows, const uint8_t* bytes, const Panel& panel,
    int64_t inputs, float* sums) {
  by.prepare(panel, std::min(x.padded, kTile));
  with_bits(panel.bits, [&](auto bits) { multiply_panel<By, bits>(by, x, row, rows, bytes, panel, inputs, sums); });
}

// Computes x times sets of panels. A set is the panels i, i + sets, …; it is the columns i of `together` matrices of
// equal size. Calls finish(sums [together, rows, 32], first row, rows, first panel of the set).
template <typename By, typename From, typename Finish>
void multiply_all(
    const at::Tensor& x, const at::Tensor& bytes, const at::Tensor& table, int64_t together, const Finish& finish) {
  const Panel* panels = panels_of(table);
  const int64_t sets = table.size(0) / together, inputs = x.size(1);
  const Blocks<typename By::T> blocks(x.const_data_ptr<From>(), x.stride(0), x.size(0), inputs);
  const int64_t chunks = (blocks.rows + kRowsAtOnce - 1) / kRowsAtOnce;
  at::parallel_for(0, chunks * sets, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[2 * kRowsAtOnce * kOutputs];
    By by;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / sets * kRowsAtOnce, set = task % sets;
      const int64_t rows = std::min(kRowsAtOnce, blocks.rows - row);
      for (int64_t i = 0; i < together; ++i)
        multiply(
            by, blocks, row, rows, bytes.const_data_ptr<uint8_t>(), panels[set + i * sets], inputs,
            sums + i * kRowsAtOnce * kOutputs);
      finish(sums, row, rows, panels[set]);
    }
  });
}

// The same by the best means of this processor.
template <typename From, typename Finish>
void multiply_all(
    const at::Tensor& x, const at::Tensor& bytes, const at::Tensor& table, int64_t together, const Finish& finish) {
  TORCH_CHECK(x.stride(1) == 1 && x.size(1) % kInputs == 0, "rows of whole blocks");
  if constexpr (sizeof(From) == 2) {
#ifdef INFER_AMX
    if (may_use_amx()) return multiply_all<ByTiles, From>(x, bytes, table, together, finish);
#endif
#ifdef INFER_FEW_ROWS
    return multiply_all<ByPairs, From>(x, bytes, table, together, finish);
#endif
  }
  return multiply_all<ByFloats, From>(x, bytes, table, together, finish);
}

// ---------------------------------------------------------------------- packing

// The words of a block of one output: 32 numbers, a byte each -> to, a word every 16.
void pack_block(const uint8_t* from, int64_t bits, int32_t* to) {
  uint32_t words[8] = {};
  if (bits == 8) {
    std::memcpy(words, from, kInputs);
  } else {
    uint8_t low[16];
    for (int i = 0; i < 16; ++i) low[i] = uint8_t((from[i] & 15) | from[i + 16] << 4);
    std::memcpy(words, low, sizeof(low));
    for (int w = 0; w < 4; ++w)  // odd inputs into the upper half: the middle bytes change places
      words[w] = (words[w] & 0xff0000ff) | (words[w] & 0xff00) << 8 | (words[w] >> 8 & 0xff00);
    for (int64_t bit = 4; bit < bits; ++bit) {
      uint32_t plane = 0;
      for (int i = 0; i < kInputs; ++i) plane |= uint32_t(from[i] >> bit & 1) << i;
      const uint32_t differing = (plane >> 15 ^ plane) & 0xaaaa;  // the same for bits
      words[bit] = plane ^ differing ^ differing << 15;
    }
  }
  for (int64_t word = 0; word < bits; ++word) to[word * kLanes] = int32_t(words[word]);
}

// Numbers [N, K], a byte each -> words [panels, units, blocks, 2, bits, 16], missing outputs zero.
void pack_words(const at::Tensor& values, at::Tensor& words) {
  const int64_t inputs = values.size(1), bits = words.size(4), blocks = words.size(2);
  const auto* from = static_cast<const uint8_t*>(values.const_data_ptr());
  auto* to = static_cast<int32_t*>(words.mutable_data_ptr());
  at::parallel_for(0, words.size(0), 8, [&](int64_t begin, int64_t end) {
    const std::vector<uint8_t> zeros(inputs);
    for (int64_t row = begin * kOutputs; row < end * kOutputs; ++row) {
      const int64_t output = row % kOutputs;
      const uint8_t* own = row < values.size(0) ? from + row * values.stride(0) : zeros.data();
      for (int64_t block = 0; block < inputs / kInputs; ++block) {
        const int64_t place = row / kOutputs * words.stride(0) + block / blocks * words.stride(1) +
                              block % blocks * words.stride(2);
        pack_block(own + block * kInputs, bits, to + place + output / kLanes * bits * kLanes + output % kLanes);
      }
    }
  });
}

// ---------------------------------------------------------------------- layers

// to[i] = sums[i] + bias[i], where there is a bias.
template <typename T>
void add_bias(float* sums, const std::optional<at::Tensor>& bias, int64_t first, int64_t count) {
  if (bias)
    for (int64_t i = 0; i < count; ++i) sums[i] += to_float(bias->const_data_ptr<T>()[first + i]);
}

at::Tensor grouped_linear(
    const at::Tensor& x, const at::Tensor& bytes, const at::Tensor& table, int64_t outputs,
    const std::optional<at::Tensor>& bias, bool wide) {
  auto out = at::empty({x.size(0), outputs}, wide ? x.options().dtype(at::kFloat) : x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    multiply_all<T>(x, bytes, table, 1, [&](float* sums, int64_t first, int64_t rows, const Panel& panel) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t place = (first + row) * outputs + panel.first;
        add_bias<T>(sums + row * kOutputs, bias, panel.first, panel.outputs);
        if (wide)
          round_all(sums + row * kOutputs, out.mutable_data_ptr<float>() + place, panel.outputs);
        else
          round_all(sums + row * kOutputs, out.mutable_data_ptr<T>() + place, panel.outputs);
      }
    });
  });
  return out;
}

// The panels of the gates, then as many of the ups.
at::Tensor grouped_gated_linear(
    const at::Tensor& x, const at::Tensor& bytes, const at::Tensor& table, int64_t size,
    const std::optional<at::Tensor>& bias, bool silu) {
  auto out = at::empty({x.size(0), size}, x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    multiply_all<T>(x, bytes, table, 2, [&](float* sums, int64_t first, int64_t rows, const Panel& panel) {
      for (int64_t row = 0; row < rows; ++row) {
        float *gates = sums + row * kOutputs, *ups = gates + kRowsAtOnce * kOutputs, values[kOutputs];
        add_bias<T>(gates, bias, panel.first, panel.outputs);
        add_bias<T>(ups, bias, size + panel.first, panel.outputs);
        for (int64_t i = 0; i < kOutputs; ++i)
          values[i] = (silu ? activated<true>(gates[i]) : activated<false>(gates[i])) * ups[i];
        round_all(values, out.mutable_data_ptr<T>() + (first + row) * size + panel.first, panel.outputs);
      }
    });
  });
  return out;
}

// One row of a matrix -> to [inputs], each weight rounded once.
template <int64_t bits, typename T>
void widen_row(const uint8_t* bytes, const Panel& panel, int64_t output, int64_t inputs, T* to) {
  for (int64_t input = 0; input < inputs; ++input) {
    const int64_t block = input / kInputs, place = input % kInputs;
    const uint8_t* unit = bytes + panel.unit(block);
    const uint8_t* own = bytes + panel.block(block);
    const auto* words = reinterpret_cast<const int32_t*>(own) + output / kLanes * bits * kLanes + output % kLanes;
    const auto* codes = reinterpret_cast<const int8_t*>(own) + 4 * bits * kOutputs + output;
    const auto factor = [&](int64_t index) {
      const float whole = float(reinterpret_cast<const c10::Half*>(unit)[index * kOutputs + output]);
      const int64_t group = index * panel.groups + place * panel.groups / kInputs;
      return panel.groups ? whole * float(codes[group * kOutputs]) : whole;
    };
    const auto number = number_at<bits>(place, panel.zero(), [&](int64_t index) { return words[index * kLanes]; });
    to[input] = from_float<T>(float(number) * factor(0) - (panel.mins ? factor(1) : 0.0f));
  }
}

at::Tensor grouped_rows(
    const at::Tensor& rows, const at::Tensor& bytes, const at::Tensor& table, int64_t inputs, at::ScalarType type) {
  auto out = at::empty({rows.size(0), inputs}, at::TensorOptions(type));
  const Panel* panels = panels_of(table);
  with_product_type(out, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, rows.size(0), rows_per_task(inputs), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = rows.const_data_ptr<int64_t>()[i];
        TORCH_CHECK(row >= 0 && row < table.size(0) * kOutputs, "there is no row ", row);
        const Panel& panel = panels[row / kOutputs];
        with_bits(panel.bits, [&](auto bits) {
          widen_row<bits>(
              bytes.const_data_ptr<uint8_t>(), panel, row % kOutputs, inputs, out.mutable_data_ptr<T>() + i * inputs);
        });
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("grouped_linear(Tensor x, Tensor bytes, Tensor table, int outputs, Tensor? bias, bool wide) -> Tensor");
  library.def(
      "grouped_gated_linear(Tensor x, Tensor bytes, Tensor table, int size, Tensor? bias, bool silu) -> Tensor");
  library.def("pack_words(Tensor values, Tensor(a!) words) -> ()");
  library.def("grouped_rows(Tensor rows, Tensor bytes, Tensor table, int inputs, ScalarType type) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("grouped_linear", &grouped_linear);
  library.impl("grouped_gated_linear", &grouped_gated_linear);
  library.impl("pack_words", &pack_words);
  library.impl("grouped_rows", &grouped_rows);
}

}  // namespace infer
