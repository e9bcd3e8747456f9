#include <algorithm>
#include <array>
#include <numeric>

#include "delta/sparse_model.hpp"
#include "delta/token.hpp"

namespace echoline::delta {

struct SparseEncoder::State {
  // The changes of a range; kept between calls for their memory.
  struct Range {
    std::vector<std::uint32_t> gaps;
    std::vector<std::uint16_t> tokens;
    std::vector<std::uint64_t> extras;
  };
  std::array<Range, kRangesMax> ranges;
  std::vector<std::uint16_t> dense, block_symbols;
  std::vector<std::uint64_t> dense_extras;
  BlockSink sink;
  SortedBlock sorted;
  std::uint32_t changed_bits[kBlockWordsMax];

  template <class V>
  static auto* with_room(V& v, std::size_t used, std::size_t more) {
    if (v.size() < used + more) v.resize(std::max(2 * v.size(), used + more + 4096));
    return v.data();
  }
  void make_room(const BlockModel& model, std::uint32_t elements) {
    elements += 32;  // vectors may be stored whole
    for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
      GapSink& g = sink.gap[r];
      g.gaps = with_room(ranges[r].gaps, g.count, elements);
      g.tokens = with_room(ranges[r].tokens, g.count, elements);
      g.extras = with_room(ranges[r].extras, g.extra_count, elements);
    }
    if (model.dense == 0) return;
    sink.dense = with_room(dense, sink.dense_count, elements);
    sink.dense_extras = with_room(dense_extras, sink.dense_extra_count, elements);
  }
  unsigned sort_block(const SparseModel& model, const std::byte* prev, std::uint32_t count, std::size_t element_bytes,
                      std::uint32_t changed, unsigned previous);
  std::uint64_t write(const SparseModel& model, const BlockGrid& grid, ByteVector& out);
};

// Sorts a block's elements under the symbol it gives, unless that is kSymbolUntouched.
unsigned SparseEncoder::State::sort_block(const SparseModel& model, const std::byte* prev, std::uint32_t count,
                                          std::size_t element_bytes, std::uint32_t changed, unsigned previous) {
  const auto sort = [&](unsigned symbol) {
    kernels().sort[width_index(element_bytes)](prev, count, model_for(model.block, symbol), sorted);
  };
  sort(previous);
  double expected = 0;  // changes
  for (std::uint32_t i = 0; i <= model.block.ranges - model.block.dense; ++i)
    expected += sorted.count[i] * model.density[i];
  if (changed == 0 && (expected > 3 || expected < 0.05)) return kSymbolUntouched;
  if (model.block.exponent_mask == 0 || std::abs(changed - expected) <= 4 + 3 * std::sqrt(expected)) return previous;
  const unsigned best = choose_symbol(model, prev, count, element_bytes, changed_bits, previous);
  if (best != previous) sort(best);
  return best;
}

// Gives the entropy of what it wrote, in bits.
std::uint64_t SparseEncoder::State::write(const SparseModel& model, const BlockGrid& grid, ByteVector& out) {
  const BlockModel& block = model.block;
  BitWriter bits;
  std::vector<RansRun> runs;
  std::vector<std::vector<std::uint16_t>> gap_tokens(kRangesMax);
  std::vector<Frequencies> tables;  // of all runs; reserved, because runs point into it
  tables.reserve(1 + 3 * kRangesMax);
  // Fits a table to counts, writes it and gives it.
  const auto add_table = [&](std::span<const std::uint64_t> counts) -> std::span<const Frequencies> {
    const unsigned precision = precision_for(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    tables.push_back(normalise(counts));
    coarsen(tables.back(), precision);
    if (!tables.back().empty()) write_frequencies(tables.back(), precision, bits);
    return std::span(tables).last(1);
  };
  const auto count_symbols = [](std::span<const std::uint16_t> symbols) {
    std::vector<std::uint64_t> counts(kTokensMax);
    for (const std::uint16_t s : symbols) ++counts[s];
    return counts;
  };
  double bound = 0;
  const auto add_bound = [&](std::span<const std::uint64_t> counts) {
    double whole = 0;
    for (const std::uint64_t n : counts) whole += static_cast<double>(n);
    for (const std::uint64_t n : counts) bound += entropy_bits(static_cast<double>(n), whole);
  };
  const auto put_extras = [&](std::span<const std::uint16_t> tokens, const std::uint64_t* extras,
                              unsigned token_offset) {
    for (const std::uint16_t entry : tokens) {
      const unsigned t = entry & ((1u << kTokenBits) - 1);
      if (t < token_offset + 16) continue;
      const unsigned open = extra_bits(t - token_offset);
      const std::uint64_t magnitude = *extras++;
      bound += open;
      if (open > 32) bits.put(magnitude >> 32, open - 32);
      bits.put(magnitude, std::min(open, 32u));
    }
  };

  bits.put(grid.length - 1, 13);
  bits.put(grid.first - 1, 13);
  bits.put(block.base, 11);
  bits.put(block.ranges - 1, 4);
  bits.put(block.dense, 5);
  for (std::uint32_t r = 0; r + 1 < block.ranges; ++r) bits.put(block.bound[r], 5);
  runs.push_back({block_symbols, add_table(count_symbols(block_symbols))});

  // Headers first, so that a reader has all tables before the first symbol.
  std::array<GapCode, kRangesMax> codes;
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& g = sink.gap[r];
    bits.put_number(g.count);
    if (g.count == 0) continue;
    codes[r] = choose_gap_code(static_cast<double>(g.count), static_cast<double>(g.seen));
    bits.put(codes[r].shift, 5);
    bits.put(codes[r].table, 5);
    std::vector<std::uint16_t>& tokens = gap_tokens[r];
    tokens.reserve(g.count + g.count / 16);
    for (std::uint32_t i = 0; i < g.count; ++i) {
      std::uint32_t high = g.gaps[i] >> codes[r].shift;
      for (; high >= kGapEscape; high -= kGapEscape) tokens.push_back(kGapEscape);
      tokens.push_back(static_cast<std::uint16_t>(high));
    }
    const std::span<const std::uint16_t> steps(g.tokens, g.count);
    runs.push_back({tokens, std::span(gap_frequencies()).subspan(codes[r].table, 1)});
    const std::vector<std::uint64_t> step_counts = count_symbols(steps);
    add_bound(step_counts);
    add_bound(std::array<std::uint64_t, 2>{g.count, g.seen - g.count});
    runs.push_back({steps, add_table(step_counts)});
  }
  const std::span<const std::uint16_t> dense_symbols(sink.dense, sink.dense_count);
  if (block.dense > 0) {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(block.dense) << kTokenBits);
    for (const std::uint16_t s : dense_symbols) ++counts[s];
    const std::size_t first = tables.size();
    for (std::uint32_t r = 0; r < block.dense; ++r) {
      const auto of_range = std::span(counts).subspan(static_cast<std::size_t>(r) << kTokenBits, kTokensMax);
      add_bound(of_range);
      const bool occurs = std::ranges::any_of(of_range, [](std::uint64_t n) { return n > 0; });
      bits.put(occurs, 1);
      add_table(of_range);
    }
    runs.push_back({dense_symbols, std::span(tables).subspan(first)});
  }
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& g = sink.gap[r];
    if (codes[r].shift > 0)
      for (std::uint32_t i = 0; i < g.count; ++i) bits.put(g.gaps[i], codes[r].shift);
    if (g.extra_count > 0) put_extras({g.tokens, g.count}, g.extras, 0);
  }
  if (sink.dense_extra_count > 0) put_extras(dense_symbols, sink.dense_extras, 1);

  const ByteVector bit_bytes = std::move(bits).finish();
  put_varint(out, bit_bytes.size());
  put_bytes(out, bit_bytes);
  rans_write(runs, out);
  return static_cast<std::uint64_t>(bound);
}

SparseEncoder::SparseEncoder() : state_(std::make_unique<State>()) {}
SparseEncoder::~SparseEncoder() = default;

SparseCount SparseEncoder::encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves,
                                  Digest* cur_leaves, ByteVector& out) {
  const std::size_t size = dtype_bytes(place.dtype);
  const unsigned width = width_index(size);
  const Kernels& k = kernels();
  State& s = *state_;
  BlockGrid grid;
  const SparseModel model = choose_model(prev, cur, place, grid);
  s.sink = {};
  s.block_symbols.clear();
  unsigned symbol = kSymbolUnshifted;
  std::uint64_t total = 0;
  for (std::size_t leaf = 0; leaf < cur.size(); leaf += kLeafBytes) {
    const std::size_t leaf_end = std::min(leaf + kLeafBytes, cur.size());
    if (prev_leaves) *prev_leaves++ = digest_bytes(prev.subspan(leaf, leaf_end - leaf));
    if (cur_leaves) *cur_leaves++ = digest_bytes(cur.subspan(leaf, leaf_end - leaf));
    for_each_block(grid, leaf / size, leaf_end / size, [&](std::uint64_t first, std::uint32_t count) {
      const std::byte* old = prev.data() + first * size;
      const std::byte* now = cur.data() + first * size;
      // Later memory of the old side is asked for bit by bit between the steps: all at once would wait for it. What is
      // hashed is needed a leaf ahead.
      const std::byte* ahead = old + (prev_leaves ? kLeafBytes : kPrefetchBytes);
      const auto prefetch_third = [&] {
        for (const std::byte* end = ahead + count * size / 3; ahead < end; ahead += 64) __builtin_prefetch(ahead);
      };
      prefetch_third();
      const std::uint32_t changed = k.diff[width](old, now, count, s.changed_bits);
      total += changed;
      prefetch_third();
      const unsigned chosen = s.sort_block(model, old, count, size, changed, symbol);
      s.block_symbols.push_back(static_cast<std::uint16_t>(chosen));
      prefetch_third();
      if (chosen == kSymbolUntouched) return true;
      symbol = chosen;
      s.make_room(model.block, count);
      k.collect[width](old, now, count, model_for(model.block, symbol), s.sorted, s.changed_bits, s.sink);
      return true;
    });
  }
  return {total, total > 0 ? s.write(model, grid, out) : 0};
}

}  // namespace echoline::delta
