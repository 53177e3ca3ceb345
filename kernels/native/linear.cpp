// A linear layer on a CPU, on weights packed for it: see linear.py for what it is and for the shapes.
#include "amx.h"
#include "few_rows.h"
#include "widener.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

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

// weight [N, K] -> [ceil(N / 64), K / group, 64, group], missing outputs zero. Only bytes are moved, so the type is a
// matter of its size.
template <typename Bits>
void pack_into(const at::Tensor& weight, at::Tensor& packed) {
  const int64_t outputs = weight.size(0), inputs = weight.size(1), panels = packed.size(0), group = packed.size(3);
  const auto* from = static_cast<const Bits*>(weight.const_data_ptr());
  auto* to = static_cast<Bits*>(packed.mutable_data_ptr());
  parallel_for(panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel)
      for (int64_t output = 0; output < kPanel; ++output) {
        const int64_t row = panel * kPanel + output;
        for (int64_t input = 0; input < inputs; ++input)
          to[(panel * inputs + input / group * group) * kPanel + output * group + input % group] =
              row < outputs ? from[row * weight.stride(0) + input] : Bits(0);
      }
  });
}

// Returns whether bfloat16 holds all numbers of a float32 matrix exactly: their lower halves are zero.
bool fits_bfloat16(const at::Tensor& weight) {
  std::atomic<bool> fits{true};
  parallel_for(weight.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end && fits; ++row) {
      const auto* bits = static_cast<const uint32_t*>(weight.const_data_ptr()) + row * weight.stride(0);
      uint32_t seen = 0;
      for (int64_t input = 0; input < weight.size(1); ++input) seen |= bits[input];
      if (seen & 0xffff) fits = false;
    }
  });
  return fits;
}

// `group` neighbouring inputs lie side by side in a panel: the two that a bfloat16 dot-product instruction adds at
// once, or one where x is float32. A checkpoint in bfloat16 that is computed in float32 stays bfloat16 here: half the
// bytes of the same numbers.
at::Tensor pack_linear(const at::Tensor& given, int64_t group) {
  const int64_t outputs = given.size(0), inputs = given.size(1);
  TORCH_CHECK(inputs % group == 0, "an odd number of inputs cannot be packed: ", inputs);
  const bool narrow = given.scalar_type() == at::kFloat && fits_bfloat16(given);
  const at::Tensor weight = narrow ? given.to(at::kBFloat16) : given;
  auto packed = at::empty({(outputs + kPanel - 1) / kPanel, inputs / group, kPanel, group}, weight.options());
  switch (weight.element_size()) {
    case 1: pack_into<uint8_t>(weight, packed); break;
    case 2: pack_into<uint16_t>(weight, packed); break;
    default: pack_into<uint32_t>(weight, packed);
  }
  return packed;
}

// ---------------------------------------------------------------------- narrow weights

// to[i] = from[i], exactly, for panels: they have a multiple of 64 weights. An int8 has at most eight significant bits,
// as many as a bfloat16 holds.
template <typename W>
void widen(const W* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kWide) store(widened(from + i), to + i);
}

#ifndef INFER_FEW_ROWS

void widen(const int8_t* from, c10::BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from_float<c10::BFloat16>(float(from[i]));
}

#else

void widen(const int8_t* from, c10::BFloat16* to, int64_t count) {
  const Widener widener;
  __m512i parts[2];
  for (int64_t i = 0; i < count; i += 64) {
    widener(from + i, parts[0], parts[1]);
    std::memcpy(to + i, parts, sizeof(parts));
  }
}
#endif

// ---------------------------------------------------------------------- few rows

// Few rows are bound by memory. The library's product has a start and an end in every panel, in which nothing is read,
// and it takes int8 weights only widened: written to the cache and read again. Written out (see few_rows.h and amx.h),
// they are widened on their way from memory.
#ifdef INFER_FEW_ROWS

constexpr int64_t kAhead = 4096;     // bytes of weights that are fetched ahead: a page, where hardware stops
constexpr int64_t kMostAtOnce = 10;  // rows of one call: two registers of weights are loaded at a time

// Registers for sums, of 32. Weights and x take others, and so do the tables by which int8 weights are widened.
template <typename W>
constexpr int64_t kSums = sizeof(W) == 1 ? 20 : 24;

class Plain {
 public:
  void operator()(const c10::BFloat16* from, __m512i& first, __m512i& second) const {
    first = _mm512_loadu_si512(from);
    second = _mm512_loadu_si512(from + 2 * kLanes);
  }
};

inline Plain loader_of(const c10::BFloat16*) { return {}; }
inline Widener loader_of(const int8_t*) { return {}; }

// Fetches the weights that a later step of the loop reads: two inputs of a whole panel. If the halves of a panel are
// computed one after the other, the second half finds its weights in the cache.
template <typename W>
void fetch_ahead(const W* weights) {
  const char* from = reinterpret_cast<const char*>(weights) + kAhead;
  for (int64_t byte = 0; byte < 2 * kPanel * int64_t(sizeof(W)); byte += 64) __builtin_prefetch(from + byte);
}

// x [rows, K] times halves `begin` to `end` of a panel -> those of sums [rows, 64], `at_once` halves together. Two
// neighbouring inputs of x are one 32-bit number, which goes to all lanes.
template <int64_t rows, int64_t at_once, typename W>
void multiply_halves(
    const c10::BFloat16* x, int64_t stride, const W* panel, int64_t inputs, float* sums, int64_t begin, int64_t end) {
  const auto load = loader_of(panel);
  for (int64_t half = begin; half < end; half += at_once) {
    __m512 held[rows][2 * at_once] = {};
    for (int64_t input = 0; input < inputs; input += 2) {
      fetch_ahead(panel + input * kPanel);
      __m512i weights[2 * at_once];
      for (int64_t i = 0; i < at_once; ++i)
        load(panel + input * kPanel + (half + i) * kPanel, weights[2 * i], weights[2 * i + 1]);
      for (int64_t row = 0; row < rows; ++row) {
        const auto pair = pair_in_all_lanes(x + row * stride + input);
        for (int64_t i = 0; i < 2 * at_once; ++i)
          held[row][i] = _mm512_dpbf16_ps(held[row][i], pair, reinterpret_cast<__m512bh>(weights[i]));
      }
    }
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(sums + row * kPanel + half * kPanel / 2, held[row], sizeof(held[row]));
  }
}

// The same; both halves together if there are registers for their sums.
template <int64_t rows, typename W>
void multiply_rows(
    const c10::BFloat16* x, int64_t stride, const W* panel, int64_t inputs, float* sums, int64_t begin, int64_t end) {
  if (rows * 4 <= kSums<W> && end - begin == 2)
    multiply_halves<rows, rows * 4 <= kSums<W> ? 2 : 1>(x, stride, panel, inputs, sums, begin, end);
  else
    multiply_halves<rows, 1>(x, stride, panel, inputs, sums, begin, end);
}

// The function for 1 to 10 rows.
template <typename W, size_t... rows>
auto function_for(int64_t count, std::index_sequence<rows...>) {
  static constexpr decltype(&multiply_rows<1, W>) functions[] = {&multiply_rows<rows + 1, W>...};
  return functions[count - 1];
}

template <typename W>
void multiply_few(
    const c10::BFloat16* x, int64_t stride, int64_t rows, const W* panel, int64_t inputs, float* sums, int64_t begin,
    int64_t end) {
  const int64_t calls = (rows + kMostAtOnce - 1) / kMostAtOnce, each = (rows + calls - 1) / calls;
  for (int64_t row = 0; row < rows; row += each) {
    const int64_t count = std::min(each, rows - row);
    const auto function = function_for<W>(count, std::make_index_sequence<kMostAtOnce>());
    function(x + row * stride, stride, panel, inputs, sums + row * kPanel, begin, end);
  }
}

#endif

constexpr int64_t kFloatRows = 6;      // of float32 in one call
constexpr int64_t kInputsAtOnce = 64;  // so much of a panel stays in the first-level cache while all rows meet it

// The same for float32.
template <typename W>
void multiply_few(
    const float* x, int64_t stride, int64_t rows, const W* panel, int64_t inputs, float* sums, int64_t begin,
    int64_t end) {
  for (int64_t input = 0; input < inputs; input += kInputsAtOnce) {
    const W* own = panel + input * kPanel;
    in_groups<kFloatRows>(rows, [&](auto n, int64_t row) {
      constexpr int64_t parts = std::min<int64_t>(kPanel / 2 / kWide, n * 4 < kFloatSums ? 4 : 2);
      for (int64_t output = begin * kPanel / 2; output < end * kPanel / 2; output += parts * kWide)
        add_products<n, parts>(
            x + row * stride + input, stride, std::min(kInputsAtOnce, inputs - input),
            [&](int64_t i) { return own + i * kPanel + output; }, sums + row * kPanel + output, kPanel,
            /*begun=*/input > 0);
    });
  }
}

// How many rows are few: where it takes less time to widen weights again than to have the library read them widened,
// or, where they are not narrower than x, where the library's start and end weigh.
template <typename T, typename W>
constexpr int64_t kFewRows = sizeof(W) < sizeof(T) ? kTileRows : kFloatRows;

#ifdef INFER_FEW_ROWS
template <>
constexpr int64_t kFewRows<c10::BFloat16, c10::BFloat16> = 16;
#else
template <typename W>
constexpr int64_t kFewRows<c10::BFloat16, W> = 0;
#endif

// Multiplies `rows` rows of x by halves `begin` to `end` of a panel, for one thread. Here by loops.
class ByLoops {
 public:
  explicit ByLoops(int64_t rows) : rows_(rows) {}

  template <typename T, typename W>
  void operator()(
      const T* x, int64_t stride, const W* panel, int64_t inputs, float* sums, int64_t begin, int64_t end) const {
    multiply_few(x, stride, rows_, panel, inputs, sums, begin, end);
  }

 private:
  int64_t rows_;
};

#ifdef INFER_AMX

// Widens the weights of 32 inputs and `outputs` outputs for tiles, into two places in turn (see `multiply_by_amx`).
template <int64_t outputs>
class WidenedInTurn {
 public:
  explicit WidenedInTurn(const int8_t* panel) : panel_(panel) {}

  const c10::BFloat16* operator()(int64_t input) {
    const Widener widener;
    c10::BFloat16* to = places_[input / kAmxInputs % 2];
    const int8_t* from = panel_ + input * kPanel;
    for (int64_t i = 0; i < kAmxInputs * kPanel; i += 2 * kPanel) {
      for (int64_t byte = 0; byte < 2 * kPanel; byte += 64)
        __builtin_prefetch(from + i + byte + kAhead, 0, /*locality=*/2);
      for (int64_t output = 0; output < 2 * outputs; output += 64) {
        __m512i parts[2];
        widener(from + i + output, parts[0], parts[1]);
        std::memcpy(to + i + output, parts, sizeof(parts));
      }
    }
    return to;
  }

 private:
  const int8_t* panel_;
  alignas(64) c10::BFloat16 places_[2][kAmxInputs * kPanel];
};

// As `ByLoops`, by matrix tiles, for int8 weights: with bfloat16 weights, tiles are no faster than the library.
class ByAmx {
 public:
  explicit ByAmx(int64_t rows) : rows_(rows), shapes_(rows) {}

  void operator()(
      const c10::BFloat16* x, int64_t stride, const int8_t* panel, int64_t inputs, float* sums, int64_t begin,
      int64_t end) const {
    if (rows_ <= kAmxRows && end - begin == 2)
      return multiply_by_amx<1, kPanel, kPanel>(x, stride, inputs, sums, WidenedInTurn<kPanel>(panel));
    constexpr int64_t kHalf = kPanel / 2;
    for (int64_t half = begin; half < end; ++half) {
      const auto multiply =
          rows_ > kAmxRows ? multiply_by_amx<2, kHalf, kPanel, WidenedInTurn<kHalf>>
                           : multiply_by_amx<1, kHalf, kPanel, WidenedInTurn<kHalf>>;
      multiply(x, stride, inputs, sums + half * kHalf, WidenedInTurn<kHalf>(panel + half * kPanel));
    }
  }

 private:
  int64_t rows_;
  AmxShapes shapes_;
};

#endif

// `multiply_by` for few rows. If a half of a panel can be finished alone (`halves`), panels are divided among threads
// by halves: with nine panels and two threads, one would wait for the other's fifth.
template <typename Products, bool halves, typename T, typename W, typename Finish>
void multiply_few_by(
    const T* x, int64_t stride, int64_t rows, const W* weights, int64_t panels, int64_t inputs, const Finish& finish) {
  constexpr int64_t grain = halves ? 1 : 2;
  parallel_for(panels * 2 / grain, 1, [&](int64_t first, int64_t last) {
    alignas(64) float sums[kTileRows * kPanel];
    const Products multiply(rows);
    for (int64_t half = first * grain; half < last * grain;) {
      const int64_t panel = half / 2, begin = half % 2, end = std::min<int64_t>(2, last * grain - panel * 2);
      multiply(x, stride, weights + panel * inputs * kPanel, inputs, sums, begin, end);
      finish(sums, 0, rows, panel, begin * kPanel / 2, end * kPanel / 2);
      half += end - begin;
    }
  });
}

// ---------------------------------------------------------------------- the product

// Computes x [T, K] times all panels, tile by tile, and hands each tile's float32 sums to
// finish(sums [rows, 64], first row, rows, panel, begin, end), where columns `begin` to `end` are computed. Panels of
// int8 are widened one at a time, in the core's cache.
//
// An output is one sum over its inputs, in order: neither the number of rows, nor the tile or block that a row
// is in, nor the thread that computes it, makes a difference to its bits.
template <typename T, typename W, bool halves, typename Finish>
void multiply_by(const at::Tensor& x, const at::Tensor& packed, Finish finish) {
  const int64_t tokens = x.size(0), inputs = x.size(1), stride = x.stride(0), panels = packed.size(0);
  const int64_t tiles = (tokens + kTileRows - 1) / kTileRows;
  const int64_t fitting = kBlockBytes / (kTileRows * inputs * int64_t(sizeof(T)));
  const int64_t block = fitting < kFewTiles ? tiles : fitting;  // tiles of rows that all panels meet in turn
  const T* from = x.const_data_ptr<T>();
  const W* weights = packed.const_data_ptr<W>();
  constexpr bool paired = sizeof(T) == 2, narrow = sizeof(W) < sizeof(T);
  if constexpr (kFewRows<T, W> > 0) {
    if (tokens > 0 && tokens <= kFewRows<T, W>) {
#ifdef INFER_AMX
      if constexpr (sizeof(T) == 2 && sizeof(W) == 1)
        if (inputs % kAmxInputs == 0 && amx_has_librarys_bits())
          return multiply_few_by<ByAmx, halves>(from, stride, tokens, weights, panels, inputs, finish);
#endif
      if (has_librarys_bits(T{}))
        return multiply_few_by<ByLoops, halves>(from, stride, tokens, weights, panels, inputs, finish);
    }
  }
  // Tasks are numbered block by block, within a block panel by panel, within a panel tile by tile.
  parallel_for(panels * tiles, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kTileRows * kPanel];
    thread_local Buffer<T> wide;  // kept: a new one for each product would be memory the system must clear
    int64_t in_wide = -1;         // the panel that it holds
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / (block * panels) * block, in_block = std::min(block, tiles - first);
      const int64_t place = task - first * panels, panel = place / in_block;
      const int64_t row = (first + place % in_block) * kTileRows, rows = std::min(kTileRows, tokens - row);
      const W* own = weights + panel * inputs * kPanel;
      const T* factors;
      if constexpr (narrow) {
        if (in_wide != panel) {
          wide.hold(inputs * kPanel);
          widen(own, wide.data(), inputs * kPanel);
          in_wide = panel;
        }
        factors = wide.data();
      } else {
        factors = own;
      }
      at::native::cpublas::brgemm(
          rows, kPanel, inputs, stride, kPanel, kPanel, /*add_C=*/false, from + row * stride, factors, sums, paired);
      finish(sums, row, rows, panel, 0, kPanel);
    }
    at::native::cpublas::brgemm_release(paired);
  });
}

template <typename T, bool halves, typename Finish>
void multiply(const at::Tensor& x, const at::Tensor& packed, Finish finish) {
  switch (packed.scalar_type()) {
    case at::kChar: return multiply_by<T, int8_t, halves>(x, packed, finish);
    case at::kBFloat16: return multiply_by<T, c10::BFloat16, halves>(x, packed, finish);
    default: return multiply_by<T, T, halves>(x, packed, finish);
  }
}

// sums[i] = sums[i] * scales[i] + biases[i], where there are such.
template <typename T>
void scale_and_add(float* sums, const float* scales, const T* biases, int64_t count) {
  if (scales)
    for (int64_t i = 0; i < count; ++i) sums[i] *= scales[i];
  if (biases)
    for (int64_t i = 0; i < count; ++i) sums[i] += to_float(biases[i]);
}

template <typename T>
const T* data_or_none(const std::optional<at::Tensor>& tensor, int64_t offset = 0) {
  return tensor ? tensor->const_data_ptr<T>() + offset : nullptr;
}

// `linear` into `out`, whose type is that of x or float32.
template <typename T, typename Out>
void multiply_into(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scales, at::Tensor& out) {
  const int64_t outputs = out.size(1);
  Out* to = out.mutable_data_ptr<Out>();
  const auto finish = [&, to](float* sums, int64_t first, int64_t rows, int64_t panel, int64_t from, int64_t end) {
    const int64_t begin = panel * kPanel + from, width = std::min(end - from, outputs - begin);
    for (int64_t row = 0; row < rows && width > 0; ++row) {
      float* sum = sums + row * kPanel + from;
      scale_and_add(sum, data_or_none<float>(scales, begin), data_or_none<T>(bias, begin), width);
      round_all(sum, to + (first + row) * outputs + begin, width);
    }
  };
  multiply<T, /*halves=*/true>(x, packed, finish);
}

// x [T, K] any row stride, packed as above, bias [N] or none, scales of int8 weights, N or none -> [T, N]: of the type
// of x, or float32 if `wide`.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scales, bool wide) {
  auto out = at::empty({x.size(0), outputs}, wide ? x.options().dtype(at::kFloat) : x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    wide ? multiply_into<T, float>(x, packed, bias, scales, out) : multiply_into<T, T>(x, packed, bias, scales, out);
  });
  return out;
}

// x [T, K], packed with 32 gates and then their 32 ups in a panel, bias and scales [2 size], gates first, or none
// -> [T, size].
// A tile has all that an activation takes, so the product, twice as wide as what is left of it, is never in memory.
template <typename T, bool silu>
void multiply_and_activate(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scales, at::Tensor& out) {
  constexpr int64_t half = kPanel / 2;
  const int64_t size = out.size(1);
  T* to = out.mutable_data_ptr<T>();
  const auto finish = [&, to, size](float* sums, int64_t first, int64_t rows, int64_t panel, int64_t, int64_t) {
    const int64_t begin = panel * half, width = std::min(half, size - begin);
    for (int64_t row = 0; row < rows; ++row) {
      float *gates = sums + row * kPanel, *ups = gates + half;
      scale_and_add(gates, data_or_none<float>(scales, begin), data_or_none<T>(bias, begin), width);
      scale_and_add(ups, data_or_none<float>(scales, size + begin), data_or_none<T>(bias, size + begin), width);
      // The loop has a constant length, and `values` shares no memory with its inputs. So the compiler makes vector
      // instructions of it, without a test at run time.
      float values[half];
      for (int64_t i = 0; i < half; ++i) values[i] = activated<silu>(gates[i]) * ups[i];
      round_all(values, to + (first + row) * size + begin, width);
    }
  };
  multiply<T, /*halves=*/false>(x, packed, finish);
}

at::Tensor gated_linear(
    const at::Tensor& x, const at::Tensor& packed, int64_t size, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& scales, bool silu) {
  auto out = at::empty({x.size(0), size}, x.options());
  with_product_type(x, [&](auto element) {
    using T = decltype(element);
    silu ? multiply_and_activate<T, true>(x, packed, bias, scales, out)
         : multiply_and_activate<T, false>(x, packed, bias, scales, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("pack_linear(Tensor weight, int group) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, int outputs, Tensor? bias, Tensor? scales, bool wide) -> Tensor");
  library.def("gated_linear(Tensor x, Tensor packed, int size, Tensor? bias, Tensor? scales, bool silu) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("pack_linear", &pack_linear);
  library.impl("linear", &linear);
  library.impl("gated_linear", &gated_linear);
}

}  // namespace infer
