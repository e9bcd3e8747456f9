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
    std::vector<std::uint16_t> tokens, gap_tokens;
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

namespace {

// Puts a segment's bits and runs of symbols together, in the order of FORMAT.md.
class Assembly {
 public:
  Assembly() { tables_.reserve(1 + 3 * kRangesMax); }

  void put_model(const BlockModel& model, const BlockGrid& grid) {
    bits_.put(grid.length - 1, 13);
    bits_.put(grid.first - 1, 13);
    bits_.put(model.base, 11);
    bits_.put(model.ranges - 1, 4);
    bits_.put(model.dense, 5);
    for (std::uint32_t r = 0; r + 1 < model.ranges; ++r) bits_.put(model.bound[r], 5);
  }
  void put_blocks(std::span<const std::uint16_t> symbols) { runs_.push_back({symbols, add_table(counts_of(symbols))}); }

  // Count, codes and tables of a range coded by gaps; gives its code.
  GapCode put_gaps(const GapSink& gap, std::vector<std::uint16_t>& tokens) {
    bits_.put_number(gap.count);
    if (gap.count == 0) return {};
    const GapCode code = choose_gap_code(static_cast<double>(gap.count), static_cast<double>(gap.seen));
    bits_.put(code.shift, 5);
    bits_.put(code.table, 5);
    tokens.clear();
    for (std::uint32_t i = 0; i < gap.count; ++i) {
      std::uint32_t high = gap.gaps[i] >> code.shift;
      for (; high >= kGapEscape; high -= kGapEscape) tokens.push_back(kGapEscape);
      tokens.push_back(static_cast<std::uint16_t>(high));
    }
    runs_.push_back({tokens, std::span(gap_frequencies()).subspan(code.table, 1)});
    const std::span<const std::uint16_t> steps(gap.tokens, gap.count);
    const std::vector<std::uint64_t> counts = counts_of(steps);
    runs_.push_back({steps, add_table(counts)});
    add_bound(counts);
    add_bound(std::array<std::uint64_t, 2>{gap.count, gap.seen - gap.count});
    return code;
  }
  // Tables of the dense ranges, whose symbols are `range << kTokenBits | symbol`.
  void put_dense(std::uint32_t ranges, std::span<const std::uint16_t> symbols) {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(ranges) << kTokenBits);
    for (const std::uint16_t s : symbols) ++counts[s];
    const std::size_t first = tables_.size();
    for (std::uint32_t r = 0; r < ranges; ++r) {
      const auto own = std::span(counts).subspan(static_cast<std::size_t>(r) << kTokenBits, kTokensMax);
      bits_.put(std::ranges::any_of(own, [](std::uint64_t n) { return n > 0; }), 1);
      add_table(own);
      add_bound(own);
    }
    runs_.push_back({symbols, std::span(tables_).subspan(first)});
  }

  // Behind all tables: what symbols leave open.
  void put_low_bits(const GapSink& gap, const GapCode& code) {
    for (std::uint32_t i = 0; i < gap.count; ++i) bits_.put(gap.gaps[i], code.shift);
  }
  // Of tokens that begin at `first_token` among the symbols.
  void put_extras(std::span<const std::uint16_t> symbols, unsigned first_token, const std::uint64_t* magnitudes) {
    for (const std::uint16_t entry : symbols) {
      const unsigned symbol = entry & ((1u << kTokenBits) - 1);
      if (symbol < first_token + 16) continue;
      const unsigned open = extra_bits(symbol - first_token);
      const std::uint64_t magnitude = *magnitudes++;
      if (open > 32) bits_.put(magnitude >> 32, open - 32);
      bits_.put(magnitude, std::min(open, 32u));
      bound_ += open;
    }
  }

  // Appends everything; gives its entropy in bits.
  std::uint64_t finish(ByteVector& out) && {
    const ByteVector bytes = std::move(bits_).finish();
    put_varint(out, bytes.size());
    put_bytes(out, bytes);
    rans_write(runs_, out);
    return static_cast<std::uint64_t>(bound_);
  }

 private:
  static std::vector<std::uint64_t> counts_of(std::span<const std::uint16_t> symbols) {
    std::vector<std::uint64_t> counts(kTokensMax);
    for (const std::uint16_t s : symbols) ++counts[s];
    return counts;
  }
  // Fits a table to counts and writes it, unless all are zero.
  std::span<const Frequencies> add_table(std::span<const std::uint64_t> counts) {
    const unsigned precision = precision_for(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    tables_.push_back(normalise(counts));
    coarsen(tables_.back(), precision);
    if (!tables_.back().empty()) write_frequencies(tables_.back(), precision, bits_);
    return std::span(tables_).last(1);
  }
  void add_bound(std::span<const std::uint64_t> counts) {
    double whole = 0;
    for (const std::uint64_t n : counts) whole += static_cast<double>(n);
    for (const std::uint64_t n : counts) bound_ += entropy_bits(static_cast<double>(n), whole);
  }
  BitWriter bits_;
  std::vector<Frequencies> tables_;  // of all runs; never moves, because runs point into it
  std::vector<RansRun> runs_;
  double bound_ = 0;
};

}  // namespace

// Gives the entropy of what it wrote, in bits.
std::uint64_t SparseEncoder::State::write(const SparseModel& model, const BlockGrid& grid, ByteVector& out) {
  const BlockModel& block = model.block;
  Assembly assembly;
  assembly.put_model(block, grid);
  assembly.put_blocks(block_symbols);
  std::array<GapCode, kRangesMax> codes;
  for (std::uint32_t r = block.dense; r < block.ranges; ++r)
    codes[r] = assembly.put_gaps(sink.gap[r], ranges[r].gap_tokens);
  const std::span<const std::uint16_t> dense_symbols(sink.dense, sink.dense_count);
  if (block.dense > 0) assembly.put_dense(block.dense, dense_symbols);
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& gap = sink.gap[r];
    assembly.put_low_bits(gap, codes[r]);
    assembly.put_extras({gap.tokens, gap.count}, 0, gap.extras);
  }
  assembly.put_extras(dense_symbols, 1, sink.dense_extras);
  return std::move(assembly).finish(out);
}

SparseEncoder::SparseEncoder() : state_(std::make_unique<State>()) {}
SparseEncoder::~SparseEncoder() = default;

SparseCount SparseEncoder::encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves,
                                  Digest* cur_leaves, EntropyCounter* entropy, ByteVector& out) {
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
      if (entropy) entropy->add(place.dtype, old, now, count, s.changed_bits);
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
