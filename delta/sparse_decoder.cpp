// SparseDecoder of sparse.hpp: decodes the changes of a segment (a part of a tensor). segment.cpp calls it for each
// sparse layer. Elements are coded by ranges of their old exponents. Dense ranges have a symbol per element. The others
// have the gaps (numbers of unchanged elements) between changes, and for each change a token: the upper part of the
// step from the old value to the new one. Symbols and tokens are coded with rANS, an entropy code whose states are read
// in turn.
#include <algorithm>
#include <array>
#include <cstring>

#include "delta/digest.hpp"
#include "delta/small_fit.hpp"
#include "delta/sparse.hpp"
#include "delta/sparse_format.hpp"
#include "delta/token.hpp"

namespace echoline::delta {
namespace {

Error corrupt(std::string_view defect) { return fail(Code::kCorrupt, "decode patch", "{}", defect); }

}  // namespace

struct SparseDecoder::State {
  BlockGrid grid;
  BlockModel model;
  BlockSource source;
  SortedBlock sorted;
  std::vector<std::byte> new_leaf = std::vector<std::byte>(kLeafBytes);  // used if the caller provides no memory
  RawVector<std::byte> old_leaf;                                         // for content in several pieces
  std::vector<std::uint8_t> block_symbols;  // by block: untouched, or by how many exponents its classes are shifted
  std::array<std::vector<std::uint64_t>, kRangesMax + 1> ranks, steps;  // memory of source.gap, by range
  SmallTables small_tables;
  std::array<std::array<RansEntry, kRansSlots>, kRangesMax> dense_tables;  // format version 3
  std::array<RansEntry, kRansSlots> block_table, step_table;
  std::vector<std::uint16_t> tokens;  // of a range's gaps, then of its steps

  Status parse_model(BitReader& bits, DType dtype);
  Status parse_small(BitReader& bits, ByteReader& reader, std::size_t element_bytes);
  Status parse(ByteSpan coded, bool has_small_symbols, std::uint64_t changed, std::uint64_t elements, DType dtype);
  Status decode_gaps(BitReader& bits, const GapCode& gap_code, std::uint64_t elements, std::uint64_t count,
                     std::uint64_t* ranks, std::uint64_t* steps);
};

// Reads the block grid, and the classes (old exponents) of each range. Lengths and counts of at least 1 are stored less
// one.
Status SparseDecoder::State::parse_model(BitReader& bits, DType dtype) {
  const ExponentField field = exponent_field(dtype);
  grid.length = static_cast<std::uint32_t>(get_bits(bits, kBlockLengthBits)) + 1;
  grid.first = static_cast<std::uint32_t>(get_bits(bits, kBlockLengthBits)) + 1;
  model = {};
  model.exponent_shift = field.shift;
  model.exponent_mask = field.mask;
  model.is_float = field.mask != 0;
  model.base = static_cast<std::uint32_t>(get_bits(bits, kBaseBits));
  model.range_count = static_cast<std::uint32_t>(get_bits(bits, kRangeCountBits)) + 1;
  model.dense_range_count = static_cast<std::uint32_t>(get_bits(bits, kDenseRangeCountBits));
  if (model.dense_range_count > model.range_count || grid.first > grid.length)
    return corrupt("a segment's model is malformed");
  unsigned class_index = 0;
  for (std::uint32_t range = 0; range < model.range_count; ++range) {
    const auto range_end =
        range + 1 < model.range_count ? static_cast<unsigned>(get_bits(bits, kRangeEndBits)) : kClasses;
    if (range_end <= class_index) return corrupt("a segment's ranges are not in order");
    model.range_end[range] = static_cast<std::uint8_t>(range_end);
    for (; class_index < range_end; ++class_index) model.range_of[class_index] = static_cast<std::uint8_t>(range);
  }
  return ok();
}

// Reads the `count` changes of one range, which has at most `elements` elements. Writes the rank of each changed
// element within the range, and its step.
Status SparseDecoder::State::decode_gaps(BitReader& bits, const GapCode& gap_code, std::uint64_t elements,
                                         std::uint64_t count, std::uint64_t* ranks, std::uint64_t* steps) {
  const RansEntry* const gap_table = gap_decode_table(gap_code.table);
  RansReader rans = source.narrow;
  if (tokens.size() < count) tokens.resize(count);
  rans.turn = 0;
  // A gap's token is the gap without its low bits. Reads a token per missing gap, and repeats, because escape tokens
  // are only parts of gaps. Until the next loop, ranks[i] is the part of gap i above its low bits.
  std::uint64_t gaps_read = 0, gap = 0, gap_sum = 0;
  while (gaps_read < count) {
    const std::uint64_t token_count = count - gaps_read;
    rans_read_run(
        rans, token_count, [&](std::uint64_t) { return gap_table; }, tokens.data());
    for (std::uint64_t i = 0; i < token_count; ++i) {
      gap += tokens[i];
      gap_sum += tokens[i];
      if (tokens[i] == kGapEscape) continue;
      ranks[gaps_read++] = gap;
      gap = 0;
    }
    if (gap_sum > elements) return corrupt("a gap leaves its segment");
  }
  rans.turn = 0;
  rans_read_run(
      rans, count, [&](std::uint64_t) { return step_table.data(); }, tokens.data());
  source.narrow = rans;
  std::uint64_t next_rank = 0;  // of the element after the last change
  for (std::uint64_t i = 0; i < count; ++i) {
    ranks[i] = next_rank + (ranks[i] << gap_code.shift | get_bits(bits, gap_code.shift));
    next_rank = ranks[i] + 1;
    if (next_rank > elements) return corrupt("a gap leaves its segment");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const bool is_exact = tokens[i] < kExactTokens;  // without extra bits
    steps[i] = step_of_token(tokens[i], is_exact ? 0 : get_extra(bits, tokens[i]));
  }
  return ok();
}

// Reads tables and symbols of dense ranges that are coded with small symbols.
Status SparseDecoder::State::parse_small(BitReader& bits, ByteReader& reader, std::size_t element_bytes) {
  const std::uint32_t state_count = 1u << get_bits(bits, kStateCountLog2Bits);
  for (std::uint32_t range = 0; range < model.dense_range_count; ++range) {
    const auto low_bits = static_cast<unsigned>(get_bits(bits, kLowBitsBits));
    SmallFrequencies table;
    if (low_bits > low_bits_max(element_bytes) || !read_small_frequencies(bits, table))
      return corrupt("a segment's table of steps is malformed");
    model.low_bits[range] = static_cast<std::uint8_t>(low_bits);
    model.has_low_bits |= low_bits > 0;
    fill_small_decode_table(range, table, small_tables);
  }
  const ByteSpan low_bytes = reader.read_bytes(reader.read_varint());
  source.low = {.bytes = low_bytes.data(), .byte_count = low_bytes.size()};
  source.small_tables = &small_tables;
  if (reader.failed() || state_count > kSmallStatesMax || !rans_open(reader.remaining(), state_count, source.small))
    return corrupt("the bytes end within a segment's symbols");
  return ok();
}

// Parses everything that does not need the old content. `has_small_symbols`: false in version 3 of the format.
Status SparseDecoder::State::parse(ByteSpan coded, bool has_small_symbols, std::uint64_t changed,
                                   std::uint64_t elements, DType dtype) {
  ByteReader reader(coded);
  const ByteSpan bit_bytes = reader.read_bytes(reader.read_varint());
  source = {};
  const ByteSpan narrow = reader.read_bytes(reader.read_varint());
  // Version 3 may have a second stream, with more states, for the symbols of long dense runs.
  source.is_wide = !has_small_symbols && !reader.remaining().empty();
  if (reader.failed() || !rans_open(narrow, source.narrow) ||
      (source.is_wide && !rans_open(reader.remaining(), source.wide)))
    return corrupt("the bytes end within a segment");
  BitReader bits{.bytes = bit_bytes.data(), .byte_count = bit_bytes.size()};
  ECHO_TRY(parse_model(bits, dtype));
  const Frequencies block_frequencies = read_frequencies(bits, kBlockSymbols);
  if (block_frequencies.empty()) return corrupt("a segment's table of blocks is malformed");
  std::array<GapCode, kRangesMax + 1> gap_codes;
  std::array<Frequencies, kRangesMax + 1> step_frequencies;
  std::vector<std::uint32_t> gap_coded;  // ranges; kRangesMax: exceptions among dense elements
  for (std::uint32_t range = model.dense_range_count; range < model.range_count; ++range) gap_coded.push_back(range);
  if (has_small_symbols && model.dense_range_count > 0) gap_coded.push_back(kRangesMax);
  std::uint64_t gap_total = 0;  // changes declared so far, at most `changed`
  for (const std::uint32_t range : gap_coded) {
    const std::uint64_t count = get_number(bits);  // of the range's changes
    if (is_exhausted(bits) || count > changed - gap_total)
      return corrupt("a segment declares more changes than it has");
    gap_total += count;
    source.gap[range].count = count;
    if (count == 0) continue;
    gap_codes[range].shift = static_cast<unsigned>(get_bits(bits, kGapShiftBits));
    gap_codes[range].table = static_cast<unsigned>(get_bits(bits, kGapTableBits));
    step_frequencies[range] = read_frequencies(bits, kStepTokensMax);
    if (gap_codes[range].table >= kGapTables || step_frequencies[range].empty())
      return corrupt("a segment's table of gaps is malformed");
  }
  if (has_small_symbols) {
    if (model.dense_range_count > 0) {
      ECHO_TRY(parse_small(bits, reader, dtype_bytes(dtype)));
    } else if (!reader.remaining().empty()) {
      return corrupt("a segment has bytes after its last symbol");
    }
  } else {
    for (std::uint32_t range = 0; range < model.dense_range_count; ++range) {
      const bool has_table = get_bits(bits, 1) != 0;
      const bool has_escape = has_table && get_bits(bits, 1) != 0;
      const std::size_t symbols_max = has_escape ? kTokensMax + 1 : kTokensMax;
      // Without a table, every symbol is 0, which has all slots.
      const Frequencies table = has_table ? read_frequencies(bits, symbols_max) : Frequencies{kRansSlots};
      if (table.empty()) return corrupt("a segment's table of steps is malformed");
      fill_decode_table(table, has_escape, dense_tables[range].data());
    }
    source.dense_tables = dense_tables.front().data();
  }
  fill_decode_table(block_frequencies, kWithoutEscape, block_table.data());
  block_symbols.clear();
  const std::size_t leaf_elements = kLeafBytes / dtype_bytes(dtype);
  for (std::uint64_t leaf = 0; leaf < elements; leaf += leaf_elements)
    for_each_block(grid, leaf, std::min<std::uint64_t>(leaf + leaf_elements, elements),
                   [&](std::uint64_t, std::uint32_t) {
                     block_symbols.push_back(static_cast<std::uint8_t>(rans_read(source.narrow, block_table.data())));
                     return true;
                   });
  for (const std::uint32_t range : gap_coded) {
    GapSource& gap = source.gap[range];
    if (gap.count == 0) continue;
    if (ranks[range].size() < gap.count) ranks[range].resize(gap.count);
    if (steps[range].size() < gap.count) steps[range].resize(gap.count);
    gap.ranks = ranks[range].data();
    gap.steps = steps[range].data();
    fill_decode_table(step_frequencies[range], kWithoutEscape, step_table.data());
    ECHO_TRY(decode_gaps(bits, gap_codes[range], elements, gap.count, ranks[range].data(), steps[range].data()));
  }
  if (is_exhausted(bits)) return corrupt("the bytes end within a segment's gaps");
  source.narrow.turn = 0;  // every run of symbols begins with state 0
  source.bits = bits;
  return ok();
}

SparseDecoder::SparseDecoder() : state_(std::make_unique<State>()) {}
SparseDecoder::~SparseDecoder() = default;

Status SparseDecoder::decode(ByteSpan coded, bool has_small_symbols, std::uint64_t changed, const Content& old,
                             DType dtype, const LeafRoom& room, const LeafDone& leaf_done) {
  const std::size_t element_bytes = dtype_bytes(dtype);
  const unsigned width = width_index(element_bytes);
  const Kernels& kernel_set = kernels();
  State& state = *state_;
  ECHO_CHECK(changed <= old.size() / element_bytes);
  ECHO_TRY(state.parse(coded, has_small_symbols, changed, old.size() / element_bytes, dtype));
  state.source.has_output_per_block = static_cast<bool>(room);
  const std::uint8_t* symbol = state.block_symbols.data();
  for (std::size_t leaf = 0; leaf < old.size(); leaf += kLeafBytes) {
    const std::size_t leaf_bytes = std::min(kLeafBytes, old.size() - leaf);
    const std::byte* const before = old.part(leaf, leaf_bytes, state.old_leaf).data();
    std::byte* const now = room ? room(leaf, leaf_bytes) : state.new_leaf.data();
    bool is_touched = false;
    std::size_t complete_bytes = 0;  // of the leaf, in `now`
    const std::uint64_t first_element = leaf / element_bytes, element_end = (leaf + leaf_bytes) / element_bytes;
    for_each_block(state.grid, first_element, element_end, [&](std::uint64_t first, std::uint32_t count) {
      const unsigned block_symbol = *symbol++;
      if (block_symbol == kSymbolUntouched) return true;
      const std::size_t offset = first * element_bytes - leaf;
      std::memcpy(now + complete_bytes, before + complete_bytes, offset - complete_bytes);
      kernel_set.resolve[width](before + offset, count, model_for(state.model, block_symbol), state.sorted,
                                state.source, now + offset);
      complete_bytes = offset + count * element_bytes;
      is_touched = true;
      return true;
    });
    // The bytes after the last touched block stay.
    const bool has_new_leaf = is_touched || room;
    if (has_new_leaf) std::memcpy(now + complete_bytes, before + complete_bytes, leaf_bytes - complete_bytes);
    leaf_done(leaf, {before, leaf_bytes}, {has_new_leaf ? now : before, leaf_bytes});
    if (state.source.changed > changed) break;  // malformed, as found below
  }
  // Every symbol, bit and change must have been used. Otherwise the coding is malformed, or belongs to other content.
  bool is_all_used = state.source.changed == changed && !state.source.malformed &&
                     is_rans_at_end(state.source.narrow) && !is_exhausted(state.source.bits);
  if (state.source.is_wide) is_all_used &= is_rans_at_end(state.source.wide);
  if (state.source.small_tables)
    is_all_used &=
        is_rans_at_end(state.source.small) && (state.source.low.bit_index + 7) / 8 == state.source.low.byte_count;
  for (const GapSource& gap : state.source.gap) is_all_used &= gap.next_index == gap.count;
  if (!is_all_used) return corrupt("a segment does not fit the state it is applied to");
  return ok();
}

}  // namespace echoline::delta
