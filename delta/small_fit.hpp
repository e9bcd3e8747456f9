// Fits the coding of a dense range to a sample. In a dense range, a small symbol per element gives the upper part of
// its step, and the low bits follow. This file chooses the number of low bits and the symbols' frequencies. FORMAT.md
// does not prescribe the choice. Internal to this folder.
#pragma once
#include <span>

#include "delta/rans.hpp"

namespace echoline::delta {

struct SmallFit {
  unsigned low_bits = 0;
  SmallFrequencies table{};
  double bits_per_element = 0;  // approximate, including low bits and exceptions
};

// counts[0] elements of the sample are unchanged, counts[t + 1] take a step of token t; there are kTokensMax counts.
SmallFit fit_small(std::span<const std::uint32_t> counts, unsigned low_bits_max);

// The most low bits of a step that the format allows.
unsigned low_bits_max(std::size_t element_bytes);

}  // namespace echoline::delta
