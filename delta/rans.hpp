// Frequency tables and the writer of the entropy coder: rANS, range asymmetric numeral systems (J. Duda, "Asymmetric
// numeral systems", 2013), with interleaved states over static tables. Internal to this folder; FORMAT.md, "Symbols".
// token.hpp reads what this file writes.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "delta/bits.hpp"
#include "delta/block.hpp"
#include "delta/raw_memory.hpp"

namespace echoline::delta {

// Frequencies of symbols 0, 1, ...; they sum to kRansSlots, or the table is empty.
using Frequencies = std::vector<std::uint16_t>;

// Scales weights to frequencies. They sum to less than 2^52, so that products with 2^11 fit in 64 bits. A symbol with
// weight gets at least 1. If all weights are zero the table is empty.
Frequencies normalise(std::span<const std::uint64_t> weights);

// Makes a table shorter to write. Frequencies keep their highest bit and `precision` bits below it; the largest one
// gets the remainder.
void coarsen(Frequencies& table, unsigned precision);
// The precision for a table that codes this many symbols. More symbols justify more.
unsigned precision_for(std::uint64_t symbol_count);

// `table` must have been coarsened to this precision.
void write_frequencies(const Frequencies& table, unsigned precision, BitWriter& out);
// Returns an empty table if it is malformed.
Frequencies read_frequencies(BitReader& reader, std::size_t symbols_max);

// The table for decoding: writes kRansSlots entries. With `last_is_escape`, the last symbol of the table is kEscape.
void fill_decode_table(const Frequencies& table, bool last_is_escape, RansEntry* entries);
// The table for encoding: writes an entry for each symbol.
void fill_encode_table(const Frequencies& table, RansCode* codes);

// Frequencies of small symbols, which are one byte per element (block.hpp). They sum to kSmallSlots, and that of
// kSmallUnchanged is at least 1.
using SmallFrequencies = std::array<std::uint16_t, kSmallSymbols>;
// Scales weights; that of kSmallUnchanged and the sum must be positive. A symbol with weight gets at least 1.
SmallFrequencies normalise_small(const std::array<double, kSmallSymbols>& weights);
void write_small_frequencies(const SmallFrequencies& table, BitWriter& out);
// Returns false if the table is malformed.
bool read_small_frequencies(BitReader& reader, SmallFrequencies& table);
// Set one range's part of the tables for encoding and decoding. A range is a group of elements whose old values have
// similar exponents; it has its own frequencies.
void fill_small_encode_table(unsigned range, const SmallFrequencies& table, SmallCodes& codes);
void fill_small_decode_table(unsigned range, const SmallFrequencies& table, SmallTables& tables);

// A run of symbols: its first symbol uses the first state, the others use the states in turn.
struct RansRun {
  std::span<const std::uint16_t> symbols;
  const RansCode* encode_table = nullptr;  // by symbol
};

// Keeps its working memory between calls.
class RansWriter {
 public:
  // Appends the kRansStates final states (block.hpp), then the 16-bit words that they output before.
  void write(std::span<const RansRun> runs, ByteVector& out);
  // The same for small symbols: appends `state_count` final states, then the bytes that they output before. `symbols`
  // are the runs, one after another; run r has run_lengths[r] symbols.
  void write_small(const std::uint8_t* symbols, std::span<const std::uint32_t> run_lengths, std::uint32_t range_count,
                   const SmallCodes& codes, std::uint32_t state_count, ByteVector& out);

 private:
  // Returns the end of a buffer of this size, because symbols are written from last to first.
  std::byte* buffer_end(std::size_t bytes);
  RawVector<std::byte> buffer_;
};

// These begin to read a stream. False if `bytes` are too few for the states, or a state is out of range.
bool rans_open(ByteSpan bytes, RansReader& reader);
bool rans_open(ByteSpan bytes, ManyStateRansReader& reader);
bool rans_open(ByteSpan bytes, std::uint32_t state_count, SmallReader& reader);
// Whether every word was read and the states are the writer's initial ones, so that all symbols are correct.
bool is_rans_at_end(const RansReader& reader);
bool is_rans_at_end(const SmallReader& reader);
bool is_rans_at_end(const ManyStateRansReader& reader);

}  // namespace echoline::delta
