// The parts of FORMAT.md, "Sparse coding", that encoder and decoder share. Internal to this folder.
#pragma once
#include <algorithm>
#include <array>

#include "delta/block.hpp"
#include "delta/exponent.hpp"
#include "delta/rans.hpp"

namespace echoline::delta {

// A class holds the elements whose old values have one exponent: class c has the exponent base + c. A range is a set of
// adjacent classes that are coded with one table. In a dense range each element is coded by a symbol of its own; in
// the others only the changes are coded, and the gaps between them.
//
// Every block (run of elements) has a symbol: kSymbolUntouched if nothing changes in it, otherwise a number s. In this
// block, s - kSymbolUnshifted is added to the base, because its values may be larger or smaller than those of others.
inline constexpr unsigned kSymbolUntouched = 0;
inline constexpr unsigned kSymbolUnshifted = 8;
inline constexpr unsigned kBlockSymbols = 16;
// A gap is the number of unchanged elements of a range between two changes.
inline constexpr unsigned kGapTables = 24;  // fixed tables, for gaps of different mean length
inline constexpr unsigned kGapEscape = 31;  // followed by another token, whose value is added to 31
inline constexpr unsigned kGapShiftMax = 31;
// Widths in bits of the fields of a segment's model, in the order in which they are stored.
inline constexpr unsigned kBlockLengthBits = 13;  // of BlockGrid::length and of BlockGrid::first, both minus one
inline constexpr unsigned kBaseBits = 11;         // of the base: the exponent of class 0
inline constexpr unsigned kRangeCountBits = 4;    // of the count minus one
inline constexpr unsigned kDenseRangeCountBits = 5;
inline constexpr unsigned kRangeEndBits = 5;
inline constexpr unsigned kGapShiftBits = 5, kGapTableBits = 5;  // of GapCode
// Bits of a field: log2 of the number of rANS states that code the elements of dense ranges.
inline constexpr unsigned kStateCountLog2Bits = 4;
inline constexpr unsigned kLowBitsBits = 6;  // of the number of low bits of a dense range
// Argument of fill_decode_table(): the table's last symbol is an ordinary one.
inline constexpr bool kWithoutEscape = false;

// How the gaps of a range are split into tokens and low bits: a token is the gap shifted right by `shift`.
struct GapCode {
  unsigned shift = 0;  // number of low bits
  unsigned table = 0;  // of the tokens, in gap_frequencies()
};
// Tables of gap tokens: geometric distributions whose means m are 2^((i + 1/2) / 8).
const std::array<Frequencies, kGapTables>& gap_frequencies();
// The table for decoding gap_frequencies()[table]; it has kRansSlots entries.
const RansEntry* gap_decode_table(unsigned table);

// Blocks end at multiples of the block length, counted over the tensor, and at the ends of leaves (digest.hpp).
struct BlockGrid {
  std::uint32_t length = 0;  // elements
  std::uint32_t first = 0;   // elements of the segment's first block
};
// Calls f(first element, count) for each block of the leaf with elements [begin, end) of the segment, until f returns
// false.
template <class F>
bool for_each_block(const BlockGrid& grid, std::uint64_t begin, std::uint64_t end, F&& f) {
  while (begin < end) {
    std::uint64_t grid_end = grid.first;  // of the grid's block that contains `begin`
    if (begin >= grid.first) {
      const std::uint64_t blocks_between = (begin - grid.first) / grid.length;
      grid_end += (blocks_between + 1) * grid.length;
    }
    const std::uint64_t block_end = std::min(grid_end, end);
    if (!f(begin, static_cast<std::uint32_t>(block_end - begin))) return false;
    begin = block_end;
  }
  return true;
}

// The model for a block with this symbol, which must not be kSymbolUntouched.
BlockModel model_for(const BlockModel& model, unsigned symbol);

}  // namespace echoline::delta
