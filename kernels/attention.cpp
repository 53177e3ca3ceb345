// Attention over a KV store of blocks, on a CPU: see attention.py for what it is and for the shapes.
//
// The queries of one sequence that share a KV head are the rows of a small matrix. They meet the sequence's columns a
// tile of 256 at a time, and keep three things between tiles, as in Milakov & Gimelshein (2018) and FlashAttention
// (Dao et al. 2022): the largest score so far, the sum of weights, and the weighted sum of values.
//
//              columns   0 … 255     256 … 511   512 … 767           one tile of columns:
//   row 0                ████████    ████████    ███·····              scores  = Q K^T
//   row 1                ████████    ████████    ████····              weights = exp(scores - largest)
//   row 2                ████████    ████████    █████···              sum     = weights V
//                                                     └ hidden: the position rule
//
// A row has the same bits whatever is computed beside it. Tiles begin at multiples of 256, not where a window or a chunk
// begins; a hidden column has the weight 0, which adds nothing; every sum runs over columns or features in order. So it
// makes no difference whether a token is decoded, or prefilled alone, in a chunk or with others.
#include "native.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace infer {
namespace {

constexpr int64_t kColumns = 256; // of a tile: long enough that a product is worth its call
constexpr int64_t kWidth = 64;    // of a tile's products, times one to four: what is not there is not computed
constexpr int64_t kRows = 128;    // queries times heads in a group, computed together at the most
constexpr int64_t kFewRows = 16;  // so many are computed the other way round: see `multiply_keys`
constexpr float kHidden = -std::numeric_limits<float>::infinity();

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
};

// What one thread works on.
template <typename T>
struct Scratch {
  explicit Scratch(int64_t size)
      : size(size), queries(kRows * size), turned(kFewRows * size), keys(kColumns * size), packed(kColumns * size),
        values(kColumns * size), zeros(size), weights(kRows * kColumns), scores(kRows * kColumns), sums(kRows * size),
        largest(kRows), total(kRows) {}

  int64_t size;                  // numbers in a head
  std::vector<T> queries;        // [rows, size]
  std::vector<T> turned;         // [size / pair, 16, pair]: the queries as the right side of a product
  std::vector<T> keys;           // [width, size], of one tile
  std::vector<T> packed;         // [size / pair, width, pair]: the keys as the right side of a product
  std::vector<T> values;         // [width / pair, size, pair]
  std::vector<T> zeros;          // [size]: a column that is not there
  std::vector<T> weights;        // [rows, 256]
  std::vector<float> scores;     // [rows, 256]
  std::vector<float> sums;       // [rows, size]: weighted values so far
  std::vector<float> largest;    // [rows]
  std::vector<float> total;      // [rows]: weights so far
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
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(scratch.keys.data() + i * size, columns.head(k_store, first + i, head), size * sizeof(T));
  std::fill_n(scratch.keys.data() + count * size, (width - count) * size, T(0));
  for (int64_t i = 0; i < width; i += kPair<T>) {
    T* to = scratch.values.data() + i * size;
    const T* value = i < count ? columns.head(v_store, first + i, head) : scratch.zeros.data();
    if constexpr (kPair<T> == 1) {
      std::memcpy(to, value, size * sizeof(T));
    } else {
      const T* next = i + 1 < count ? columns.head(v_store, first + i + 1, head) : scratch.zeros.data();
      for (int64_t d = 0; d < size; ++d) {  // two columns, number by number
        to[2 * d] = value[d];
        to[2 * d + 1] = next[d];
      }
    }
  }
}

// [count, size] -> [size / pair, width, pair], zeros from `count` to `width`.
template <typename T>
void turn(const T* from, int64_t count, int64_t size, int64_t width, T* to) {
  for (int64_t d = 0; d < size; ++d)
    for (int64_t i = 0; i < width; ++i)
      to[(d / kPair<T> * width + i) * kPair<T> + d % kPair<T>] = i < count ? from[i * size + d] : T(0);
}

// scores [rows, width] = queries keys^T. With few rows it is cheaper to turn the queries, once a task, than the keys of
// every tile: the product is then keys queries^T, of the same numbers in the same order. Rows from `count` on only
// fill up.
template <typename T>
void multiply_keys(Scratch<T>& scratch, int64_t rows, int64_t count, int64_t size, int64_t width) {
  constexpr bool paired = kPair<T> == 2;
  if (rows > kFewRows) {
    turn(scratch.keys.data(), width, size, width, scratch.packed.data());
    brgemm(rows, width, size, size, width, kColumns, false, scratch.queries.data(), scratch.packed.data(),
           scratch.scores.data(), paired);
    return;
  }
  float by_column[kColumns * kFewRows];
  brgemm(width, kFewRows, size, size, kFewRows, kFewRows, false, scratch.keys.data(), scratch.turned.data(), by_column,
         paired);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < width; ++i) scratch.scores[row * kColumns + i] = by_column[i * kFewRows + row];
}

// Scores to weights, for one row whose visible columns of this tile are `begin` to `end`. Rescales what the row has so
// far to the new largest score.
template <typename T>
void weigh(
    Scratch<T>& scratch, int64_t row, int64_t begin, int64_t end, float scale, int64_t size, int64_t width) {
  float* scores = scratch.scores.data() + row * kColumns;
  T* weights = scratch.weights.data() + row * kColumns;
  if (begin >= end) {  // none: the row stays as it is
    std::fill_n(weights, width, T(0));
    return;
  }
  std::fill(scores, scores + begin, kHidden);
  std::fill(scores + end, scores + width, kHidden);
  for (int64_t i = 0; i < width; ++i) scores[i] *= scale;
  const float best = std::max(scratch.largest[row], largest_of(scores, width));
  const float rescale = exp_of_nonpositive(scratch.largest[row] - best);
  for (int64_t i = 0; i < width; ++i) {
    scores[i] = exp_of_nonpositive(scores[i] - best);
    weights[i] = from_float<T>(scores[i]);
  }
  OrderedSum added;
  added.add(width, [&](int64_t i) { return scores[i]; });
  scratch.total[row] = scratch.total[row] * rescale + added.total();
  scratch.largest[row] = best;
  float* sums = scratch.sums.data() + row * size;
  for (int64_t d = 0; d < size; ++d) sums[d] *= rescale;
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
};

template <typename T>
void attend(
    Scratch<T>& scratch, const Task<T>& task, const Columns& columns, const T* k_store, const T* v_store, float scale,
    int64_t window) {
  const int64_t size = columns.size, count = task.queries * task.group;
  // Filled up to a multiple of 16: a product is compiled for every size it meets, so sizes must come again.
  const int64_t rows = (count + kFewRows - 1) / kFewRows * kFewRows;
  for (int64_t row = 0; row < rows; ++row) {
    T* query = scratch.queries.data() + row * size;
    if (row < count)
      std::memcpy(query, task.q + row / task.group * task.query_stride + row % task.group * size, size * sizeof(T));
    else
      std::fill_n(query, size, T(0));
  }
  if (rows <= kFewRows) turn(scratch.queries.data(), rows, size, kFewRows, scratch.turned.data());
  std::fill_n(scratch.weights.data() + count * kColumns, (rows - count) * kColumns, T(0));
  std::fill_n(scratch.sums.data(), rows * size, 0.0f);
  std::fill_n(scratch.largest.data(), rows, kHidden);
  std::fill_n(scratch.total.data(), rows, 0.0f);

  const int64_t last = task.position + task.queries;  // the last query sees the columns before this one
  const int64_t first_seen = window > 0 ? std::max<int64_t>(0, task.position - window + 1) : 0;
  for (int64_t first = first_seen / kColumns * kColumns; first < last; first += kColumns) {
    const int64_t seen = std::min(kColumns, last - first), width = (seen + kWidth - 1) / kWidth * kWidth;
    gather(scratch, columns, k_store, v_store, task.head, first, first + seen, width);
    multiply_keys(scratch, rows, count, size, width);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t position = task.position + row / task.group;
      const int64_t begin = window > 0 ? position - window + 1 - first : 0, end = position + 1 - first;
      weigh(scratch, row, std::max<int64_t>(begin, 0), std::min(end, width), scale, size, width);
    }
    brgemm(rows, size, width, kColumns, size, size, true, scratch.weights.data(), scratch.values.data(),
           scratch.sums.data(), kPair<T> == 2);
  }
  for (int64_t row = 0; row < count; ++row) {
    T* out = task.out + row / task.group * task.out_stride + row % task.group * size;
    const float* sums = scratch.sums.data() + row * size;
    for (int64_t d = 0; d < size; ++d) out[d] = from_float<T>(sums[d] / scratch.total[row]);
  }
}

// The sequences of a pass: whose queries are where, and whose columns.
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
  at::parallel_for(0, tokens, 128, [&](int64_t begin, int64_t end) {
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

  // The tiles of queries of all sequences; each is a task for every KV head.
  const int64_t tile = std::max<int64_t>(1, kRows / group);
  struct Tile {
    int64_t sequence, first;
  };
  std::vector<Tile> tiles;
  for (int64_t sequence = 0; sequence < pass.sequences; ++sequence) {
    const int64_t count = (pass.queries(sequence) + tile - 1) / tile;
    // Early queries of a prompt see few columns and late ones many: in this order each half has as much to do.
    for (int64_t i = 0; i < count; ++i) tiles.push_back({sequence, (i % 2 ? count - 1 - i / 2 : i / 2) * tile});
  }

  with_product_type(q, [&](auto element) {
    using T = decltype(element);
    T *keys = k_store.mutable_data_ptr<T>(), *values = v_store.mutable_data_ptr<T>();
    put(pass, k.const_data_ptr<T>(), k.stride(0), keys);
    put(pass, v.const_data_ptr<T>(), v.stride(0), values);
    const T* queries = q.const_data_ptr<T>();
    T* result = out.mutable_data_ptr<T>();
    at::parallel_for(0, int64_t(tiles.size()) * heads_kv, 1, [&](int64_t begin, int64_t end) {
      Scratch<T>& scratch = scratch_of_this_thread<T>(size);
      for (int64_t i = begin; i < end; ++i) {
        const auto [sequence, first] = tiles[i / heads_kv];
        const int64_t head = i % heads_kv, token = pass.offsets[sequence] + first;
        const Task<T> task{
            queries + token * q.stride(0) + head * group * size, result + (token * heads + head * group) * size,
            q.stride(0), heads * size, pass.position(sequence, first), std::min(tile, pass.queries(sequence) - first),
            group, head};
        attend<T>(scratch, task, pass.columns(sequence), keys, values, float(scale), window);
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
