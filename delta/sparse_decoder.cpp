// SparseDecoder of sparse.hpp. segment.cpp calls it for each sparse layer.
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

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "decode patch", "{}", why); }

}  // namespace

struct SparseDecoder::State {
  BlockGrid grid;
  BlockModel model;
  BlockSource source;
  SortedBlock sorted;
  std::vector<std::byte> leaf = std::vector<std::byte>(kLeafBytes);
  RawVector<std::byte> old_leaf;  // for content in several pieces
  std::vector<std::uint8_t> block_symbols;
  std::array<std::vector<std::uint64_t>, kRangesMax + 1> ranks, steps;
  SmallTables small_tables;
  std::array<std::array<RansEntry, kRansSlots>, kRangesMax> dense_tables;
  std::array<RansEntry, kRansSlots> block_table, step_table;
  std::vector<std::uint16_t> tokens;

  Status parse_model(BitReader& bits, DType dtype);
  Status parse_small(BitReader& bits, Reader& reader, std::size_t element_bytes);
  Status parse(ByteSpan coded, bool small, std::uint64_t changed, std::uint64_t elements, DType dtype);
  Status decode_gaps(BitReader& bits, const GapCode& code, std::uint64_t elements, std::uint64_t count,
                     std::uint64_t* ranks, std::uint64_t* steps);
};

Status SparseDecoder::State::parse_model(BitReader& bits, DType dtype) {
  const ExponentField field = exponent_field(dtype);
  grid.length = static_cast<std::uint32_t>(get_bits(bits, 13)) + 1;
  grid.first = static_cast<std::uint32_t>(get_bits(bits, 13)) + 1;
  model = {};
  model.exponent_shift = field.shift;
  model.exponent_mask = field.mask;
  model.is_float = field.mask != 0;
  model.base = static_cast<std::uint32_t>(get_bits(bits, 11));
  model.ranges = static_cast<std::uint32_t>(get_bits(bits, 4)) + 1;
  model.dense = static_cast<std::uint32_t>(get_bits(bits, 5));
  if (model.dense > model.ranges || grid.first > grid.length) return corrupt("a segment's model is malformed");
  unsigned c = 0;
  for (std::uint32_t r = 0; r < model.ranges; ++r) {
    const auto bound = r + 1 < model.ranges ? static_cast<unsigned>(get_bits(bits, 5)) : kClasses;
    if (bound <= c) return corrupt("a segment's ranges are not in order");
    model.bound[r] = static_cast<std::uint8_t>(bound);
    for (; c < bound; ++c) model.range_of[c] = static_cast<std::uint8_t>(r);
  }
  return ok();
}

// Reads gaps and steps of one range, which has at most `elements` elements.
Status SparseDecoder::State::decode_gaps(BitReader& bits, const GapCode& code, std::uint64_t elements,
                                         std::uint64_t count, std::uint64_t* ranks, std::uint64_t* steps) {
  const RansEntry* const gap_table = gap_entries(code.table);
  RansReader rans = source.narrow;
  if (tokens.size() < count) tokens.resize(count);
  rans.turn = 0;
  std::uint64_t done = 0, high = 0, sum = 0;
  while (done < count) {  // again for the gaps that escapes have replaced
    const std::uint64_t wanted = count - done;
    rans_read_run(
        rans, wanted, [&](std::uint64_t) { return gap_table; }, tokens.data());
    for (std::uint64_t i = 0; i < wanted; ++i) {
      high += tokens[i];
      sum += tokens[i];
      if (tokens[i] == kGapEscape) continue;
      ranks[done++] = high;
      high = 0;
    }
    if (sum > elements) return corrupt("a gap leaves its segment");
  }
  rans.turn = 0;
  rans_read_run(
      rans, count, [&](std::uint64_t) { return step_table.data(); }, tokens.data());
  source.narrow = rans;
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    ranks[i] = next + (ranks[i] << code.shift | get_bits(bits, code.shift));
    next = ranks[i] + 1;
    if (next > elements) return corrupt("a gap leaves its segment");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    steps[i] = token_step(tokens[i], tokens[i] < 16 ? 0 : get_extra(bits, tokens[i]));
  }
  return ok();
}

// Reads tables and symbols of dense ranges that are coded with small symbols.
Status SparseDecoder::State::parse_small(BitReader& bits, Reader& reader, std::size_t element_bytes) {
  const auto lanes_log2 = static_cast<unsigned>(get_bits(bits, 4));
  for (std::uint32_t r = 0; r < model.dense; ++r) {
    const auto low = static_cast<unsigned>(get_bits(bits, 6));
    SmallFrequencies table;
    if (low > low_bits_max(element_bytes) || !read_small_frequencies(bits, table))
      return corrupt("a segment's table of steps is malformed");
    model.low_bits[r] = static_cast<std::uint8_t>(low);
    model.has_low_bits |= low > 0;
    set_tables(r, table, small_tables);
  }
  const ByteSpan low = reader.bytes(reader.varint());
  source.low = {low.data(), low.size(), 0};
  source.small_tables = &small_tables;
  if (reader.failed() || 1u << lanes_log2 > kLanesMax || !rans_open(reader.rest(), 1u << lanes_log2, source.small))
    return corrupt("the bytes end within a segment's symbols");
  return ok();
}

// Parses everything that does not need the old content. `small`: dense ranges have small symbols; false: version 3.
Status SparseDecoder::State::parse(ByteSpan coded, bool small, std::uint64_t changed, std::uint64_t elements,
                                   DType dtype) {
  Reader reader(coded);
  const ByteSpan bit_bytes = reader.bytes(reader.varint());
  source = {};
  const ByteSpan narrow = reader.bytes(reader.varint());
  source.is_wide = !small && !reader.rest().empty();
  if (reader.failed() || !rans_open(narrow, source.narrow) ||
      (source.is_wide && !rans_open(reader.rest(), source.wide)))
    return corrupt("the bytes end within a segment");
  BitReader bits{bit_bytes.data(), bit_bytes.size(), 0};
  ECHO_TRY(parse_model(bits, dtype));
  const Frequencies symbols = read_frequencies(bits, kBlockSymbols);
  if (symbols.empty()) return corrupt("a segment's table of blocks is malformed");
  std::array<GapCode, kRangesMax + 1> codes;
  std::array<Frequencies, kRangesMax + 1> step_frequencies;
  std::vector<std::uint32_t> gap_coded;
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) gap_coded.push_back(r);
  if (small && model.dense > 0) gap_coded.push_back(kRangesMax);
  std::uint64_t gaps = 0;
  for (const std::uint32_t r : gap_coded) {
    const std::uint64_t count = get_number(bits);
    if (exhausted(bits) || count > changed - gaps) return corrupt("a segment declares more changes than it has");
    gaps += count;
    source.gap[r].count = count;
    if (count == 0) continue;
    codes[r].shift = static_cast<unsigned>(get_bits(bits, 5));
    codes[r].table = static_cast<unsigned>(get_bits(bits, 5));
    step_frequencies[r] = read_frequencies(bits, kStepTokensMax);
    if (codes[r].table >= kGapTables || step_frequencies[r].empty())
      return corrupt("a segment's table of gaps is malformed");
  }
  if (small) {
    if (model.dense > 0) {
      ECHO_TRY(parse_small(bits, reader, dtype_bytes(dtype)));
    } else if (!reader.rest().empty()) {
      return corrupt("a segment has bytes after its last symbol");
    }
  } else {
    for (std::uint32_t r = 0; r < model.dense; ++r) {
      const bool has_table = get_bits(bits, 1) != 0;
      const bool escape = has_table && get_bits(bits, 1) != 0;
      const Frequencies table = has_table ? read_frequencies(bits, kTokensMax + escape) : Frequencies{kRansSlots};
      if (table.empty()) return corrupt("a segment's table of steps is malformed");
      rans_table(table, escape, dense_tables[r].data());
    }
    source.dense_tables = dense_tables.front().data();
  }
  rans_table(symbols, false, block_table.data());
  block_symbols.clear();
  const std::size_t leaf_elements = kLeafBytes / dtype_bytes(dtype);
  for (std::uint64_t leaf = 0; leaf < elements; leaf += leaf_elements)
    for_each_block(grid, leaf, std::min<std::uint64_t>(leaf + leaf_elements, elements),
                   [&](std::uint64_t, std::uint32_t) {
                     block_symbols.push_back(static_cast<std::uint8_t>(rans_read(source.narrow, block_table.data())));
                     return true;
                   });
  for (const std::uint32_t r : gap_coded) {
    GapSource& gap = source.gap[r];
    if (gap.count == 0) continue;
    if (ranks[r].size() < gap.count) ranks[r].resize(gap.count);
    if (steps[r].size() < gap.count) steps[r].resize(gap.count);
    gap.ranks = ranks[r].data();
    gap.steps = steps[r].data();
    rans_table(step_frequencies[r], false, step_table.data());
    ECHO_TRY(decode_gaps(bits, codes[r], elements, gap.count, ranks[r].data(), steps[r].data()));
  }
  if (exhausted(bits)) return corrupt("the bytes end within a segment's gaps");
  source.narrow.turn = 0;
  source.bits = bits;
  return ok();
}

SparseDecoder::SparseDecoder() : state_(std::make_unique<State>()) {}
SparseDecoder::~SparseDecoder() = default;

Status SparseDecoder::decode(ByteSpan coded, bool small, std::uint64_t changed, const Content& old, DType dtype,
                             const LeafRoom& room, const LeafDone& leaf_done) {
  const std::size_t size = dtype_bytes(dtype);
  const unsigned width = width_index(size);
  const Kernels& k = kernels();
  State& s = *state_;
  ECHO_CHECK(changed <= old.size() / size);
  ECHO_TRY(s.parse(coded, small, changed, old.size() / size, dtype));
  s.source.is_whole = static_cast<bool>(room);
  const std::uint8_t* symbol = s.block_symbols.data();
  for (std::size_t leaf = 0; leaf < old.size(); leaf += kLeafBytes) {
    const std::size_t bytes = std::min(kLeafBytes, old.size() - leaf);
    const std::byte* const before = old.part(leaf, bytes, s.old_leaf).data();
    std::byte* const now = room ? room(leaf, bytes) : s.leaf.data();
    bool touched = false;
    std::size_t made = 0;  // complete bytes of the leaf in `now`
    for_each_block(s.grid, leaf / size, (leaf + bytes) / size, [&](std::uint64_t first, std::uint32_t count) {
      const unsigned chosen = *symbol++;
      const std::size_t at = first * size - leaf;
      if (chosen == kSymbolUntouched) return true;
      std::memcpy(now + made, before + made, at - made);
      k.resolve[width](before + at, count, model_for(s.model, chosen), s.sorted, s.source, now + at);
      made = at + count * size;
      touched = true;
      return true;
    });
    const bool is_made = touched || room;
    if (is_made) std::memcpy(now + made, before + made, bytes - made);
    leaf_done(leaf, {before, bytes}, {is_made ? now : before, bytes});
    if (s.source.changed > changed) break;
  }
  bool fits =
      s.source.changed == changed && !s.source.malformed && rans_at_end(s.source.narrow) && !exhausted(s.source.bits);
  if (s.source.is_wide) fits &= rans_at_end(s.source.wide);
  if (s.source.small_tables)
    fits &= rans_at_end(s.source.small) && (s.source.low.at + 7) / 8 == s.source.low.byte_count;
  for (const GapSource& gap : s.source.gap) fits &= gap.at == gap.count;
  if (!fits) return corrupt("a segment does not fit the state it is applied to");
  return ok();
}

}  // namespace echoline::delta
