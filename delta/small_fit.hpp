// How a dense range is coded: its low bits and frequencies, fitted to a sample. The encoder's choice alone; FORMAT.md
// leaves it open. Internal to this folder.
#pragma once
#include <span>

#include "delta/rans.hpp"

namespace echoline::delta {

struct SmallFit {
  unsigned low_bits = 0;
  SmallFrequencies table{};
  double bits_per_element = 0;  // about, low bits and exceptions included
};

// counts[0] elements of the sample stay, counts[t + 1] take a step of token t; there are kTokensMax counts.
SmallFit fit_small(std::span<const std::uint32_t> counts, unsigned low_bits_max);

// Of elements of a type.
unsigned low_bits_max(std::size_t element_bytes);

}  // namespace echoline::delta
