// Frequency tables and the writing side of the entropy coder: interleaved rANS states (J. Duda, "Asymmetric numeral
// systems", 2013) over static tables. Internal to this folder; FORMAT.md, "Symbols". Reading is in token.hpp.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "delta/bits.hpp"
#include "delta/block.hpp"
#include "delta/raw_memory.hpp"

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

// Writes kRansSlots entries. With `escape`, the last symbol of the table is kEscape.
void rans_table(const Frequencies& table, bool escape, RansEntry* entries);
// Writes an entry for each symbol of the table.
void rans_codes(const Frequencies& table, RansCode* codes);

// A run of symbols that starts with the first state again; codes[s] is how symbol s is written.
struct RansRun {
  std::span<const std::uint16_t> symbols;
  const RansCode* codes = nullptr;
};

// Keeps its working memory between calls.
class RansWriter {
 public:
  // Appends four states and the words.
  void write(std::span<const RansRun> runs, ByteVector& out);
  // Runs of one stream with kWideStates states: run r is the next lengths[r] of `symbols`.
  void write_wide(const std::uint16_t* symbols, std::span<const std::uint32_t> lengths, const RansCode* codes,
                  ByteVector& out);

 private:
  std::uint16_t* end_of_words(std::size_t symbols);  // room in front of it for the words of so many
  RawVector<std::uint16_t> words_;
};

// False when `bytes` are too few for the states.
bool rans_open(ByteSpan bytes, RansReader& reader);
// Every word was read, and the states are what the writer started from: the symbols are those that were written.
bool rans_at_end(const RansReader& reader);
bool rans_open(ByteSpan bytes, WideRansReader& reader);
bool rans_at_end(const WideRansReader& reader);

}  // namespace echoline::delta
