// The parts of FORMAT.md, "Sparse coding", that encoder and decoder share. Internal to this folder.
#pragma once
#include <algorithm>
#include <array>

#include "delta/block.hpp"
#include "delta/exponent.hpp"
#include "delta/rans.hpp"

namespace echoline::delta {

inline constexpr unsigned kSymbolUntouched = 0;
inline constexpr unsigned kSymbolUnshifted = 8;  // block symbol s shifts the classes by s - 8 exponents
inline constexpr unsigned kBlockSymbols = 16;
inline constexpr unsigned kGapTables = 24;
inline constexpr unsigned kGapEscape = 31;  // followed by another token, whose value is added to 31
inline constexpr unsigned kGapShiftMax = 31;

// Splits the gaps of a range into tokens and low bits.
struct GapCode {
  unsigned shift = 0;
  unsigned table = 0;
};
// Tables of gap tokens: geometric distributions whose means m are 2^((i + 1/2) / 8).
const std::array<Frequencies, kGapTables>& gap_frequencies();
const RansEntry* gap_entries(unsigned table);

// Blocks end at multiples of the block length, counted over the tensor, and at the ends of leaves. Calls f(first
// element, count) for each block of the leaf that starts at element `from` of the segment.
struct BlockGrid {
  std::uint32_t length = 0;
  std::uint32_t first = 0;  // elements of the segment's first block
};
template <class F>
bool for_each_block(const BlockGrid& grid, std::uint64_t from, std::uint64_t to, F&& f) {
  while (from < to) {
    const std::uint64_t end =
        from < grid.first ? grid.first : grid.first + ((from - grid.first) / grid.length + 1) * grid.length;
    const std::uint64_t stop = std::min(end, to);
    if (!f(from, static_cast<std::uint32_t>(stop - from))) return false;
    from = stop;
  }
  return true;
}

// The model for a block with this symbol, which must not be kSymbolUntouched.
BlockModel model_for(const BlockModel& model, unsigned symbol);

}  // namespace echoline::delta
