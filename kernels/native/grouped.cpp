// Linear layers on weights in groups: see grouped.py for the form of panels.
//
// A block of a panel, 32 inputs of 32 outputs, is widened to the type of x, exactly: in registers, if few rows are
// multiplied in float32, else in a cache. Rows of x meet it there, and a group's float32 sums are multiplied by its
// scales and added to those of the groups before it, in both places in the same order. So the order of every sum, and
// with it a row's bits, depends on the number of inputs alone.
#include "grouped.h"

namespace infer {
namespace {

constexpr int64_t kRowsAtOnce = 128;  // that meet a panel, at most: their sums, 16 kB, stay in the first-level cache

// ---------------------------------------------------------------------- panels

// sums [rows, 32] += scales [32] * products [rows, 32] - mins [32] * totals [rows]; without mins, those are not read.
template <bool with_mins>
void add_group(
    const float* products, int64_t rows, const float* scales, const float* mins, const float* totals, float* sums) {
  for (int64_t output = 0; output < kOutputs; output += kWide) {
    const auto scale = load(scales + output), min = load(mins + output);
    for (int64_t row = 0; row < rows; ++row) {
      float* to = sums + row * kOutputs + output;
      auto sum = load(to) + scale * load(products + row * kOutputs + output);
      if constexpr (with_mins) sum -= min * totals[row];
      store(sum, to);
    }
  }
}

// Rows of x from `row` on times a panel -> sums [rows, 32].
template <int64_t bits, typename By>
void multiply_panel(
    By& by, const Blocks<typename By::T>& x, int64_t row, int64_t rows, const uint8_t* bytes, const Panel& panel,
    int64_t inputs, float* sums) {
  using T = typename By::T;
  const int64_t blocks = inputs / kInputs;
  alignas(64) T weights[2][kWeights];
  alignas(64) float products[kTile * kOutputs];
  FactorReader reader(1);
  std::memset(sums, 0, rows * kOutputs * sizeof(float));
  const auto widen = [&](const Place& at) {
    at.fetch_ahead();
    By::template widen<bits>(at.words(), panel, weights[at.index % 2]);
  };
  Place at(bytes, panel), next(bytes, panel);
  widen(at);
  for (; at.index < blocks; at.advance()) {
    // One block ahead: a load of a tile would wait for stores that are not in the cache yet.
    next.advance();
    if (next.index < blocks) widen(next);
    const Factors& factors = reader.read(at);
    for (int64_t group = 0; group < panel.sums(); ++group)
      for (int64_t tile = 0; tile < rows; tile += kTile) {
        const int64_t count = std::min(kTile, rows - tile);
        by.multiply(x.block(at.index, row + tile), count, weights[at.index % 2], group, panel.sums(), products);
        const auto add = panel.mins ? add_group<true> : add_group<false>;
        add(products, count, factors.scales[group], factors.mins, x.sum(at.index, row + tile), sums + tile * kOutputs);
      }
  }
}

// Calls function(n, parts) with constants: `rows` rows of a slab, and the registers of outputs that go with them.
template <typename Function>
void with_slab(int64_t rows, const Function& function) {
  with_constant<ByFloats::kRows>(rows, [&](auto n) {
    function(n, std::integral_constant<int64_t, std::min<int64_t>(kOutputs / kWide, n * 4 <= kFloatSums ? 4 : 2)>{});
  });
}

// The same with float32. One slab of rows meets a block in registers. If there are more, they come after each other,
// and some blocks are widened for all of them.
template <int64_t bits>
void multiply_panel(
    ByFloats& by, const Blocks<float>& x, int64_t row, int64_t rows, const uint8_t* bytes, const Panel& panel,
    int64_t inputs, float* sums) {
  const int64_t blocks = inputs / kInputs;
  std::memset(sums, 0, rows * kOutputs * sizeof(float));
  FactorReader reader(1 / kByteUnit);
  Place at(bytes, panel);
  const auto add = [&](auto n, auto parts, auto numbers, const Factors& factors, int64_t block, int64_t first,
                       int64_t output) {
    add_block<n, parts, bits>(
        numbers, panel, factors.scales[0] + output, factors.mins + output, x.block(block, row + first),
        x.sum(block, row + first), sums + first * kOutputs + output);
  };
  if (rows <= x.slab) {
    with_slab(rows, [&](auto n, auto parts) {
      for (; at.index < blocks; at.advance()) {
        at.fetch_ahead();
        const Factors& factors = reader.read(at);
        for (int64_t output = 0; output < kOutputs; output += parts * kWide)
          add(n, parts, Stored<parts, bits>(at.words() + output * bits, panel), factors, at.index, 0, output);
      }
    });
    return;
  }
  while (at.index < blocks) {
    const int64_t begin = at.index, end = std::min(begin + ByFloats::kBlocks, blocks);
    for (; at.index < end; at.advance()) {
      at.fetch_ahead();
      by.factors[at.index - begin] = reader.read(at);
      widen_block<bits>(at.words(), panel, by.weights[at.index - begin]);
    }
    for (int64_t first = 0; first < rows; first += x.slab)
      with_slab(std::min(x.slab, rows - first), [&](auto n, auto parts) {
        for (int64_t block = begin; block < end; ++block)
          for (int64_t output = 0; output < kOutputs; output += parts * kWide)
            add(n, parts, Widened(by.weights[block - begin] + output), by.factors[block - begin], block, first, output);
      });
  }
}

template <typename By>
void multiply(
    By& by, const Blocks<typename By::T>& x, int64_t row, int64_t rows, const uint8_t* bytes, const Panel& panel,
    int64_t inputs, float* sums) {
  TORCH_CHECK(panel.groups < 2 || !panel.mins, "a block with mins is one group");
  by.prepare(panel, std::min(x.padded, kTile));
  with_bits(panel.bits, [&](auto bits) { multiply_panel<bits>(by, x, row, rows, bytes, panel, inputs, sums); });
}

// Computes x times sets of panels. A set is the panels i, i + sets, …; it is the columns i of `together` matrices of
// equal size. Calls finish(sums [together, rows, 32], first row, rows, first panel of the set).
template <typename By, typename From, typename Finish>
void multiply_all(
    const at::Tensor& x, const at::Tensor& bytes, const at::Tensor& table, int64_t together, const Finish& finish) {
  const Panel* panels = panels_of(table);
  const int64_t sets = table.size(0) / together, inputs = x.size(1), count = x.size(0);
  const Blocks<typename By::T> blocks(
      x.const_data_ptr<From>(), x.stride(0), count, inputs, By::padded(count), By::slab(count));
  // Chunks of nearly equal size: threads take equal shares of tasks, and the last chunk must not be a small one.
  const int64_t chunks = at::divup(count, kRowsAtOnce / By::kRows * By::kRows);
  const int64_t at_once = chunks ? at::divup(at::divup(count, chunks), By::kRows) * By::kRows : 0;
  parallel_for(chunks * sets, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[2 * kRowsAtOnce * kOutputs];
    By by;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / sets * at_once, set = task % sets;
      const int64_t rows = std::min(at_once, count - row);
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

// Adds a field of a block to its values, a byte each: `width` bits of `bytes` bytes, which become bits from `place` on.
// See `Field` in common/models/gguf/groups.py for the order. Eight bytes are moved at once.
void add_field(const uint8_t* from, int64_t bytes, int64_t width, int64_t run, int64_t place, uint8_t* to) {
  constexpr uint64_t kEach = 0x0101010101010101;
  const auto add = [&](uint64_t found) {
    uint64_t values;
    std::memcpy(&values, to, sizeof(values));
    values |= found << place;
    std::memcpy(to, &values, sizeof(values));
    to += sizeof(values);
  };
  if (run == 1) {  // single bits: a byte has those of eight neighbours
    for (int64_t byte = 0; byte < bytes; ++byte)
      add(((from[byte] * kEach & 0x8040201008040201) + 0x7f * kEach) >> 7 & kEach);
    return;
  }
  for (int64_t begin = 0; begin < bytes; begin += run)
    for (int64_t shift = 0; shift < 8; shift += width)
      for (int64_t byte = begin; byte < begin + run; byte += 8) {
        uint64_t eight;
        std::memcpy(&eight, from + byte, sizeof(eight));
        add(eight >> shift & ((1 << width) - 1) * kEach);
      }
}

// Blocks [N, blocks, bytes] -> the values in their fields, [N, K]. `fields` has the three numbers of each field.
void read_fields(const at::Tensor& stored, at::IntArrayRef fields, at::Tensor& values) {
  const int64_t size = stored.size(2), count = stored.size(0) * stored.size(1), inputs = values.numel() / count;
  const auto* from = stored.const_data_ptr<uint8_t>();
  auto* to = values.mutable_data_ptr<uint8_t>();
  parallel_for(count, rows_per_task(inputs), [&](int64_t begin, int64_t end) {
    std::memset(to + begin * inputs, 0, (end - begin) * inputs);
    for (int64_t block = begin; block < end; ++block) {
      int64_t place = 0;
      for (size_t i = 0; i < fields.size(); i += 3) {
        const int64_t width = fields[i + 1];
        add_field(
            from + block * size + fields[i], inputs * width / 8, width, fields[i + 2], place, to + block * inputs);
        place += width;
      }
    }
  });
}

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
  parallel_for(words.size(0), 8, [&](int64_t begin, int64_t end) {
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
    parallel_for(rows.size(0), rows_per_task(inputs), [&](int64_t begin, int64_t end) {
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
  library.def("read_fields(Tensor stored, int[] fields, Tensor(a!) values) -> ()");
  library.def("pack_words(Tensor values, Tensor(a!) words) -> ()");
  library.def("grouped_rows(Tensor rows, Tensor bytes, Tensor table, int inputs, ScalarType type) -> Tensor");
}

TORCH_LIBRARY_IMPL(infer, CPU, library) {
  library.impl("grouped_linear", &grouped_linear);
  library.impl("grouped_gated_linear", &grouped_gated_linear);
  library.impl("read_fields", &read_fields);
  library.impl("pack_words", &pack_words);
  library.impl("grouped_rows", &grouped_rows);
}

}  // namespace infer
