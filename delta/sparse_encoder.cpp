#include <algorithm>
#include <array>
#include <numeric>
#include <optional>

#include "delta/raw_memory.hpp"
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
  std::vector<std::uint16_t> block_symbols;
  RawVector<std::uint16_t> dense;         // room for all elements of a segment; memory that is not used costs nothing
  std::vector<std::uint32_t> dense_runs;  // symbols of each block that is not untouched
  std::vector<std::uint64_t> dense_extras;
  BlockSink sink;
  SortedBlock sorted;
  RansWriter rans;
  std::optional<SharedModel> shared;
  std::uint32_t changed_bits[kBlockWordsMax];

  template <class V>
  static auto* with_room(V& v, std::size_t used, std::size_t more) {
    if (v.size() < used + more) v.resize(std::max(2 * v.size(), used + more + 4096));
    return v.data();
  }
  void make_room(const BlockModel& model, std::uint32_t elements) {
    elements += kSpareElements;
    for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
      GapSink& g = sink.gap[r];
      g.gaps = with_room(ranges[r].gaps, g.count, elements);
      g.tokens = with_room(ranges[r].tokens, g.count, elements);
      g.extras = with_room(ranges[r].extras, g.extra_count, elements);
    }
    if (model.dense == 0) return;
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

// The symbols of dense ranges, `range << kTokenBits | symbol`, and the number of them in each block.
struct DenseSymbols {
  std::span<const std::uint16_t> symbols;  // kSpareElements more can be read
  std::span<const std::uint32_t> runs;
};

// Counts of dense symbols: of all blocks, or of a sample of the blocks where there are many.
struct DenseCounts {
  std::vector<std::uint32_t> of;  // range << kTokenBits | symbol
  bool is_sample = false;
};

DenseCounts count_dense(std::uint32_t ranges, const DenseSymbols& dense) {
  constexpr std::size_t kEnough = 1u << 17;  // tables fitted to so many make a segment 0.3 % longer at most
  constexpr std::size_t kLanes = 4;          // counts taken in turns: adding to the same one twice waits for the first
  const std::size_t entries = static_cast<std::size_t>(ranges) << kTokenBits;
  if (dense.symbols.size() < entries) {
    std::vector<std::uint32_t> counts(entries);
    for (const std::uint16_t s : dense.symbols) ++counts[s];
    return {std::move(counts), false};
  }
  const std::size_t every = std::max<std::size_t>(dense.symbols.size() / kEnough, 1);
  std::vector<std::uint32_t> counts(kLanes * entries);
  std::uint32_t* const lanes[kLanes] = {counts.data(), counts.data() + entries, counts.data() + 2 * entries,
                                        counts.data() + 3 * entries};
  const std::uint16_t* at = dense.symbols.data();
  for (std::size_t run = 0; run < dense.runs.size(); at += dense.runs[run++]) {
    if (run % every != 0) continue;
    std::uint32_t i = 0;
    for (; i + kLanes <= dense.runs[run]; i += kLanes)
      for (std::size_t k = 0; k < kLanes; ++k) ++lanes[k][at[i + k]];
    for (; i < dense.runs[run]; ++i) ++lanes[0][at[i]];
  }
  for (std::size_t i = 0; i < entries; ++i) lanes[0][i] += lanes[1][i] + lanes[2][i] + lanes[3][i];
  counts.resize(entries);
  return {std::move(counts), every > 1};
}

// Weights of a dense range's table. The last symbols, rarer than a table can express, share an escape.
struct DenseTable {
  std::vector<std::uint64_t> weights;
  bool escape = false;
};

DenseTable fit_dense(std::span<const std::uint32_t> counts, bool is_sample) {
  std::uint64_t total = 0;
  std::size_t end = 1;  // behind the last symbol with a place of its own
  for (const std::uint32_t n : counts) total += n;
  for (std::size_t s = 1; s < counts.size(); ++s)
    if (2ull * kRansSlots * counts[s] > total) end = s + 1;
  DenseTable table;
  table.weights.assign(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(end));
  const std::uint64_t others =
      std::accumulate(counts.begin() + static_cast<std::ptrdiff_t>(end), counts.end(), std::uint64_t{0});
  table.escape = others > 0 || is_sample;
  if (is_sample)
    for (std::uint64_t& weight : table.weights) weight = std::max<std::uint64_t>(weight, 1);
  if (table.escape) table.weights.push_back(std::max<std::uint64_t>(others, 1));
  return table;
}

// Puts a segment's bits and runs of symbols together, in the order of FORMAT.md.
class Assembly {
 public:
  Assembly() { codes_.reserve((1 + 2 * kRangesMax) * kTokensMax); }

  void put_model(const BlockModel& model, const BlockGrid& grid) {
    bits_.put(grid.length - 1, 13);
    bits_.put(grid.first - 1, 13);
    bits_.put(model.base, 11);
    bits_.put(model.ranges - 1, 4);
    bits_.put(model.dense, 5);
    for (std::uint32_t r = 0; r + 1 < model.ranges; ++r) bits_.put(model.bound[r], 5);
  }
  void put_blocks(std::span<const std::uint16_t> symbols) {
    runs_.push_back({symbols, add_codes(put_table(counts_of(symbols)))});
  }

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
    runs_.push_back({tokens, add_codes(gap_frequencies()[code.table])});
    const std::span<const std::uint16_t> steps(gap.tokens, gap.count);
    const std::vector<std::uint64_t> counts = counts_of(steps);
    runs_.push_back({steps, add_codes(put_table(counts))});
    bound_ += bits_of(std::span<const std::uint64_t>(counts)) +
              bits_of<std::uint64_t>(std::array<std::uint64_t, 2>{gap.count, gap.seen - gap.count});
    return code;
  }
  // Tables of the dense ranges.
  void put_dense(std::uint32_t ranges, const DenseSymbols& dense) {
    dense_ = dense;
    dense_codes_.resize(static_cast<std::size_t>(ranges) << kTokenBits);
    limits_.fill(1u << kTokenBits);
    const DenseCounts counts = count_dense(ranges, dense);
    double bits = 0, counted = 0;
    for (std::uint32_t r = 0; r < ranges; ++r) {
      const std::size_t first = static_cast<std::size_t>(r) << kTokenBits;
      auto own = std::span(counts.of).subspan(first, kTokensMax);
      while (own.size() > 1 && own.back() == 0) own = own.first(own.size() - 1);
      const bool given = counts.is_sample || own.back() > 0;
      bits_.put(given, 1);
      if (!given) continue;
      const DenseTable table = fit_dense(own, counts.is_sample);
      bits_.put(table.escape, 1);
      const Frequencies frequencies = put_table(table.weights);
      RansCode* const codes = dense_codes_.data() + first;
      rans_codes(frequencies, codes);
      if (table.escape) {
        limits_[r] = static_cast<std::uint16_t>(frequencies.size() - 1);
        std::fill(codes + limits_[r], codes + kTokensMax, codes[limits_[r]]);
      }
      bits += bits_of(own);
      for (const std::uint32_t n : own) counted += n;
    }
    dense_bits_ = bits * static_cast<double>(dense.symbols.size()) / std::max(counted, 1.0);
    bound_ += dense_bits_;
  }

  // Behind all tables: what symbols leave open.
  void put_low_bits(const GapSink& gap, const GapCode& code) {
    for (std::uint32_t i = 0; i < gap.count; ++i) bits_.put(gap.gaps[i], code.shift);
  }
  void put_extras(std::span<const std::uint16_t> tokens, const std::uint64_t* magnitudes) {
    for (const std::uint16_t token : tokens)
      if (token >= 16) bound_ += put_extra(bits_, token, *magnitudes++);
  }
  void put_dense_extras(const std::uint64_t* magnitudes) {
    std::array<std::uint16_t, kRangesMax> from = limits_;  // symbols 17 and up leave bits open in any case
    for (std::uint16_t& limit : from) limit = std::min<std::uint16_t>(limit, 17);
    constexpr std::size_t kPart = 4096;
    std::uint32_t open[kPart / 32];
    BitWriter bits = std::move(bits_);  // in registers
    std::uint64_t open_bits = 0;
    for (std::size_t first = 0; first < dense_.symbols.size(); first += kPart) {
      const std::size_t count = std::min(kPart, dense_.symbols.size() - first);
      kernels().find_open(dense_.symbols.data() + first, count, from.data(), open);
      for (std::size_t w = 0; w * 32 < count; ++w)
        for (std::uint32_t mask = open[w]; mask != 0; mask &= mask - 1) {
          const std::uint16_t entry = dense_.symbols[first + w * 32 + static_cast<std::size_t>(std::countr_zero(mask))];
          const unsigned token = (entry & ((1u << kTokenBits) - 1)) - 1;
          if (token + 1 >= limits_[entry >> kTokenBits]) bits.put(token, kTokenBits);
          if (token >= 16) open_bits += put_extra(bits, token, *magnitudes++);
        }
    }
    bits_ = std::move(bits);
    bound_ += static_cast<double>(open_bits);
  }

  // Appends everything; gives its entropy in bits.
  std::uint64_t finish(RansWriter& writer, ByteVector& out) && {
    // The 64 states take 2 % of a stream of this many bits.
    constexpr double kWideFrom = 50 * 32 * kWideStates;
    const bool is_wide = dense_bits_ >= kWideFrom;
    if (!is_wide && !dense_.symbols.empty()) runs_.push_back({dense_.symbols, dense_codes_.data()});
    const ByteVector bytes = std::move(bits_).finish();
    put_varint(out, bytes.size());
    put_bytes(out, bytes);
    ByteVector narrow;
    writer.write(runs_, narrow);
    put_varint(out, narrow.size());
    put_bytes(out, narrow);
    if (is_wide) writer.write_wide(dense_.symbols.data(), dense_.runs, dense_codes_.data(), out);
    return static_cast<std::uint64_t>(bound_);
  }

 private:
  static std::vector<std::uint64_t> counts_of(std::span<const std::uint16_t> symbols) {
    std::array<std::uint64_t, kTokensMax> counts{};
    std::size_t end = 0;
    for (const std::uint16_t s : symbols) {
      ++counts[s];
      end = std::max<std::size_t>(end, s + 1u);
    }
    return {counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(end)};
  }
  // Fits a table to counts and writes it, unless all are zero.
  Frequencies put_table(std::span<const std::uint64_t> counts) {
    const unsigned precision = precision_for(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    Frequencies table = normalise(counts);
    coarsen(table, precision);
    if (!table.empty()) write_frequencies(table, precision, bits_);
    return table;
  }
  const RansCode* add_codes(const Frequencies& table) {
    const std::size_t first = codes_.size();
    ECHO_CHECK(first + table.size() <= codes_.capacity());
    codes_.resize(first + table.size());
    rans_codes(table, codes_.data() + first);
    return codes_.data() + first;
  }
  // Gives how many bits that were.
  static unsigned put_extra(BitWriter& bits, unsigned token, std::uint64_t magnitude) {
    const unsigned open = extra_bits(token);
    if (open > 32) bits.put(magnitude >> 32, open - 32);
    bits.put(magnitude, std::min(open, 32u));
    return open;
  }
  template <class N>
  static double bits_of(std::span<const N> counts) {
    double whole = 0, bits = 0;
    for (const N n : counts) whole += static_cast<double>(n);
    for (const N n : counts) bits += entropy_bits(static_cast<double>(n), whole);
    return bits;
  }
  BitWriter bits_;
  std::vector<RansCode> codes_;  // of all runs; never moves, because runs point into it
  std::vector<RansRun> runs_;
  DenseSymbols dense_;
  std::vector<RansCode> dense_codes_;
  std::array<std::uint16_t, kRangesMax> limits_{};  // first symbol that is left to the escape
  double dense_bits_ = 0;
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
  if (block.dense > 0) assembly.put_dense(block.dense, {{sink.dense, sink.dense_count}, dense_runs});
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& gap = sink.gap[r];
    assembly.put_low_bits(gap, codes[r]);
    assembly.put_extras({gap.tokens, gap.count}, gap.extras);
  }
  if (block.dense > 0) assembly.put_dense_extras(sink.dense_extras);
  return std::move(assembly).finish(rans, out);
}

SparseEncoder::SparseEncoder() : state_(std::make_unique<State>()) {}
SparseEncoder::~SparseEncoder() = default;

void SparseEncoder::share_model(std::span<const SegmentSides> segments, DType dtype) {
  state_->shared.reset();
  if (!segments.empty()) state_->shared = choose_shared_model(segments, dtype);
}

SparseCount SparseEncoder::encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves,
                                  Digest* cur_leaves, EntropyCounter* entropy, ByteVector& out) {
  const std::size_t size = dtype_bytes(place.dtype);
  const unsigned width = width_index(size);
  const Kernels& k = kernels();
  State& s = *state_;
  BlockGrid grid;
  SparseModel model;
  if (s.shared) {
    model = s.shared->model;
    grid = choose_grid(place, s.shared->rows_differ);
  } else {
    model = choose_model(prev, cur, place, grid);
  }
  s.sink = {};
  if (const std::size_t room = cur.size() / size + kSpareElements; model.block.dense > 0 && room > s.dense.size()) {
    s.dense.clear();  // or they would be copied
    s.dense.resize(room);
  }
  s.sink.dense = s.dense.data();
  s.block_symbols.clear();
  s.dense_runs.clear();
  unsigned symbol = kSymbolUnshifted;
  std::uint64_t total = 0;
  for (std::size_t leaf = 0; leaf < cur.size(); leaf += kLeafBytes) {
    const std::size_t leaf_end = std::min(leaf + kLeafBytes, cur.size());
    if (prev_leaves) *prev_leaves++ = digest_bytes(prev.subspan(leaf, leaf_end - leaf));
    if (cur_leaves) *cur_leaves++ = digest_bytes(cur.subspan(leaf, leaf_end - leaf));
    for_each_block(grid, leaf / size, leaf_end / size, [&](std::uint64_t first, std::uint32_t count) {
      const std::byte* old = prev.data() + first * size;
      const std::byte* now = cur.data() + first * size;
      // Later memory of both sides is asked for bit by bit between the steps: all at once would wait for it. What is
      // hashed is needed a leaf ahead.
      const std::byte* ahead = old + (prev_leaves ? kLeafBytes : kPrefetchBytes);
      const std::byte* ahead_now = now + kLeafBytes;
      const auto prefetch_third = [&] {
        for (const std::byte* end = ahead + count * size / 3; ahead < end; ahead += 64, ahead_now += 64) {
          __builtin_prefetch(ahead);
          __builtin_prefetch(ahead_now);
        }
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
      const std::uint32_t before = s.sink.dense_count;
      k.collect[width](old, now, count, model_for(model.block, symbol), s.sorted, s.changed_bits, s.sink);
      if (model.block.dense > 0) s.dense_runs.push_back(s.sink.dense_count - before);
      return true;
    });
  }
  return {total, total > 0 ? s.write(model, grid, out) : 0};
}

}  // namespace echoline::delta
