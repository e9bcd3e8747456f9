// SparseEncoder of sparse.hpp: codes the changes of a segment (a part of a tensor). segment.cpp calls it for each
// segment that changes. Elements are coded by ranges of their old exponents: dense ranges with a small symbol per
// element, the others with the gaps between changes and a token for each step. A step is the signed distance from the
// old value to the new one, counted in representable values; a token is its coded upper part (token.hpp). Blocks are
// runs of consecutive elements, leaves the 64 KiB parts that have digests of their own (digest.hpp).
#include <algorithm>
#include <array>
#include <numeric>

#include "delta/raw_memory.hpp"
#include "delta/small_fit.hpp"
#include "delta/sparse_model.hpp"
#include "delta/token.hpp"

namespace echoline::delta {

struct SparseEncoder::State {
  // The changes of a range that is coded by gaps. Kept between calls for their memory.
  struct Range {
    std::vector<std::uint32_t> gaps;
    std::vector<std::uint16_t> tokens, gap_tokens;
    std::vector<std::uint64_t> extras;  // magnitudes of steps whose tokens are not exact
  };
  // The last is for exceptions: changes of dense elements that have no symbol, and are coded by gaps too.
  std::array<Range, kRangesMax + 1> ranges;
  std::vector<std::uint16_t> block_symbols;  // by block: untouched, or by how many exponents it is shifted
  RawVector<std::uint8_t> dense_symbols;
  std::vector<std::uint32_t> dense_run_lengths;  // number of symbols of each touched block
  RawVector<std::byte> dense_old, dense_now;     // elements of dense ranges, of a block or of the segment
  RawVector<std::byte> low_bit_bytes;
  std::array<SmallFit, kRangesMax> fits;   // by dense range: its table and low bits
  std::vector<std::uint32_t> step_counts;  // of sampled elements, as Kernels::count_steps counts them
  BlockSink sink;                          // output of the kernels; points into the vectors above
  SortedBlock sorted;
  RansWriter rans;
  SmallCodes small_codes;
  std::uint32_t changed_bits[kBlockWordsMax];
  RawVector<std::byte> old_leaf, now_leaf;  // for content in several pieces

  // Makes room in `vector` for `further` elements after the first `used`. Returns its data. Grows at least to double
  // the size, and by 4096 elements, so that it grows rarely.
  template <class Vector>
  static auto* with_room(Vector& vector, std::size_t used, std::size_t further) {
    if (vector.size() < used + further) vector.resize(std::max(2 * vector.size(), used + further + 4096));
    return vector.data();
  }
  // Makes room for the changes of this many more elements of a range.
  void make_gap_room(std::size_t range, std::uint32_t elements) {
    elements += kSpareElements;  // the kernels store whole vectors
    GapSink& gap = sink.gap[range];
    gap.gaps = with_room(ranges[range].gaps, gap.count, elements);
    gap.tokens = with_room(ranges[range].tokens, gap.count, elements);
    gap.extras = with_room(ranges[range].extras, gap.extra_count, elements);
  }
  // Makes room for the symbols of this many more elements.
  void make_dense_room(std::uint32_t elements) {
    make_gap_room(kRangesMax, elements);
    sink.dense_symbols = with_room(dense_symbols, sink.dense_symbol_count, elements + kSpareElements);
    // + 16: more than the pending bits, and the eight bytes that put_bits() always stores, need.
    sink.low.bytes = with_room(low_bit_bytes, sink.low.whole_bytes, elements * kLowBitsMax / 8 + 16);
  }
  // Appends the elements of a sorted block that are in dense ranges to `dense_old` and `dense_now`, after `used` ones.
  void pack_block(const std::byte* old, const std::byte* now, std::uint32_t count, std::size_t element_bytes,
                  std::size_t used) {
    const std::size_t used_bytes = used * element_bytes, block_bytes = (count + kSpareElements) * element_bytes;
    std::byte* const old_end = with_room(dense_old, used_bytes, block_bytes) + used_bytes;
    std::byte* const now_end = with_room(dense_now, used_bytes, block_bytes) + used_bytes;
    kernels().pack[width_index(element_bytes)](old, now, count, sorted, old_end, now_end);
  }
  unsigned sort_block(const SparseModel& model, const std::byte* prev, std::uint32_t count, std::size_t element_bytes,
                      std::uint32_t changed, unsigned previous);
  // Fits the coding of dense ranges to parts of blocks, spread evenly over the segment.
  void sample_dense(SparseModel& model, const BlockGrid& grid, const Content& prev, const Content& cur,
                    std::size_t element_bytes);
  // Codes all elements in `dense_old` and `dense_now` after the pass, with tables fitted to them.
  void code_packed(SparseModel& model, std::size_t element_bytes);
  // Fits each dense range's table and low bits to `step_counts`.
  void fit_dense(SparseModel& model, std::size_t element_bytes);
  std::uint64_t write(const SparseModel& model, const BlockGrid& grid, ByteVector& out);
};

// Chooses the block's symbol and sorts its elements by it, unless it is kSymbolUntouched. `previous`: the symbol of the
// touched block before. `changed`: the number of changes in this block.
unsigned SparseEncoder::State::sort_block(const SparseModel& model, const std::byte* prev, std::uint32_t count,
                                          std::size_t element_bytes, std::uint32_t changed, unsigned previous) {
  const auto sort = [&](unsigned symbol) {
    kernels().sort[width_index(element_bytes)](prev, count, model_for(model.block, symbol), sorted);
  };
  sort(previous);
  double expected_changes = 0;  // by the model
  // Entry 0: all dense ranges; the others: one range coded by gaps each.
  for (std::uint32_t i = 0; i <= model.block.range_count - model.block.dense_range_count; ++i)
    expected_changes += sorted.count[i] * model.density[i];
  // A block without changes can be marked as untouched, or coded like others, with elements that all stay. The mark is
  // cheaper if the model expects several changes, because each unchanged element then costs bits, or hardly ever one,
  // because the mark is then frequent.
  constexpr double kSeveralChanges = 3, kHardlyAChange = 0.05;
  if (changed == 0 && (expected_changes > kSeveralChanges || expected_changes < kHardlyAChange))
    return kSymbolUntouched;
  // Keeps the previous symbol if the number of changes is within three standard deviations (the square root, as for
  // independent changes) of the expected one. A fixed margin of 4 and a relative one are added, because each choice of
  // another symbol costs time. If rows differ, other symbols are likely, so the relative margin is left out.
  const double relative_tolerance = model.rows_differ ? 0 : 1.0 / 8;
  const double tolerance = 4 + 3 * std::sqrt(expected_changes) + relative_tolerance * expected_changes;
  if (model.block.exponent_mask == 0 || std::abs(changed - expected_changes) <= tolerance) return previous;
  const unsigned best = choose_symbol(model, prev, count, element_bytes, changed_bits, previous);
  if (best != previous) sort(best);
  return best;
}

void SparseEncoder::State::sample_dense(SparseModel& model, const BlockGrid& grid, const Content& prev,
                                        const Content& cur, std::size_t element_bytes) {
  const std::uint64_t part_elements = model.rows_differ ? 512 : 1024;
  const std::uint64_t elements = cur.size() / element_bytes, leaf_elements = kLeafBytes / element_bytes;
  // A small segment (less than 64 parts) is read whole, as one part. A larger one has 16 to 32 parts; if its rows
  // differ, four times as many of half the length, which meet more rows.
  const bool reads_all = elements < 64 * part_elements;
  const std::uint64_t parts =
      reads_all ? 1 : std::clamp<std::uint64_t>(elements / (32 * 1024), 16, 32) * (model.rows_differ ? 4 : 1);
  const unsigned width = width_index(element_bytes);
  step_counts.assign(static_cast<std::size_t>(model.block.dense_range_count) << kTokenBits, 0);
  unsigned symbol = kSymbolUnshifted;
  const auto add = [&](std::uint64_t first, std::uint32_t count) {
    const std::byte* old = prev.part(first * element_bytes, count * element_bytes, old_leaf).data();
    const std::byte* now = cur.part(first * element_bytes, count * element_bytes, now_leaf).data();
    const std::uint32_t changed = kernels().diff[width](old, now, count, changed_bits);
    const unsigned chosen = sort_block(model, old, count, element_bytes, changed, symbol);
    if (chosen == kSymbolUntouched) return;
    symbol = chosen;
    if (model.block.dense_range_count < model.block.range_count) {
      pack_block(old, now, count, element_bytes, /*used=*/0);
      old = dense_old.data();
      now = dense_now.data();
    }
    kernels().count_steps[width](old, now, sorted.count[0], model_for(model.block, symbol), step_counts.data());
  };
  for (std::uint64_t i = 0; i < parts; ++i) {
    const std::uint64_t part_begin = i * (elements / parts) / 32 * 32;  // a multiple of a word of change bits
    const std::uint64_t part_end = reads_all ? elements : part_begin + part_elements;
    // Visits the blocks of the leaves that the part touches, because blocks end at leaves. Adds the blocks' elements
    // within the part.
    for (std::uint64_t leaf = part_begin / leaf_elements * leaf_elements; leaf < std::min(part_end, elements);
         leaf += leaf_elements)
      for_each_block(grid, leaf, std::min(leaf + leaf_elements, elements),
                     [&](std::uint64_t from, std::uint32_t count) {
                       const std::uint64_t begin = std::max(part_begin, from), end = std::min(part_end, from + count);
                       if (begin < end) add(begin, static_cast<std::uint32_t>(end - begin));
                       return from + count < part_end;
                     });
  }
  fit_dense(model, element_bytes);
}

void SparseEncoder::State::code_packed(SparseModel& model, std::size_t element_bytes) {
  constexpr std::uint64_t kSampleElements = 1u << 15;  // enough to fit the tables
  const unsigned width = width_index(element_bytes);
  const std::uint64_t elements = std::accumulate(dense_run_lengths.begin(), dense_run_lengths.end(), std::uint64_t{0});
  const std::size_t sampled_one_in = std::max<std::size_t>(elements / kSampleElements, 1);
  // Calls f(index of the run, symbol of its block, dense elements before it, its elements).
  const auto for_each_run = [&](auto&& f) {
    std::size_t run = 0, elements_before = 0;
    for (const std::uint16_t symbol : block_symbols) {
      if (symbol == kSymbolUntouched) continue;
      f(run, symbol, elements_before, dense_run_lengths[run]);
      elements_before += dense_run_lengths[run++];
    }
  };
  step_counts.assign(static_cast<std::size_t>(model.block.dense_range_count) << kTokenBits, 0);
  for_each_run([&](std::size_t run, unsigned symbol, std::size_t elements_before, std::uint32_t count) {
    if (run % sampled_one_in != 0) return;
    const std::size_t offset = elements_before * element_bytes;
    kernels().count_steps[width](dense_old.data() + offset, dense_now.data() + offset, count,
                                 model_for(model.block, symbol), step_counts.data());
  });
  fit_dense(model, element_bytes);
  for_each_run([&](std::size_t, unsigned symbol, std::size_t elements_before, std::uint32_t count) {
    make_dense_room(count);
    const std::size_t offset = elements_before * element_bytes;
    kernels().put_dense[width](dense_old.data() + offset, dense_now.data() + offset, count,
                               model_for(model.block, symbol), sink);
  });
}

void SparseEncoder::State::fit_dense(SparseModel& model, std::size_t element_bytes) {
  model.block.has_low_bits = false;
  for (std::uint32_t range = 0; range < model.block.dense_range_count; ++range) {
    fits[range] = fit_small(std::span(step_counts).subspan(std::size_t{range} << kTokenBits, kTokensMax),
                            low_bits_max(element_bytes));
    model.block.low_bits[range] = static_cast<std::uint8_t>(fits[range].low_bits);
    model.block.has_low_bits |= fits[range].low_bits > 0;
    unsigned coded_symbols = 0;
    for (unsigned i = 0; i < kSmallUnchanged; ++i)
      coded_symbols |= static_cast<unsigned>(fits[range].table[i] > 0) << i;
    model.block.coded_symbols[range] = static_cast<std::uint16_t>(coded_symbols);
  }
}

namespace {

// Assembles a segment's bits and runs of symbols in the order of FORMAT.md.
class Assembly {
 public:
  // Reserves encode tables for one run of block symbols, and two runs (gaps, steps) for each range, of at most
  // kTokensMax symbols each.
  Assembly() { encode_tables_.reserve((1 + 2 * kRangesMax) * kTokensMax); }

  // Writes the block grid, the base exponent and the ends of the ranges. Lengths and counts of at least 1 are stored
  // less one.
  void put_model(const BlockModel& model, const BlockGrid& grid) {
    bits_.put(grid.length - 1, kBlockLengthBits);
    bits_.put(grid.first - 1, kBlockLengthBits);
    bits_.put(model.base, kBaseBits);
    bits_.put(model.range_count - 1, kRangeCountBits);
    bits_.put(model.dense_range_count, kDenseRangeCountBits);
    for (std::uint32_t range = 0; range + 1 < model.range_count; ++range)
      bits_.put(model.range_end[range], kRangeEndBits);
  }
  // Writes the table of the blocks' symbols and adds them as a run.
  void put_blocks(std::span<const std::uint16_t> symbols) {
    runs_.push_back({.symbols = symbols, .encode_table = add_encode_table(put_table(counts_of(symbols)))});
  }

  // Writes the number of changes of a range coded by gaps, its GapCode, and the table of its steps. Returns the
  // GapCode. `gap_tokens`: receives the tokens of the gaps; must live until finish(), because a run refers to it.
  GapCode put_gaps(const GapSink& changes, std::vector<std::uint16_t>& gap_tokens) {
    bits_.put_number(changes.count);
    if (changes.count == 0) return {};
    const GapCode gap_code =
        choose_gap_code(static_cast<double>(changes.count), static_cast<double>(changes.elements_seen));
    bits_.put(gap_code.shift, kGapShiftBits);
    bits_.put(gap_code.table, kGapTableBits);
    gap_tokens.clear();
    for (std::uint32_t i = 0; i < changes.count; ++i) {
      std::uint32_t high = changes.gaps[i] >> gap_code.shift;
      // An escape token stands for kGapEscape; another token follows.
      for (; high >= kGapEscape; high -= kGapEscape) gap_tokens.push_back(kGapEscape);
      gap_tokens.push_back(static_cast<std::uint16_t>(high));
    }
    runs_.push_back({.symbols = gap_tokens, .encode_table = add_encode_table(gap_frequencies()[gap_code.table])});
    const std::span<const std::uint16_t> steps(changes.tokens, changes.count);
    const std::vector<std::uint64_t> counts = counts_of(steps);
    runs_.push_back({.symbols = steps, .encode_table = add_encode_table(put_table(counts))});
    // The entropy of the steps, and of which elements change.
    entropy_bits_ +=
        entropy_of(std::span<const std::uint64_t>(counts)) +
        entropy_of<std::uint64_t>(std::array<std::uint64_t, 2>{changes.count, changes.elements_seen - changes.count});
    return gap_code;
  }
  // Writes the number of states and the tables of the dense ranges.
  void put_dense(std::span<const SmallFit> fits, unsigned state_count_log2) {
    bits_.put(state_count_log2, kStateCountLog2Bits);
    for (const SmallFit& fit : fits) {
      bits_.put(fit.low_bits, kLowBitsBits);
      write_small_frequencies(fit.table, bits_);
    }
  }

  // put_low_bits() and put_extras() write the bits of gaps and steps that their tokens do not give. The format has
  // these bits after all tables.
  void put_low_bits(const GapSink& changes, const GapCode& gap_code) {
    for (std::uint32_t i = 0; i < changes.count; ++i) bits_.put(changes.gaps[i], gap_code.shift);
  }
  // `magnitudes`: those of the tokens that are not exact.
  void put_extras(std::span<const std::uint16_t> tokens, const std::uint64_t* magnitudes) {
    for (const std::uint16_t token : tokens)
      if (token >= kExactTokens) entropy_bits_ += put_extra(bits_, token, *magnitudes++);
  }

  // Appends everything: the bits, then the rANS stream (an entropy code, rans.cpp) of all runs. Returns the entropy of
  // gaps and steps in bits.
  std::uint64_t finish(RansWriter& writer, ByteVector& out) && {
    const ByteVector bytes = std::move(bits_).finish();
    put_varint(out, bytes.size());
    put_bytes(out, bytes);
    ByteVector symbol_stream;
    writer.write(runs_, symbol_stream);
    put_varint(out, symbol_stream.size());
    put_bytes(out, symbol_stream);
    return static_cast<std::uint64_t>(entropy_bits_);
  }

 private:
  static std::vector<std::uint64_t> counts_of(std::span<const std::uint16_t> symbols) {
    std::array<std::uint64_t, kTokensMax> counts{};
    std::size_t end = 0;
    for (const std::uint16_t symbol : symbols) {
      ++counts[symbol];
      end = std::max<std::size_t>(end, symbol + 1u);
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
  const RansCode* add_encode_table(const Frequencies& table) {
    const std::size_t first = encode_tables_.size();
    ECHO_CHECK(first + table.size() <= encode_tables_.capacity());
    encode_tables_.resize(first + table.size());
    fill_encode_table(table, encode_tables_.data() + first);
    return encode_tables_.data() + first;
  }
  // Returns the number of bits written.
  static unsigned put_extra(BitWriter& bits, unsigned token, std::uint64_t magnitude) {
    const unsigned bit_count = extra_bits(token);
    if (bit_count > 32) bits.put(magnitude >> 32, bit_count - 32);  // put() takes at most 57 bits
    bits.put(magnitude, std::min(bit_count, 32u));
    return bit_count;
  }
  template <class N>
  static double entropy_of(std::span<const N> counts) {
    double total = 0, bits = 0;
    for (const N count : counts) total += static_cast<double>(count);
    for (const N count : counts) bits += entropy_bits(static_cast<double>(count), total);
    return bits;
  }
  BitWriter bits_;
  std::vector<RansCode> encode_tables_;  // of all runs; must not be reallocated, because runs point into it
  std::vector<RansRun> runs_;
  double entropy_bits_ = 0;  // of the gaps and steps put so far
};

}  // namespace

// Returns the entropy of the output in bits.
std::uint64_t SparseEncoder::State::write(const SparseModel& model, const BlockGrid& grid, ByteVector& out) {
  const BlockModel& block = model.block;
  Assembly assembly;
  assembly.put_model(block, grid);
  assembly.put_blocks(block_symbols);
  std::array<GapCode, kRangesMax + 1> gap_codes;
  std::vector<std::uint32_t> gap_coded;
  for (std::uint32_t range = block.dense_range_count; range < block.range_count; ++range) gap_coded.push_back(range);
  if (block.dense_range_count > 0) gap_coded.push_back(kRangesMax);
  for (const std::uint32_t range : gap_coded)
    gap_codes[range] = assembly.put_gaps(sink.gap[range], ranges[range].gap_tokens);
  // Chooses the number of rANS states, which vector code advances side by side. More are faster, but each takes 16 bits
  // in the output. So all states together take at most a 120th of the symbols' bits, or a 40th if they are
  // kRunStateAlignment, the fewest with which vector code can run.
  unsigned state_count_log2 = 0;
  if (block.dense_range_count > 0) {
    double symbol_bits = 0, sampled_elements = 0;
    for (std::uint32_t range = 0; range < block.dense_range_count; ++range) {
      double range_elements = 0;
      for (const std::uint32_t count : std::span(step_counts).subspan(std::size_t{range} << kTokenBits, kTokensMax))
        range_elements += count;
      symbol_bits += range_elements * fits[range].bits_per_element;
      sampled_elements += range_elements;
    }
    symbol_bits *= sink.dense_symbol_count / std::max(sampled_elements, 1.0);  // from the sample to the segment
    const auto is_worthwhile = [&](unsigned state_count) {
      const unsigned symbol_bits_per_state_bit = state_count == kRunStateAlignment ? 40 : 120;
      return 16 * state_count * symbol_bits_per_state_bit <= symbol_bits;
    };
    for (unsigned log2 = 1; 1u << log2 <= kSmallStatesMax; ++log2)
      if (is_worthwhile(1u << log2)) state_count_log2 = log2;
    assembly.put_dense(std::span(fits).first(block.dense_range_count), state_count_log2);
  }
  for (const std::uint32_t range : gap_coded) {
    const GapSink& changes = sink.gap[range];
    assembly.put_low_bits(changes, gap_codes[range]);
    assembly.put_extras({changes.tokens, changes.count}, changes.extras);
  }
  const std::uint64_t entropy_bits_total = std::move(assembly).finish(rans, out);
  if (block.dense_range_count == 0) return entropy_bits_total;
  const std::size_t dense_begin = out.size();
  const std::uint64_t low_bits = 8 * sink.low.whole_bytes + sink.low.pending_bits;
  put_bits(sink.low, 0, (8 - sink.low.pending_bits) % 8);  // fills the last byte
  put_varint(out, sink.low.whole_bytes);
  put_bytes(out, ByteSpan(low_bit_bytes).first(sink.low.whole_bytes));
  for (unsigned range = 0; range < block.dense_range_count; ++range)
    fill_small_encode_table(range, fits[range].table, small_codes);
  const std::uint32_t state_count = 1u << state_count_log2;
  rans.write_small(sink.dense_symbols, dense_run_lengths, block.dense_range_count, small_codes, state_count, out);
  // The entropy of dense ranges is taken as the bits written, without the states (two bytes each) and the padding.
  const std::size_t dense_bytes = out.size() - dense_begin - 2 * state_count;
  const std::uint64_t padding_bits = 8 * sink.low.whole_bytes - low_bits;
  return entropy_bits_total + 8 * dense_bytes - padding_bits;
}

SparseEncoder::SparseEncoder() : state_(std::make_unique<State>()) {}
SparseEncoder::~SparseEncoder() = default;

SparseCount SparseEncoder::encode(const Content& prev, const Content& cur, const SegmentPlace& place,
                                  const LeafRead& leaf_read, EntropyCounter* entropy, ByteVector& out) {
  const std::size_t element_bytes = dtype_bytes(place.dtype);
  const unsigned width = width_index(element_bytes);
  const Kernels& kernel_set = kernels();
  State& state = *state_;
  BlockGrid grid;
  SparseModel model = choose_model(prev, cur, place, grid);
  state.sink = {};
  const bool any_dense = model.block.dense_range_count > 0;
  const bool all_dense = model.block.dense_range_count == model.block.range_count;
  // If less than half of the elements are in dense ranges, a sample has too few of them to fit their tables. The pass
  // then packs all elements of dense ranges, and the tables are fitted to these afterwards.
  const bool fit_after_pass = any_dense && !all_dense && model.dense_fraction < 0.5;
  if (any_dense && !fit_after_pass) state.sample_dense(model, grid, prev, cur, element_bytes);
  state.block_symbols.clear();
  state.dense_run_lengths.clear();
  unsigned symbol = kSymbolUnshifted;
  std::uint64_t changed_total = 0;
  std::size_t packed_elements = 0;  // elements of dense ranges so far
  const bool both_contiguous = prev.is_contiguous() && cur.is_contiguous();
  for (std::size_t leaf = 0; leaf < cur.size(); leaf += kLeafBytes) {
    const std::size_t leaf_bytes = std::min(kLeafBytes, cur.size() - leaf), leaf_end = leaf + leaf_bytes;
    const std::byte* const old_content = prev.part(leaf, leaf_bytes, state.old_leaf).data();
    const std::byte* const new_content = cur.part(leaf, leaf_bytes, state.now_leaf).data();
    if (leaf_read) leaf_read(leaf, leaf_bytes);
    for_each_block(grid, leaf / element_bytes, leaf_end / element_bytes, [&](std::uint64_t first, std::uint32_t count) {
      const std::byte* old = old_content + (first * element_bytes - leaf);
      const std::byte* now = new_content + (first * element_bytes - leaf);
      // Prefetches the memory one leaf ahead, of both sides, a third between each two steps, because one large prefetch
      // would stall. It is not prefetched if the content is in several pieces, because addresses then do not continue.
      const std::byte* prev_ahead = old + kLeafBytes;
      const std::byte* cur_ahead = now + kLeafBytes;
      const auto prefetch_third = [&] {
        if (!both_contiguous) return;
        for (const std::byte* end = prev_ahead + count * element_bytes / 3; prev_ahead < end;
             prev_ahead += 64, cur_ahead += 64) {
          __builtin_prefetch(prev_ahead);
          __builtin_prefetch(cur_ahead);
        }
      };
      prefetch_third();
      const std::uint32_t changed = kernel_set.diff[width](old, now, count, state.changed_bits);
      changed_total += changed;
      if (entropy) entropy->add(place.dtype, old, now, count, state.changed_bits);
      prefetch_third();
      const unsigned chosen = state.sort_block(model, old, count, element_bytes, changed, symbol);
      state.block_symbols.push_back(static_cast<std::uint16_t>(chosen));
      prefetch_third();
      if (chosen == kSymbolUntouched) return true;
      symbol = chosen;
      const BlockModel block_model = model_for(model.block, symbol);
      if (!all_dense) {
        for (std::uint32_t range = block_model.dense_range_count; range < block_model.range_count; ++range)
          state.make_gap_room(range, count);
        kernel_set.collect[width](old, now, count, block_model, state.sorted, state.changed_bits, state.sink);
      }
      if (!any_dense) return true;
      const std::uint32_t dense_elements = state.sorted.count[0];
      state.dense_run_lengths.push_back(dense_elements);
      // code_packed() needs the elements of all blocks, put_dense() below only those of this block.
      if (!all_dense) state.pack_block(old, now, count, element_bytes, fit_after_pass ? packed_elements : 0);
      packed_elements += dense_elements;
      if (fit_after_pass) return true;
      state.make_dense_room(dense_elements);
      if (all_dense)
        kernel_set.put_dense[width](old, now, count, block_model, state.sink);
      else
        kernel_set.put_dense[width](state.dense_old.data(), state.dense_now.data(), dense_elements, block_model,
                                    state.sink);
      return true;
    });
  }
  if (changed_total > 0 && fit_after_pass) state.code_packed(model, element_bytes);
  return {.changed = changed_total, .bound_bits = changed_total > 0 ? state.write(model, grid, out) : 0};
}

}  // namespace echoline::delta
