// Attention over a KV store of blocks, on a CPU: see attention.py for its definition and the shapes.
//
// The queries of one sequence that share a KV head are the rows of a small matrix. They meet the sequence's columns a
// tile of 256 at a time. A tile gives each row three things, as in Milakov & Gimelshein (2018) and FlashAttention (Dao
// et al. 2022): its largest score, the sum of its weights, and the weighted sum of values. Tiles are merged in order.
//
//              columns   0 … 255     256 … 511   512 … 767           one tile of columns:
//   row 0                ████████    ████████    ███·····              scores  = Q K^T
//   row 1                ████████    ████████    ████····              weights = exp(scores - largest)
//   row 2                ████████    ████████    █████···              sum     = weights V
//                                                     └ hidden: the position rule
//
// A row has the same bits in any batch. Tiles begin at multiples of 256, not where a window or a chunk begins. A hidden
// column has the weight 0, which adds nothing. Scores and weighted values are PyTorch's products, whose order does not
// depend on the batch where `is_batch_invariant` finds so; few rows have loops of their own, with the bits of these
// products. A tile's weights are added in sixteen running sums, column i to number i % 16. So a token has the same
// result decoded, or prefilled alone, in a chunk or with others.
//
// Each thread takes the longest task that is left. A decoding sequence that is much longer than the others is cut into
// several pieces: threads compute its tiles separately, and the last thread merges them in order.
#include "amx.h"
#include "few_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <list>
#include <memory>
#include <vector>

namespace infer {
namespace {

constexpr int64_t kColumns = 256; // of a tile: long enough that a product is worth its call
constexpr int64_t kWidth = 64;    // of a tile's products, times one to four: what is not there is not computed
constexpr int64_t kRows = 256;    // queries times heads in a group, at the most: a tile is brought into form for all
constexpr int64_t kFewRows = 16;  // so many are computed the other way round: see `multiply_keys`
constexpr int64_t kFewTiles = 4;  // of columns: a sequence of so many is not cut, for a piece has costs of its own
constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();  // a row's largest score until it has seen one

using at::native::cpublas::brgemm;

// A bfloat16 product takes neighbouring pairs along the dimension that is summed over; float32 takes single numbers.
template <typename T>
constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

// Where one sequence's columns lie: column c is in block table[c / block_size], at offset c % block_size.
struct Columns {
  const int64_t* table;
  int64_t block_size, heads, size;  // of the store: columns in a block, KV heads, numbers in a head

  int64_t address(int64_t column) const { return table[column / block_size] * block_size + column % block_size; }

  template <typename T>
  T* head(T* store, int64_t column, int64_t head) const {
    return store + (address(column) * heads + head) * size;
  }

  // The places in a store where one head of columns `first` to `last` begins, found block by block: with divisions
  // for every column that would take longer than to copy it.
  void locate(int64_t head, int64_t first, int64_t last, int64_t* places) const {
    for (int64_t column = first; column < last;) {
      int64_t place = (address(column) * heads + head) * size;
      const int64_t end = std::min(last, (column / block_size + 1) * block_size);
      for (; column < end; ++column, place += heads * size) *places++ = place;
    }
  }
};

// The partial result of a task's rows, for one tile of columns or for all tiles so far.
struct Part {
  float* largest;  // [rows]: the largest score
  float* total;    // [rows]: the sum of weights
  float* sums;     // [rows, size]: weighted values
};

// The buffers of one thread.
template <typename T>
struct Scratch {
  explicit Scratch(int64_t size)
      : size(size), queries(kRows * size), transposed(kFewRows * size), keys(kColumns * size), packed(kColumns * size),
        values(kColumns * size), zeros(size), weights(kRows * kColumns), scores(kRows * kColumns),
        rows(2 * kRows * (size + 2)) {}

  int64_t size;             // numbers in a head
  Buffer<T> queries;        // [rows, size]
  Buffer<T> transposed;         // [size / pair, 16, pair]: the queries as the right side of a product
  Buffer<T> keys;           // [width, size], of one tile
  Buffer<T> packed;         // [size / pair, width, pair]: the keys as the right side of a product
  Buffer<T> values;         // [width / pair, size, pair]
  Buffer<T> zeros;          // [size]: a column that is not there
  Buffer<T> weights;        // [rows, 256]
  Buffer<float> scores;     // [rows, 256]
  Buffer<float> rows;       // two parts

  Part tile() { return part(rows.data()); }                            // of the tile at hand
  Part so_far() { return part(rows.data() + kRows * (size + 2)); }     // of all tiles merged so far

 private:
  Part part(float* begin) { return {begin, begin + kRows, begin + 2 * kRows}; }
};

// A thread's own, kept from call to call: with an allocation each, the operating system would hand out and clear the
// same pages in every layer.
template <typename T>
Scratch<T>& scratch_of_this_thread(int64_t size) {
  thread_local std::unique_ptr<Scratch<T>> kept;
  if (!kept || kept->size != size) kept = std::make_unique<Scratch<T>>(size);
  return *kept;
}

// Keys and values of columns `first` to `last`; zeros behind them, up to `width`, where nothing may be read.
template <typename T>
void gather(
    Scratch<T>& scratch, const Columns& columns, const T* k_store, const T* v_store, int64_t head, int64_t first,
    int64_t last, int64_t width) {
  const int64_t size = columns.size, count = last - first;
  int64_t places[kColumns];
  columns.locate(head, first, last, places);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(scratch.keys.data() + i * size, k_store + places[i], size * sizeof(T));
  std::fill_n(scratch.keys.data() + count * size, (width - count) * size, T(0));
  for (int64_t i = 0; i < width; i += kPair<T>) {
    T* to = scratch.values.data() + i * size;
    const T* value = i < count ? v_store + places[i] : scratch.zeros.data();
    if constexpr (kPair<T> == 1) {
      std::memcpy(to, value, size * sizeof(T));
    } else {
      const T* next = i + 1 < count ? v_store + places[i + 1] : scratch.zeros.data();
      for (int64_t d = 0; d < size; ++d) {  // two columns, number by number: the halves of 32 bits
        const uint32_t pair = uint32_t(value[d].x) | uint32_t(next[d].x) << 16;
        std::memcpy(to + 2 * d, &pair, sizeof(pair));
      }
    }
  }
}

// Transposes [count, size] -> [size / pair, width, pair], zeros from `count` to `width`, a multiple of sixteen. A pair,
// or one float32, moves as 32 bits. Sixteen rows are transposed at a time, so that their cache lines are still in the
// cache when the next pairs of the rows are read.
template <typename T>
void transpose(const T* from, int64_t count, int64_t size, int64_t width, T* to) {
  for (int64_t begin = 0; begin < width; begin += 16)
    for (int64_t d = 0; d < size; d += kPair<T>)
      for (int64_t i = begin; i < begin + 16; ++i) {
        uint32_t pair = 0;
        if (i < count) std::memcpy(&pair, from + i * size + d, sizeof(pair));
        std::memcpy(to + d * width + i * kPair<T>, &pair, sizeof(pair));
      }
}

// scores [rows, width] = queries keys^T. With few rows it is cheaper to turn the queries, once a task, than the keys of
// every tile: the product is then keys queries^T, of the same numbers in the same order. Rows from `count` on only
// fill up.
template <typename T>
void multiply_keys(Scratch<T>& scratch, int64_t rows, int64_t count, int64_t size, int64_t width) {
  constexpr bool paired = kPair<T> == 2;
  if (rows > kFewRows) {
    transpose(scratch.keys.data(), width, size, width, scratch.packed.data());
    brgemm(rows, width, size, size, width, kColumns, false, scratch.queries.data(), scratch.packed.data(),
           scratch.scores.data(), paired);
    return;
  }
  alignas(64) float by_column[kColumns * kFewRows];
  brgemm(width, kFewRows, size, size, kFewRows, kFewRows, false, scratch.keys.data(), scratch.transposed.data(), by_column,
         paired);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < width; ++i) scratch.scores.data()[row * kColumns + i] = by_column[i * kFewRows + row];
}

// Some neighbouring queries of one sequence, all heads that share a KV head.
template <typename T>
struct Task {
  const T* q;             // of the first query and head
  T* out;                 // likewise
  int64_t query_stride;   // numbers between a head's queries, in q
  int64_t out_stride;     // likewise in out
  int64_t position;       // of the first query
  int64_t queries, group; // how many, and heads that share the KV head
  int64_t head;           // the KV head

  const T* query(int64_t row, int64_t size) const { return q + row / group * query_stride + row % group * size; }
};

// Scores to weights, of the tile of columns that begins at `first`: each row's largest score and sum of weights.
template <typename T>
void weigh(
    Scratch<T>& scratch, const Task<T>& task, const Part& tile, int64_t first, int64_t width, float scale,
    int64_t window) {
  const int64_t count = task.queries * task.group;
  for (int64_t row = 0; row < count; ++row) {
    float* scores = scratch.scores.data() + row * kColumns;
    T* weights = scratch.weights.data() + row * kColumns;
    const int64_t end = task.position + row / task.group + 1 - first, begin = window > 0 ? end - window : 0;
    std::fill(scores, scores + std::clamp<int64_t>(begin, 0, width), kHidden);
    std::fill(scores + std::clamp<int64_t>(end, 0, width), scores + width, kHidden);
    const float best = std::max(kLowest, largest_of(scores, width) * scale);  // a scale is positive
    for (int64_t i = 0; i < width; ++i) scores[i] = exp_of_nonpositive(scores[i] * scale - best);
    round_all(scores, weights, width);
    OrderedSum added;
    added.add(width, [=](int64_t i) { return scores[i]; });
    tile.largest[row] = best;
    tile.total[row] = added.total();
  }
}

// Adds a tile's part to that of the tiles before it. Never inlined: in every place it rounds in the same way. The
// vector unit takes rows side by side where a row has one number, and else a row's features.
__attribute__((noinline)) void merge(const Part& so_far, const Part& tile, int64_t rows, int64_t size) {
  float before[kRows], added[kRows];  // what becomes of weights so far, and of the tile's
  for (int64_t row = 0; row < rows; ++row) {
    const float largest = std::max(so_far.largest[row], tile.largest[row]);
    before[row] = exp_of_nonpositive(so_far.largest[row] - largest);
    added[row] = exp_of_nonpositive(tile.largest[row] - largest);
    so_far.largest[row] = largest;
    so_far.total[row] = so_far.total[row] * before[row] + tile.total[row] * added[row];
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = so_far.sums + row * size;
    const float *others = tile.sums + row * size, keep = before[row], add = added[row];
    for (int64_t d = 0; d < size; ++d) sums[d] = sums[d] * keep + others[d] * add;
  }
}

// Some neighbouring tiles of columns.
struct Range {
  int64_t first, last;  // the first column of the first tile; the column before which the last one ends
};

// The tiles of columns that a task's queries see.
template <typename T>
Range seen_by(const Task<T>& task, int64_t window) {
  const int64_t first_seen = window > 0 ? std::max<int64_t>(0, task.position - window + 1) : 0;
  return {first_seen / kColumns * kColumns, task.position + task.queries};
}

// ---------------------------------------------------------------------- few rows

// A decoding sequence has one query for each head of a group: three rows, say. The library's products have sixteen
// rows at least, and take copies of keys and values. The loops below compute the rows that there are, and read keys and
// values where they lie (see few_rows.h). Matrix tiles (see amx.h) have sixteen rows, too, but read most keys where they
// lie.

// Fetches the keys or values of a tile, which lie apart: into the first-level cache (locality 3) or the second (2).
template <int locality, typename T>
void fetch_ahead(const T* store, const int64_t* places, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t d = 0; d < size; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(store + places[i] + d, 0, locality);
}

// Fetches the tile of one KV head that begins at a column and ends before `last` at most.
template <typename T>
void fetch_tile(
    const Columns& columns, int64_t head, int64_t first, int64_t last, const T* k_store, const T* v_store) {
  int64_t places[kColumns];
  const int64_t count = std::min(kColumns, last - first);
  columns.locate(head, first, first + count, places);
  fetch_ahead<2>(k_store, places, count, columns.size);
  fetch_ahead<2>(v_store, places, count, columns.size);
}

#ifdef __AVX512F__

// A square of 32-bit numbers, sixteen rows of sixteen, to its columns.
inline void transpose(__m512i (&square)[kLanes]) {
  __m512i half[kLanes];
  for (int64_t i = 0; i < kLanes; i += 2) {
    half[i] = _mm512_unpacklo_epi32(square[i], square[i + 1]);
    half[i + 1] = _mm512_unpackhi_epi32(square[i], square[i + 1]);
  }
  for (int64_t i = 0; i < kLanes; i += 4)
    for (int64_t j = 0; j < 2; ++j) {
      square[i + 2 * j] = _mm512_unpacklo_epi64(half[i + j], half[i + j + 2]);
      square[i + 2 * j + 1] = _mm512_unpackhi_epi64(half[i + j], half[i + j + 2]);
    }
  // Row i + j now has, of rows i to i + 3, columns j, 4 + j, 8 + j and 12 + j.
  for (int64_t j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(square[j], square[4 + j], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(square[j], square[4 + j], 0xdd);
    const __m512i lower_even = _mm512_shuffle_i32x4(square[8 + j], square[12 + j], 0x88);
    const __m512i lower_odd = _mm512_shuffle_i32x4(square[8 + j], square[12 + j], 0xdd);
    half[j] = _mm512_shuffle_i32x4(even, lower_even, 0x88);
    half[4 + j] = _mm512_shuffle_i32x4(odd, lower_odd, 0x88);
    half[8 + j] = _mm512_shuffle_i32x4(even, lower_even, 0xdd);
    half[12 + j] = _mm512_shuffle_i32x4(odd, lower_odd, 0xdd);
  }
  std::copy_n(half, kLanes, square);
}

inline void transpose(Vector<float> (&square)[kWide]) { transpose(reinterpret_cast<__m512i(&)[kLanes]>(square)); }

#elif defined(__AVX2__)

// A square of numbers, eight rows of eight, to its columns.
inline void transpose(Vector<float> (&square)[kWide]) {
  Vector<float> half[kWide];
  for (int64_t i = 0; i < kWide; i += 2) {
    half[i] = _mm256_unpacklo_ps(square[i], square[i + 1]);
    half[i + 1] = _mm256_unpackhi_ps(square[i], square[i + 1]);
  }
  for (int64_t i = 0; i < kWide; i += 4)
    for (int64_t j = 0; j < 2; ++j) {
      square[i + 2 * j] = _mm256_shuffle_ps(half[i + j], half[i + j + 2], 0x44);
      square[i + 2 * j + 1] = _mm256_shuffle_ps(half[i + j], half[i + j + 2], 0xee);
    }
  // Row i + j now has, of rows i to i + 3, columns j and 4 + j.
  for (int64_t j = 0; j < 4; ++j) {
    half[j] = _mm256_permute2f128_ps(square[j], square[4 + j], 0x20);
    half[4 + j] = _mm256_permute2f128_ps(square[j], square[4 + j], 0x31);
  }
  std::copy_n(half, kWide, square);
}

#else

inline void transpose(Vector<float> (&square)[kWide]) {
  for (int64_t i = 0; i < kWide; ++i)
    for (int64_t j = 0; j < i; ++j) {
      const float number = square[i][j];
      square[i][j] = square[j][i];
      square[j][i] = number;
    }
}

#endif

template <typename T>
constexpr int64_t kRowsAtOnce = 4;  // of queries: sums that stay in registers beside the columns of a register

// scores [rows, count] = queries keys^T, a register of columns at a time: a lane is a column. Keys are transposed in
// registers.
template <int64_t rows>
void multiply_keys_in_place(
    const float* queries, const float* keys, const int64_t* places, int64_t count, int64_t size, float* scores) {
  for (int64_t first = 0; first < count; first += kWide) {
    Vector<float> sums[rows] = {};
    for (int64_t d = 0; d < size; d += kWide) {
      Vector<float> numbers[kWide];
      for (int64_t i = 0; i < kWide; ++i) numbers[i] = load(keys + places[std::min(first + i, count - 1)] + d);
      transpose(numbers);
      for (int64_t i = 0; i < kWide; ++i)
        for (int64_t row = 0; row < rows; ++row) sums[row] += numbers[i] * queries[row * size + d + i];
    }
    for (int64_t row = 0; row < rows; ++row) store(sums[row], scores + row * kColumns + first);
  }
}

// sums [rows, size] = weights values.
template <int64_t rows>
void add_values(
    const float* weights, const float* values, const int64_t* places, int64_t count, int64_t size, float* sums) {
  constexpr int64_t parts = 2;
  for (int64_t d = 0; d < size; d += parts * kWide)
    add_products<rows, parts>(
        weights, kColumns, count, [&](int64_t i) { return values + places[i] + d; }, sums + d, size, /*begun=*/false);
}

#ifdef INFER_FEW_ROWS

template <>
constexpr int64_t kRowsAtOnce<c10::BFloat16> = 8;

// scores [rows, count] = queries keys^T, sixteen columns at a time: a lane is a column. Keys are transposed in
// registers.
template <int64_t rows>
void multiply_keys_in_place(
    const c10::BFloat16* queries, const c10::BFloat16* keys, const int64_t* places, int64_t count, int64_t size,
    float* scores) {
  for (int64_t first = 0; first < count; first += kLanes) {
    __m512 sums[rows] = {};
    for (int64_t d = 0; d < size; d += 2 * kLanes) {
      __m512i pairs[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        pairs[i] = _mm512_loadu_si512(keys + places[std::min(first + i, count - 1)] + d);
      transpose(pairs);
      for (int64_t i = 0; i < kLanes; ++i)
        for (int64_t row = 0; row < rows; ++row) {
          const auto query = pair_in_all_lanes(queries + row * size + d + 2 * i);
          sums[row] = _mm512_dpbf16_ps(sums[row], query, reinterpret_cast<__m512bh>(pairs[i]));
        }
    }
    for (int64_t row = 0; row < rows; ++row) _mm512_storeu_ps(scores + row * kColumns + first, sums[row]);
  }
}

// Two columns side by side make the pairs of a product. Unpacking 32 features of both leaves features 0 to 3 of each
// eight in one register, and 4 to 7 in the other. This stores the sums of both registers in the order of features.
inline void store_features(__m512 lower, __m512 upper, float* to) {
  const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(lower, first, upper));
  _mm512_storeu_ps(to + kLanes, _mm512_permutex2var_ps(lower, last, upper));
}

// sums [rows, size] = weights values, `parts` times 32 features at a time.
template <int64_t rows, int64_t parts>
void add_features(
    const c10::BFloat16* weights, const c10::BFloat16* values, const int64_t* places, int64_t count, int64_t size,
    float* sums) {
  for (int64_t begin = 0; begin < size; begin += 32 * parts) {
    __m512 lower[rows][parts] = {}, upper[rows][parts] = {};
    for (int64_t i = 0; i < count; i += 2) {
      __m512bh low[parts], high[parts];
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t d = begin + 32 * part;
        const __m512i value = _mm512_loadu_si512(values + places[i] + d);
        const __m512i next = i + 1 < count ? _mm512_loadu_si512(values + places[i + 1] + d) : __m512i{};
        low[part] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(value, next));
        high[part] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(value, next));
      }
      for (int64_t row = 0; row < rows; ++row) {
        const auto pair = pair_in_all_lanes(weights + row * kColumns + i);
        for (int64_t part = 0; part < parts; ++part) {
          lower[row][part] = _mm512_dpbf16_ps(lower[row][part], pair, low[part]);
          upper[row][part] = _mm512_dpbf16_ps(upper[row][part], pair, high[part]);
        }
      }
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t part = 0; part < parts; ++part)
        store_features(lower[row][part], upper[row][part], sums + row * size + begin + 32 * part);
  }
}

template <int64_t rows>
void add_values(
    const c10::BFloat16* weights, const c10::BFloat16* values, const int64_t* places, int64_t count, int64_t size,
    float* sums) {
  // Sums of 64 features fit into the registers for up to four rows.
  const auto add = rows <= 4 && size % 64 == 0 ? add_features<rows, rows <= 4 ? 2 : 1> : add_features<rows, 1>;
  add(weights, values, places, count, size, sums);
}

#endif

// The products of `compute_few` for a task's rows: scores = queries keys^T, then sums [rows, size] = weights values.
// Here by loops.
template <typename T>
class ByLoops {
 public:
  ByLoops(Scratch<T>& scratch, int64_t rows) : scratch_(scratch), rows_(rows) {}

  void multiply_keys(const T* keys, const int64_t* places, int64_t count) const {
    in_groups<kRowsAtOnce<T>>(rows_, [&](auto n, int64_t row) {
      const T* queries = scratch_.queries.data() + row * scratch_.size;
      float* scores = scratch_.scores.data() + row * kColumns;
      multiply_keys_in_place<n>(queries, keys, places, count, scratch_.size, scores);
    });
  }

  void multiply_values(const T* values, const int64_t* places, int64_t count, float* sums) const {
    in_groups<kRowsAtOnce<T>>(rows_, [&](auto n, int64_t row) {
      const T* weights = scratch_.weights.data() + row * kColumns;
      add_values<n>(weights, values, places, count, scratch_.size, sums + row * scratch_.size);
    });
  }

 private:
  Scratch<T>& scratch_;
  int64_t rows_;
};

#ifdef INFER_AMX

// Writes 32 columns' values as the right sides of products, tiles [16 pairs, 16, 2], for 32 features (`halves` 1) or
// 64, into two places in turn (see `multiply_by_amx`).
template <int64_t halves>
class PairsInTurn {
 public:
  PairsInTurn(const c10::BFloat16* values, const int64_t* places, int64_t count)
      : values_(values), places_(places), count_(count) {}

  const c10::BFloat16* operator()(int64_t column) {
    c10::BFloat16* tiles = tiles_[column / kAmxInputs % 2];
    for (int64_t i = 0; i < kAmxInputs; i += 2)
      for (int64_t half = 0; half < halves; ++half) {
        const __m512i value = load(column + i, half), next = load(column + i + 1, half);
        c10::BFloat16* to = tiles + 32 * (i * halves + 2 * half);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(value, next));
        _mm512_store_si512(to + 32, _mm512_unpackhi_epi16(value, next));
      }
    return tiles;
  }

 private:
  __m512i load(int64_t column, int64_t half) const {
    return column < count_ ? _mm512_loadu_si512(values_ + places_[column] + 32 * half) : __m512i{};
  }

  const c10::BFloat16* values_;
  const int64_t* places_;
  int64_t count_;
  alignas(64) c10::BFloat16 tiles_[2][kAmxInputs * 32 * halves];
};

// The products of `compute_few` by matrix tiles, which take sixteen rows.
class ByAmx {
  using T = c10::BFloat16;

 public:
  ByAmx(Scratch<T>& scratch, int64_t rows) : scratch_(scratch), rows_(rows), shapes_(kAmxRows) {
    transpose(scratch.queries.data(), rows, scratch.size, kAmxRows, scratch.transposed.data());
    std::fill_n(scratch.weights.data() + rows * kColumns, (kAmxRows - rows) * kColumns, T(0));
  }

  // Computes keys queries^T, sixteen columns at a time, which are copied unless they lie at equal distances.
  void multiply_keys(const T* keys, const int64_t* places, int64_t count) const {
    const __m512i columns_of_a_query =
        _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 0);
    for (int64_t first = 0; first < count; first += kAmxRows) {
      int64_t apart = first + kAmxRows <= count ? places[first + 1] - places[first] : 0;
      for (int64_t i = first + 2; apart && i < first + kAmxRows; ++i)
        if (places[i] - places[i - 1] != apart) apart = 0;
      const T* from = keys + places[first];
      if (!apart) {
        apart = scratch_.size;
        for (int64_t i = 0; i < kAmxRows; ++i)
          std::memcpy(
              scratch_.keys.data() + i * apart, keys + places[std::min(first + i, count - 1)], apart * sizeof(T));
        from = scratch_.keys.data();
      }
      alignas(64) float by_column[kAmxRows * kAmxRows];
      tiles_read_memory();
      _tile_zero(0);
      for (int64_t d = 0; d < scratch_.size; d += kAmxInputs) {
        _tile_loadd(4, from + d, apart * sizeof(T));
        _tile_loadd(6, scratch_.transposed.data() + d * kAmxRows, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, by_column, 64);
      for (int64_t row = 0; row < rows_; ++row) {
        const __m512 scores = _mm512_i32gather_ps(columns_of_a_query, by_column + row, 4);
        _mm512_store_ps(scratch_.scores.data() + row * kColumns + first, scores);
      }
    }
  }

  void multiply_values(const T* values, const int64_t* places, int64_t count, float* sums) const {
    int64_t begin = 0;
    for (; begin + 64 <= scratch_.size; begin += 64)
      multiply_features<2>(values + begin, places, count, sums + begin);
    if (begin < scratch_.size) multiply_features<1>(values + begin, places, count, sums + begin);
  }

 private:
  template <int64_t halves>
  void multiply_features(const T* values, const int64_t* places, int64_t count, float* sums) const {
    constexpr int64_t kFeatures = 32 * halves;
    alignas(64) float unordered[kAmxRows * kFeatures];
    const int64_t columns = (count + kAmxInputs - 1) / kAmxInputs * kAmxInputs;
    multiply_by_amx<1, kFeatures, kFeatures>(
        scratch_.weights.data(), kColumns, columns, unordered, PairsInTurn<halves>(values, places, count));
    for (int64_t row = 0; row < rows_; ++row)
      for (int64_t i = 0; i < kFeatures; i += 32) {
        const float* from = unordered + row * kFeatures + i;
        store_features(_mm512_load_ps(from), _mm512_load_ps(from + 16), sums + row * scratch_.size + i);
      }
  }

  Scratch<T>& scratch_;
  int64_t rows_;
  AmxShapes shapes_;
};

#endif

// `compute_tiles` for few rows.
template <typename Products, typename T, typename Next, typename Finish>
void compute_few(
    Scratch<T>& scratch, const Task<T>& task, Range range, const Columns& columns, const T* k_store, const T* v_store,
    float scale, int64_t window, const Next& next, const Finish& finish) {
  const int64_t size = columns.size, count = task.queries * task.group;
  for (int64_t row = 0; row < count; ++row)
    std::memcpy(scratch.queries.data() + row * size, task.query(row, size), size * sizeof(T));
  const Products products(scratch, count);
  for (int64_t first = range.first; first < range.last; first += kColumns) {
    if (first + kColumns < range.last)
      fetch_tile(columns, task.head, first + kColumns, range.last, k_store, v_store);
    const Part tile = next();
    const int64_t seen = std::min(kColumns, range.last - first), width = (seen + 31) / 32 * 32;
    int64_t places[kColumns];
    columns.locate(task.head, first, first + seen, places);
    fetch_ahead<3>(k_store, places, seen, size);
    fetch_ahead<3>(v_store, places, seen, size);
    products.multiply_keys(k_store, places, seen);
    weigh(scratch, task, tile, first, width, scale, window);
    products.multiply_values(v_store, places, seen, tile.sums);
    finish(tile);
  }
}

// Whether there are loops for few rows of a type.
template <typename T>
constexpr bool kHasLoops = true;

#ifndef INFER_FEW_ROWS
template <>
constexpr bool kHasLoops<c10::BFloat16> = false;
#endif

// A task's parts of some tiles, one after the other: each is written to what next() returns, and handed to
// finish(part).
template <typename T, typename Next, typename Finish>
void compute_tiles(
    Scratch<T>& scratch, const Task<T>& task, Range range, const Columns& columns, const T* k_store, const T* v_store,
    float scale, int64_t window, Next next, Finish finish) {
  const int64_t size = columns.size, count = task.queries * task.group;
  if constexpr (kHasLoops<T>) {
    if (count <= kFewRows && size % 32 == 0) {
#ifdef INFER_AMX
      if constexpr (sizeof(T) == 2)
        if (amx_has_librarys_bits())
          return compute_few<ByAmx>(scratch, task, range, columns, k_store, v_store, scale, window, next, finish);
#endif
      if (has_librarys_bits(T{}))
        return compute_few<ByLoops<T>>(
            scratch, task, range, columns, k_store, v_store, scale, window, next, finish);
    }
  }
  // Filled up to a multiple of 16: a product is compiled for every size it meets, so sizes must come again.
  const int64_t rows = (count + kFewRows - 1) / kFewRows * kFewRows;
  for (int64_t row = 0; row < rows; ++row) {
    T* query = scratch.queries.data() + row * size;
    if (row < count)
      std::memcpy(query, task.query(row, size), size * sizeof(T));
    else
      std::fill_n(query, size, T(0));
  }
  if (rows <= kFewRows) transpose(scratch.queries.data(), rows, size, kFewRows, scratch.transposed.data());
  std::fill_n(scratch.weights.data() + count * kColumns, (rows - count) * kColumns, T(0));

  for (int64_t first = range.first; first < range.last; first += kColumns) {
    const Part tile = next();
    const int64_t seen = std::min(kColumns, range.last - first), width = (seen + kWidth - 1) / kWidth * kWidth;
    gather(scratch, columns, k_store, v_store, task.head, first, first + seen, width);
    multiply_keys(scratch, rows, count, size, width);
    weigh(scratch, task, tile, first, width, scale, window);
    brgemm(rows, size, width, kColumns, size, size, false, scratch.weights.data(), scratch.values.data(), tile.sums,
           kPair<T> == 2);
    finish(tile);
  }
}

// The parts of a task whose tiles are computed apart, and how many pieces are still computed.
struct Parts {
  Parts(int64_t tiles, int64_t rows, int64_t size, int64_t pieces)
      : rows(rows), size(size), numbers(tiles * rows * (size + 2)), left(pieces) {}

  int64_t rows, size;
  std::vector<float> numbers;
  std::atomic<int64_t> left;

  Part tile(int64_t index) {
    float* begin = numbers.data() + index * rows * (size + 2);
    return {begin, begin + rows, begin + 2 * rows};
  }

  void keep(int64_t index, const Part& part) {
    const Part own = tile(index);
    std::copy_n(part.largest, rows, own.largest);
    std::copy_n(part.total, rows, own.total);
    std::copy_n(part.sums, rows * size, own.sums);
  }
};

template <typename T>
void finish_rows(const Part& so_far, const Task<T>& task, int64_t size) {
  for (int64_t row = 0; row < task.queries * task.group; ++row) {
    T* out = task.out + row / task.group * task.out_stride + row % task.group * size;
    float* sums = so_far.sums + row * size;
    const float total = so_far.total[row];
    for (int64_t d = 0; d < size; ++d) sums[d] /= total;
    round_all(sums, out, size);
  }
}

// Computes all tiles of a task and merges them in order.
template <typename T>
void attend(
    Scratch<T>& scratch, const Task<T>& task, const Columns& columns, const T* k_store, const T* v_store, float scale,
    int64_t window) {
  const Part so_far = scratch.so_far();
  bool begun = false;
  compute_tiles(
      scratch, task, seen_by(task, window), columns, k_store, v_store, scale, window,
      [&] { return begun ? scratch.tile() : so_far; },
      [&](const Part& tile) {
        if (begun) merge(so_far, tile, task.queries * task.group, columns.size);
        begun = true;
      });
  finish_rows(so_far, task, columns.size);
}

// Computes some tiles of a task. The thread that computes the last piece merges all.
template <typename T>
void attend_piece(
    Scratch<T>& scratch, const Task<T>& task, Range piece, Parts& parts, const Columns& columns, const T* k_store,
    const T* v_store, float scale, int64_t window) {
  const Range all = seen_by(task, window);
  int64_t index = (piece.first - all.first) / kColumns;
  compute_tiles(
      scratch, task, piece, columns, k_store, v_store, scale, window, [&] { return scratch.tile(); },
      [&](const Part& tile) { parts.keep(index++, tile); });
  if (parts.left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  const Part so_far = parts.tile(0);
  for (int64_t i = 1; all.first + i * kColumns < all.last; ++i) merge(so_far, parts.tile(i), parts.rows, parts.size);
  finish_rows(so_far, task, columns.size);
}

// The sequences of a pass: the places of their queries and columns.
struct Pass {
  const int64_t *tables, *rows, *offsets, *lengths;  // block tables; of each sequence: its table, first query, columns
  int64_t sequences, table_width, block_size, heads, size;

  int64_t queries(int64_t sequence) const { return offsets[sequence + 1] - offsets[sequence]; }
  int64_t position(int64_t sequence, int64_t query) const { return lengths[sequence] - queries(sequence) + query; }
  Columns columns(int64_t sequence) const { return {tables + rows[sequence] * table_width, block_size, heads, size}; }
};

// Puts each token's keys or values, all heads of them side by side, at the token's own column.
template <typename T>
void put(const Pass& pass, const T* from, int64_t stride, T* store) {
  const int64_t tokens = pass.offsets[pass.sequences];
  parallel_for(tokens, 128, [&](int64_t begin, int64_t end) {
    int64_t sequence = std::upper_bound(pass.offsets, pass.offsets + pass.sequences, begin) - pass.offsets - 1;
    for (int64_t token = begin; token < end; ++token) {
      while (token >= pass.offsets[sequence + 1]) ++sequence;
      const int64_t column = pass.position(sequence, token - pass.offsets[sequence]);
      std::memcpy(pass.columns(sequence).head(store, column, 0), from + token * stride,
                  pass.heads * pass.size * sizeof(T));
    }
  });
}

// A token's heads have to lie side by side; the tokens themselves may lie apart, as parts of a wider product do.
at::Tensor heads_side_by_side(const at::Tensor& x) {
  return x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous();
}

// Shapes in attention.py.
at::Tensor attention(
    const at::Tensor& given_q, const at::Tensor& given_k, const at::Tensor& given_v, at::Tensor& k_store,
    at::Tensor& v_store, const at::Tensor& block_tables, const at::Tensor& rows, const at::Tensor& query_offsets,
    const at::Tensor& kv_lengths, double scale, int64_t window) {
  const at::Tensor q = heads_side_by_side(given_q), k = heads_side_by_side(given_k), v = heads_side_by_side(given_v);
  const int64_t heads = q.size(1), size = q.size(2), heads_kv = k_store.size(2), group = heads / heads_kv;
  const Pass pass{
      block_tables.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>(), query_offsets.const_data_ptr<int64_t>(),
      kv_lengths.const_data_ptr<int64_t>(), kv_lengths.size(0), block_tables.size(1), k_store.size(1), heads_kv, size};
  auto out = at::empty(q.sizes(), q.options());

  // The tiles of queries of all sequences, longest first; each is a task for every KV head, or several of them.
  const int64_t most = std::max<int64_t>(1, kRows / group), threads = threads_here();
  struct Tile {
    int64_t sequence, first, queries, columns;  // columns: tiles of 256 that its queries see
    int64_t work() const { return queries * columns; }
  };
  std::vector<Tile> tiles;
  int64_t decoded = 0;  // tiles of columns for sequences that decode, and one KV head
  for (int64_t sequence = 0; sequence < pass.sequences; ++sequence) {
    const int64_t queries = pass.queries(sequence), count = (queries + most - 1) / most;
    const int64_t each = count > 0 ? (queries + count - 1) / count : 0;
    for (int64_t first = 0; first < queries; first += each) {
      const int64_t own = std::min(each, queries - first), position = pass.position(sequence, first);
      const int64_t unseen = window > 0 ? std::max<int64_t>(0, position - window + 1) / kColumns : 0;
      tiles.push_back({sequence, first, own, (position + own + kColumns - 1) / kColumns - unseen});
      if (queries == 1) decoded += tiles.back().columns;
    }
  }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.work() > b.work(); });

  // A sequence that decodes is cut where it is longer than a thread's fair share of them all: in quarters of that.
  const int64_t piece = std::max(kFewTiles, decoded * heads_kv / (4 * threads));
  struct Piece {
    int64_t tile, head, first, count;  // of the tiles of columns; all of them where `parts` is missing
    Parts* parts;
  };
  std::vector<Piece> pieces;
  std::list<Parts> parts;
  for (int64_t i = 0; i < int64_t(tiles.size()); ++i) {
    const auto& tile = tiles[i];
    const bool cut = threads > 1 && tile.queries == 1 && tile.columns > piece;
    const int64_t count = cut ? (tile.columns + piece - 1) / piece : 1, each = (tile.columns + count - 1) / count;
    for (int64_t head = 0; head < heads_kv; ++head) {
      const int64_t cuts = (tile.columns + each - 1) / each;
      Parts* shared = cut ? &parts.emplace_back(tile.columns, group, size, cuts) : nullptr;
      for (int64_t first = 0; first < tile.columns; first += each)
        pieces.push_back({i, head, first, std::min(each, tile.columns - first), shared});
    }
  }

  with_product_type(q, [&](auto element) {
    using T = decltype(element);
    T *keys = k_store.mutable_data_ptr<T>(), *values = v_store.mutable_data_ptr<T>();
    put(pass, k.const_data_ptr<T>(), k.stride(0), keys);
    put(pass, v.const_data_ptr<T>(), v.stride(0), values);
    const T* queries = q.const_data_ptr<T>();
    T* result = out.mutable_data_ptr<T>();
    const auto task_of = [&](const Piece& piece) {
      const Tile& tile = tiles[piece.tile];
      const int64_t token = pass.offsets[tile.sequence] + tile.first;
      return Task<T>{
          queries + token * q.stride(0) + piece.head * group * size,
          result + (token * heads + piece.head * group) * size, q.stride(0), heads * size,
          pass.position(tile.sequence, tile.first), tile.queries, group, piece.head};
    };
    const auto range_of = [&](const Piece& piece) {
      const Range all = seen_by(task_of(piece), window);
      const int64_t first = all.first + piece.first * kColumns;
      return Range{first, std::min(all.last, first + piece.count * kColumns)};
    };
    std::atomic<int64_t> next{0};  // one after the other, largest first: parts of neighbours would differ in size
    parallel_for(std::min<int64_t>(threads, pieces.size()), 1, [&](int64_t, int64_t) {
      Scratch<T>& scratch = scratch_of_this_thread<T>(size);
      for (int64_t i = next++; i < int64_t(pieces.size()); i = next++) {
        if constexpr (kHasLoops<T>) {
          if (i + threads < int64_t(pieces.size())) {  // likely this thread's next
            const Piece& soon = pieces[i + threads];
            const Range range = range_of(soon);
            const Columns columns = pass.columns(tiles[soon.tile].sequence);
            fetch_tile(columns, soon.head, range.first, range.last, keys, values);
          }
        }
        const Piece& piece = pieces[i];
        const Task<T> task = task_of(piece);
        const Columns columns = pass.columns(tiles[piece.tile].sequence);
        if (piece.parts == nullptr)
          attend<T>(scratch, task, columns, keys, values, float(scale), window);
        else
          attend_piece<T>(
              scratch, task, range_of(piece), *piece.parts, columns, keys, values, float(scale), window);
      }
      at::native::cpublas::brgemm_release(kPair<T> == 2);
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_store, Tensor(b!) v_store, Tensor block_tables, "
      "Tensor rows, Tensor query_offsets, Tensor kv_lengths, float scale, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) { library.impl("attention", &attention); }

}  // namespace infer
