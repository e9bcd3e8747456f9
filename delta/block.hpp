// The kernels for one block, a run of consecutive elements of one tensor: plain functions that exist once per
// instruction set. They find changes, sort elements into classes by their old value, and turn changes into tokens and
// back. All sets give the same results. Internal to this folder; FORMAT.md, "Sparse coding", explains the numbers.
//
// A step is the signed difference of an element's new and old bits as ordered integers. A class holds the elements with
// one old exponent. Adjacent classes form a range. In a dense range every element is coded; in the other ranges only
// the changes and the gaps between them are. A block is a part of a segment, which is a part of a tensor that is coded
// independently.
#pragma once
#include <cstddef>
#include <cstdint>

#include "delta/bits.hpp"

namespace echoline::delta {

inline constexpr std::uint32_t kBlockElementsMax = 8192;
inline constexpr std::uint32_t kBlockWordsMax = kBlockElementsMax / 32;  // words with a bit for each element
inline constexpr std::size_t kPrefetchBytes = 16384;  // distance of prefetched data from the current block
// Room after a buffer's last element, because the kernels store whole vectors.
inline constexpr std::uint32_t kSpareElements = 32;
inline constexpr unsigned kClasses = 32;    // by old exponent; the first and the last also hold all beyond them
inline constexpr unsigned kRangesMax = 16;  // of a segment

// A token stands for a step: its direction (towards zero or away from it), and its magnitude if that is at most
// kExactMagnitudeMax (the exact tokens, which are those below kExactTokens). Other tokens stand for the magnitude's
// length and two highest bits; the further bits are stored separately. FORMAT.md, "Tokens".
inline constexpr unsigned kExactMagnitudeMax = 8, kExactTokens = 2 * kExactMagnitudeMax;
inline constexpr unsigned kTokenBits = 9;                   // suffice for kTokensMax
inline constexpr unsigned kStepTokensMax = 260;             // for 64-bit elements, which have most
inline constexpr unsigned kTokensMax = kStepTokensMax + 1;  // including "unchanged"

// Tokens are coded with rANS: range asymmetric numeral systems, an entropy coder whose state is a number. A table
// divides the slots 0 to 2^11 - 1 among the symbols: a symbol's frequency is its number of slots. The low bits of a
// state are a slot, and so select the next symbol.
inline constexpr unsigned kRansBits = 11;  // the frequencies of a table sum to 2^11
inline constexpr std::uint32_t kRansSlots = 1u << kRansBits;
inline constexpr std::uint32_t kRansFloor = 1u << 15;  // states are at least this between symbols, and below 2^31
inline constexpr unsigned kRansStates = 4;  // symbols use the states in turn, so that a processor overlaps their work

// Small symbols, one per element of a dense range. Symbol s stands for the step ((s - kZeroStep) << low_bits) + l,
// whose low bits l are stored separately. FORMAT.md, "Small symbols".
inline constexpr unsigned kSymbolBits = 4;
inline constexpr unsigned kSmallSymbols = 1u << kSymbolBits;
inline constexpr unsigned kSmallUnchanged = kSmallSymbols - 1;  // the element does not change
inline constexpr unsigned kZeroStep = 7;          // the symbol of step 0, so symbols 0 to 14 stand for -7 to 7
inline constexpr unsigned kSmallSlots = 256;      // the frequencies of a table sum to this
inline constexpr unsigned kSmallFloor = 256;      // states are at least this between symbols, and below 2^16
inline constexpr unsigned kSmallStatesMax = 256;  // independent states
inline constexpr unsigned kLowBitsMax = 48;       // of a step
// A run is the symbols of one block. It begins at a state whose number is a multiple of this, so that vector code reads
// whole vectors of states.
inline constexpr unsigned kRunStateAlignment = 64;

// Version 3 of the format, which can only be read.
inline constexpr unsigned kManyStates = 64;  // interleaved states of the separate stream for long dense runs
inline constexpr unsigned kEscape = 511;     // in a table entry: the token follows in BlockSource::bits

// Maps an element's old bits v to its class, clamp(((v >> exponent_shift) & exponent_mask) - base, 0, 31), and a class
// to its range. Also defines how bits become ordered integers.
struct BlockModel {
  std::uint32_t exponent_shift = 0;
  std::uint32_t exponent_mask = 0;
  std::uint32_t base = 0;  // exponent of class 0
  bool is_float = false;   // sign and magnitude; false: two's complement
  std::uint32_t range_count = 1;
  std::uint32_t dense_range_count = 0;  // dense ranges come first
  // Range r holds the classes from range_end[r - 1] up to below range_end[r]; the last end is 32.
  std::uint8_t range_end[kRangesMax] = {};
  std::uint8_t range_of[kClasses] = {};
  // By dense range: the number of low bits of a step that a small symbol leaves out.
  std::uint8_t low_bits[kRangesMax] = {};
  // By dense range: bit s is set if small symbol s is in the range's table.
  std::uint16_t coded_symbols[kRangesMax] = {};
  bool has_low_bits = false;  // some range has low bits
};

// Output of collect() for a range that is coded by gaps. The caller provides room for one block.
struct GapSink {
  std::uint64_t elements_seen = 0;  // elements of the range before this block
  std::uint64_t next_rank = 0;      // number, within the range, of the element after the last change
  std::uint32_t* gaps = nullptr;    // numbers of unchanged elements of the range between two changes
  std::uint16_t* tokens = nullptr;
  std::uint32_t count = 0;          // of gaps and tokens
  std::uint64_t* extras = nullptr;  // magnitudes of tokens that need further bits
  std::uint32_t extra_count = 0;
};
struct BlockSink {
  // gap[r] is used if range r is coded by gaps. The last is for exceptions: changes of dense elements without a symbol
  // in their range's table. Their gaps count the elements of all dense ranges.
  GapSink gap[kRangesMax + 1];
  std::uint8_t* dense_symbols = nullptr;  // range << kSymbolBits | symbol
  std::uint32_t dense_symbol_count = 0;
  BitSink low;  // bits of dense elements' steps that their small symbols leave out
};

// The elements of a block, sorted: all dense ranges together, and each range coded by gaps.
struct SortedBlock {
  // Entry 0 is the dense ranges, entry g + 1 the g-th range coded by gaps. Bit i % 32 of mask[entry][i / 32] tells
  // whether element i belongs to the entry. A word is the bits of 32 elements. `before` counts the entry's elements in
  // earlier words. Beyond the block's last word it is 0xffff, so that no search ends there.
  alignas(64) std::uint32_t mask[kRangesMax + 1][kBlockWordsMax];
  alignas(64) std::uint16_t before[kRangesMax + 1][kBlockWordsMax];
  std::uint32_t count[kRangesMax + 1];
};

// An entry of a decoding table, for one slot: bits 0-10 the slot's number within its symbol, 11-21 the symbol's
// frequency minus one, 22-31 the symbol.
using RansEntry = std::uint32_t;

// Reads interleaved rANS symbols. Past the end it reads zeros and keeps counting.
struct RansReader {
  std::uint32_t state[kRansStates] = {};  // each refilled with a word when it falls below kRansFloor
  const std::byte* words = nullptr;       // little-endian 16-bit
  std::uint64_t word_count = 0;
  std::uint64_t word_index = 0;  // of the next word
  std::uint32_t turn = 0;        // index of the next symbol's state
};
// Like RansReader with kManyStates states. Every run begins with state 0.
struct ManyStateRansReader {
  alignas(64) std::uint32_t state[kManyStates] = {};
  const std::byte* words = nullptr;
  std::uint64_t word_count = 0;
  std::uint64_t word_index = 0;
};

// Encoding tables of small symbols, by range << kSymbolBits | symbol. rans.cpp builds them.
struct SmallCodes {
  alignas(64) std::uint8_t other_slots[kRangesMax * kSmallSymbols];  // 256 minus the symbol's frequency
  alignas(64) std::uint8_t first_slot[kRangesMax * kSmallSymbols];
  // floor(x / frequency) is (x * reciprocal >> 16) >> shift for all states x that occur. For frequency 1 this gives
  // x - 1, and put_small() adds the difference.
  alignas(64) std::uint8_t reciprocal_low[kRangesMax * kSmallSymbols];
  alignas(64) std::uint8_t reciprocal_high[kRangesMax * kSmallSymbols];
  alignas(64) std::uint8_t shift[kRangesMax * kSmallSymbols];
};
// Decoding tables of small symbols, by the same index.
struct SmallTables {
  alignas(64) std::uint8_t first_slot[kRangesMax * kSmallSymbols];
  alignas(64) std::uint8_t frequency_minus_one[kRangesMax * kSmallSymbols];
  // By range and slot: bits 0-7 the slot's offset within its symbol, 8-15 the frequency minus one, 16-19 the symbol.
  std::uint32_t slot[kRangesMax * kSmallSlots];
};
// Reads interleaved rANS runs of small symbols. Past the end it reads zeros and keeps counting.
struct SmallReader {
  alignas(64) std::uint16_t state[kSmallStatesMax] = {};  // each refilled with a byte when it falls below kSmallFloor
  std::uint32_t state_count = 0;
  std::uint32_t turn = 0;  // index of the state with which the next run begins
  const std::byte* bytes = nullptr;
  std::uint64_t byte_count = 0;
  std::uint64_t byte_index = 0;  // of the next byte
};

// The encoding of a symbol. Bits 0-31: reciprocal of its frequency f; 32-43: 2048 - f; 44-55: its first slot, plus 2047
// if f is 1; 56-59: further bits by which to shift the quotient. rans.cpp builds them.
using RansCode = std::uint64_t;

// The decoded changes of a range coded by gaps. A rank is an element's number among those of the range in the segment.
struct GapSource {
  const std::uint64_t* ranks = nullptr;
  const std::uint64_t* steps = nullptr;  // positive: away from zero; modulo 2^(bits of an element)
  std::uint64_t count = 0;
  std::uint64_t next_index = 0;     // of the next change
  std::uint64_t elements_seen = 0;  // elements of the range before this block
};
struct BlockSource {
  GapSource gap[kRangesMax + 1];              // the last as in BlockSink
  const SmallTables* small_tables = nullptr;  // null in version 3
  SmallReader small;                          // small symbols of the elements of dense ranges
  BitReader low;                              // the bits of their steps that the symbols leave out
  const RansEntry* dense_tables = nullptr;    // version 3: kRansSlots entries for each dense range
  bool is_wide = false;                       // version 3: dense symbols come from `wide`; false: from `narrow`
  RansReader narrow;                          // symbols of blocks; gaps and tokens of ranges coded by gaps
  ManyStateRansReader wide;                   // version 3
  BitReader bits;                     // version 3: extra bits of dense elements' steps, and tokens after escapes
  bool has_output_per_block = false;  // each block is written to its own memory, worth prefetching
  std::uint64_t changed = 0;          // elements changed so far
  bool malformed = false;             // a symbol or change was found that cannot be right
};

// One set of kernels. Arrays are indexed by width_index(): 8, 16, 32 and 64-bit elements. `prev` and `old` are old
// elements, `cur` and `now` new ones.
struct Kernels {
  const char* name;
  // Sets bit i % 32 of changed[i / 32] if element i differs. Returns the number of such elements.
  std::uint32_t (*diff[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, std::uint32_t* changed);
  // Sorts the elements into the entries of `sorted`, by the ranges of their old values.
  void (*sort[4])(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted);
  // Adds the changes of ranges coded by gaps to `sink`; `sorted` is the result of sort() on `prev`.
  void (*collect[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, const BlockModel& model,
                     const SortedBlock& sorted, const std::uint32_t* changed, BlockSink& sink);
  // Packs the elements of dense ranges, as found by sort(). Both outputs have room for kSpareElements more elements. At
  // least one range is not dense, because sort() otherwise finds nothing.
  void (*pack[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, const SortedBlock& sorted,
                  std::byte* old_elements, std::byte* now);
  // Appends the small symbols, low bits and exceptions of packed elements of dense ranges.
  void (*put_dense[4])(const std::byte* old_elements, const std::byte* now, std::uint32_t count,
                       const BlockModel& model, BlockSink& sink);
  // Writes the block's new content to `now`. `sorted` is scratch memory.
  void (*resolve[4])(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted,
                     BlockSource& source, std::byte* now);
  // Extracts the changed elements: writes their positions (`first` + index in the block) and their new values. diff()
  // gave `changed` and the number of changes, `changed_count`. The outputs have room for kSpareElements more.
  void (*extract[4])(const std::byte* now, const std::uint32_t* changed, std::uint32_t count,
                     std::uint32_t changed_count, std::uint32_t first, std::uint32_t* positions, std::byte* values);
  // Adds one to counts[(bits >> shift) & mask], the count of its exponent, for each element.
  void (*count_exponents[4])(const std::byte* old, std::uint32_t count, std::uint32_t shift, std::uint32_t mask,
                             std::uint64_t* counts);
  // Adds one to counts[range << kTokenBits | symbol] for each element of dense ranges; symbol 0 is "unchanged", t + 1
  // is step token t.
  void (*count_steps[4])(const std::byte* old_elements, const std::byte* now, std::uint32_t count,
                         const BlockModel& model, std::uint32_t* counts);
  // Writes runs of small symbols (BlockSink::dense_symbols) before `end`, from the last run and symbol to the first.
  // There must be room for one byte per symbol and kSmallStatesMax more. `states` begin as kSmallFloor and receive the
  // final states. Returns the first byte.
  std::byte* (*write_small)(const std::uint8_t* symbols, const std::uint32_t* run_lengths, std::size_t run_count,
                            std::uint32_t range_count, const SmallCodes& codes, std::uint32_t state_count,
                            std::uint16_t* states, std::byte* end);
  // XXH3-128 with seed 0.
  void (*hash)(const std::byte* bytes, std::size_t count, std::uint64_t* low, std::uint64_t* high);
};

// The fastest kernel set for this processor. The environment variable ECHOLINE_KERNELS selects another:
// portable, avx2 or avx512.
const Kernels& kernels();
void select_kernels(const Kernels& set);  // for tests that compare sets
// All kernel sets that this processor can run, the fastest first.
struct KernelList {
  const Kernels* kernels[3];
  int count;
};
KernelList available_kernels();

extern const Kernels kPortableKernels, kAvx2Kernels, kAvx512Kernels;

// Index into the arrays of Kernels: log2 of the element's size.
inline unsigned width_index(std::size_t element_bytes) {
  return element_bytes == 1 ? 0 : element_bytes == 2 ? 1 : element_bytes == 4 ? 2 : 3;
}

}  // namespace echoline::delta
