// The work on one block, a run of consecutive elements of one tensor, as plain functions that exist once per
// instruction set: they find changes, sort elements into classes by their old value, and turn changes into tokens and
// back. All give the same results. Internal to this folder; FORMAT.md, "Sparse coding", says what the numbers mean.
#pragma once
#include <cstddef>
#include <cstdint>

#include "delta/bits.hpp"

namespace echoline::delta {

inline constexpr std::uint32_t kBlockElementsMax = 8192;
inline constexpr std::uint32_t kBlockWordsMax = kBlockElementsMax / 32;
inline constexpr std::size_t kPrefetchBytes = 16384;  // from a block to what is read after it
inline constexpr std::uint32_t kSpareElements = 32;   // beyond the last element of a buffer: vectors are stored whole
inline constexpr unsigned kClasses = 32;
inline constexpr unsigned kRangesMax = 16;

// Tokens of a step: sign and magnitude up to 8 exactly, larger ones by their two highest bits. FORMAT.md, "Tokens".
inline constexpr unsigned kTokenBits = 9;
inline constexpr unsigned kStepTokensMax = 260;             // of 64-bit elements
inline constexpr unsigned kTokensMax = kStepTokensMax + 1;  // with "unchanged"

inline constexpr unsigned kRansBits = 11;  // frequencies of a table add up to 2^11
inline constexpr std::uint32_t kRansSlots = 1u << kRansBits;
inline constexpr std::uint32_t kRansFloor = 1u << 15;  // states are at least this between symbols, and below 2^31
inline constexpr unsigned kRansStates = 4;

// Symbols of elements that are coded one by one. FORMAT.md, "Small symbols".
inline constexpr unsigned kSymbolBits = 4;
inline constexpr unsigned kSmallSymbols = 1u << kSymbolBits;
inline constexpr unsigned kStays = kSmallSymbols - 1;  // the element does not change
inline constexpr unsigned kZeroStep = 7;      // symbol s is a step of (s - kZeroStep) << low bits, and its low bits
inline constexpr unsigned kSmallSlots = 256;  // frequencies of a table add up to that
inline constexpr unsigned kSmallFloor = 256;  // states are at least this between symbols, and below 2^16
inline constexpr unsigned kLanesMax = 256;    // states side by side
inline constexpr unsigned kLowBitsMax = 48;
inline constexpr unsigned kRunStep = 64;  // a run of symbols begins with a state whose number is a multiple of this

// Version 3 of the format, which is read only.
inline constexpr unsigned kWideStates = 64;  // of the stream that long runs of dense symbols have for themselves
inline constexpr unsigned kEscape = 511;     // in a table entry: the token follows in the bits

// Which class an element belongs to, by its old bits v: clamp(((v >> exponent_shift) & exponent_mask) - base, 0, 31);
// which range a class belongs to; and how bits become ordered integers.
struct BlockModel {
  std::uint32_t exponent_shift = 0;
  std::uint32_t exponent_mask = 0;
  std::uint32_t base = 0;
  bool is_float = false;     // sign and magnitude, else two's complement
  std::uint32_t ranges = 1;  // the first `dense` of them are coded element by element, the others by gaps
  std::uint32_t dense = 0;
  std::uint8_t bound[kRangesMax] =
      {};  // range r holds the classes from bound[r - 1] up to below bound[r]; the last is 32
  std::uint8_t range_of[kClasses] = {};
  // Of dense ranges: bits below a small symbol's step, and which of the symbols of a step have a place in the table.
  std::uint8_t low_bits[kRangesMax] = {};
  std::uint16_t coded[kRangesMax] = {};
  bool has_low_bits = false;
};

// Where collect() puts the changes of a range that is coded by gaps. The caller provides room for one block.
struct GapSink {
  std::uint64_t seen = 0;         // elements of the range before this block
  std::uint64_t next = 0;         // first element of the range that no gap has passed yet
  std::uint32_t* gaps = nullptr;  // elements of the range between two changes
  std::uint16_t* tokens = nullptr;
  std::uint32_t count = 0;
  std::uint64_t* extras = nullptr;  // magnitudes of the tokens that need further bits
  std::uint32_t extra_count = 0;
};
struct BlockSink {
  GapSink gap[kRangesMax + 1];    // the last: changes of dense elements that have no symbol, among all dense elements
  std::uint8_t* dense = nullptr;  // range << kSymbolBits | symbol
  std::uint32_t dense_count = 0;
  BitSink low;  // low bits of dense elements' steps
};

// The elements of a block sorted into those of dense ranges, all together, and those of each range coded by gaps.
struct SortedBlock {
  // Bit i % 32 of mask[i / 32] says whether element i belongs. Entry 0 is the dense ranges, entry g + 1 the g-th range
  // coded by gaps; `before` are the elements of the entry in the words before, 0xffff behind the block's words.
  alignas(64) std::uint32_t mask[kRangesMax + 1][kBlockWordsMax];
  alignas(64) std::uint16_t before[kRangesMax + 1][kBlockWordsMax];
  std::uint32_t count[kRangesMax + 1];
};

// A table entry: bits 0-10 the slot's offset within its symbol, 11-21 the symbol's frequency less one, 22-31 the
// symbol.
using RansEntry = std::uint32_t;

// Reads interleaved rANS symbols; past the end of the words it reads zeros and counts on.
struct RansReader {
  std::uint32_t state[kRansStates] = {};
  const std::byte* words = nullptr;  // little-endian 16-bit
  std::uint64_t word_count = 0;
  std::uint64_t at = 0;
  std::uint32_t turn = 0;  // the state of the next symbol
};
// The same with kWideStates states. Every run begins with state 0.
struct WideRansReader {
  alignas(64) std::uint32_t state[kWideStates] = {};
  const std::byte* words = nullptr;
  std::uint64_t word_count = 0;
  std::uint64_t at = 0;
};

// How small symbols are written, by range << kSymbolBits | symbol. rans.cpp makes it.
struct SmallCodes {
  alignas(64) std::uint8_t others[kRangesMax * kSmallSymbols];  // 256 less the symbol's frequency
  alignas(64) std::uint8_t first[kRangesMax * kSmallSymbols];   // slot
  // floor(x / frequency) is (x * reciprocal >> 16) >> shift for the states x that occur; one less for frequency 1.
  alignas(64) std::uint8_t reciprocal_low[kRangesMax * kSmallSymbols];
  alignas(64) std::uint8_t reciprocal_high[kRangesMax * kSmallSymbols];
  alignas(64) std::uint8_t shift[kRangesMax * kSmallSymbols];
};
// How they are read.
struct SmallTables {
  alignas(64) std::uint8_t first[kRangesMax * kSmallSymbols];  // slot
  alignas(64) std::uint8_t more[kRangesMax * kSmallSymbols];   // frequency less one
  // By range and slot: bits 0-7 the slot's offset within its symbol, 8-15 the frequency less one, 16-19 the symbol.
  std::uint32_t slot[kRangesMax * kSmallSlots];
};
// Past the end of the bytes it reads zeros and counts on.
struct SmallReader {
  alignas(64) std::uint16_t state[kLanesMax] = {};
  std::uint32_t lanes = 0;
  std::uint32_t turn = 0;  // the state that the next run begins with
  const std::byte* bytes = nullptr;
  std::uint64_t byte_count = 0;
  std::uint64_t at = 0;
};

// How a symbol is written. Bits 0-31: reciprocal of its frequency f; 32-43: 2048 - f; 44-55: its first slot, plus 2047
// when f is 1; 56-59: further bits to shift the quotient by. rans.cpp makes them.
using RansCode = std::uint64_t;

// The changes of a range coded by gaps, decoded: element of the range (counted over the segment), and signed step.
struct GapSource {
  const std::uint64_t* ranks = nullptr;
  const std::uint64_t* steps = nullptr;  // towards larger magnitude when positive; modulo the element's width
  std::uint64_t count = 0;
  std::uint64_t at = 0;
  std::uint64_t seen = 0;
};
struct BlockSource {
  GapSource gap[kRangesMax + 1];              // the last as in BlockSink
  const SmallTables* small_tables = nullptr;  // null in version 3
  SmallReader small;
  BitReader low;
  const RansEntry* dense_tables = nullptr;  // version 3: kRansSlots entries for each dense range
  bool is_wide = false;                     // dense symbols come from `wide`, else from `narrow`
  RansReader narrow;
  WideRansReader wide;
  BitReader bits;
  bool is_whole = false;      // blocks are made side by side, each in memory of its own
  std::uint64_t changed = 0;  // steps taken
  bool malformed = false;
};

struct Kernels {
  const char* name;
  // Bit i % 32 of changed[i / 32] says whether element i differs; gives how many do.
  std::uint32_t (*diff[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, std::uint32_t* changed);
  void (*sort[4])(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted);
  // Adds the changes of ranges coded by gaps to `sink`; `sorted` is what sort() made of `prev`.
  void (*collect[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, const BlockModel& model,
                     const SortedBlock& sorted, const std::uint32_t* changed, BlockSink& sink);
  // Puts the elements of dense ranges, as sort() found them, side by side. There is room for kSpareElements more of
  // each. Some ranges are not dense.
  void (*pack[4])(const std::byte* prev, const std::byte* cur, std::uint32_t count, const SortedBlock& sorted,
                  std::byte* olds, std::byte* now);
  // Appends the small symbols of elements of dense ranges, which lie side by side, and what belongs to them.
  void (*put_dense[4])(const std::byte* olds, const std::byte* now, std::uint32_t count, const BlockModel& model,
                       BlockSink& sink);
  // Makes the new content of the block in `now`. `sorted` is scratch.
  void (*resolve[4])(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted,
                     BlockSource& source, std::byte* now);
  // The `elements` elements in `changed`, both of which diff() gave: first + index of each, and its bits. There is room
  // for them, and for kSpareElements more.
  void (*extract[4])(const std::byte* now, const std::uint32_t* changed, std::uint32_t count, std::uint32_t elements,
                     std::uint32_t first, std::uint32_t* positions, std::byte* values);
  // Adds, for each element, one to counts[(bits >> shift) & mask].
  void (*count_exponents[4])(const std::byte* old, std::uint32_t count, std::uint32_t shift, std::uint32_t mask,
                             std::uint64_t* counts);
  // Adds, for each of some elements of dense ranges, one to counts[range << kTokenBits | symbol]; symbol 0 is
  // "unchanged", t + 1 is step token t.
  void (*count_steps[4])(const std::byte* olds, const std::byte* now, std::uint32_t count, const BlockModel& model,
                         std::uint32_t* counts);
  // Writes runs of small symbols (BlockSink::dense) in front of `end`, from the last run and symbol to the first. A
  // symbol takes one byte at most, and kLanesMax bytes more are there. Returns the first byte.
  std::byte* (*write_small)(const std::uint8_t* symbols, const std::uint32_t* lengths, std::size_t runs,
                            std::uint32_t ranges, const SmallCodes& codes, std::uint32_t lanes, std::uint16_t* states,
                            std::byte* end);
  // XXH3-128 with seed 0.
  void (*hash)(const std::byte* bytes, std::size_t count, std::uint64_t* low, std::uint64_t* high);
};

// The fastest set this processor can run. ECHOLINE_KERNELS=portable|avx2|avx512 in the environment picks one.
const Kernels& kernels();
void select_kernels(const Kernels& set);  // another set, for tests that compare them
// Every set this processor can run, the fastest first.
struct KernelList {
  const Kernels* of[3];
  int count;
};
KernelList available_kernels();

extern const Kernels kPortableKernels, kAvx2Kernels, kAvx512Kernels;

// Index into the arrays of Kernels: log2 of the element's size.
inline unsigned width_index(std::size_t element_bytes) {
  return element_bytes == 1 ? 0 : element_bytes == 2 ? 1 : element_bytes == 4 ? 2 : 3;
}

}  // namespace echoline::delta
