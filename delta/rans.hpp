// Frequency tables and the writing side of the entropy coder: four interleaved rANS states (J. Duda, "Asymmetric
// numeral systems", 2013) over static tables. Internal to this folder; FORMAT.md, "Symbols". Reading is in token.hpp.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "delta/bits.hpp"
#include "delta/block.hpp"

namespace echoline::delta {

// Frequencies of symbols 0, 1, ...; they add up to kRansSlots, or the table is empty.
using Frequencies = std::vector<std::uint16_t>;

// Scales weights, below 2^52 together, to frequencies. A symbol with weight keeps at least 1; all weights zero give an
// empty table.
Frequencies normalise(std::span<const std::uint64_t> weights);

// Makes a table shorter to write: frequencies keep their highest bit and `precision` bits below it, and what they lose
// goes to the largest one. More symbols are worth more precision.
void coarsen(Frequencies& table, unsigned precision);
unsigned precision_for(std::uint64_t symbols);

// `table` was coarsened to this precision.
void write_frequencies(const Frequencies& table, unsigned precision, BitWriter& out);
// Empty when malformed.
Frequencies read_frequencies(BitReader& reader, std::size_t symbols_max);

// Writes kRansSlots entries.
void rans_table(const Frequencies& table, RansEntry* entries);

// A run of symbols that starts with the first state again, and the tables they use: symbol s of table t is
// t << kTokenBits | s.
struct RansRun {
  std::span<const std::uint16_t> symbols;
  std::span<const Frequencies> tables;
};
// Appends four states and the words.
void rans_write(std::span<const RansRun> runs, ByteVector& out);

// False when `bytes` are too few for the states.
bool rans_open(ByteSpan bytes, RansReader& reader);
// Every word was read, and the states are what the writer started from: the symbols are those that were written.
bool rans_at_end(const RansReader& reader);

}  // namespace echoline::delta
