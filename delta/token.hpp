// Steps as tokens, and single symbols of rANS, the entropy coder (block.hpp). A step is the signed difference of an
// element's new and old bits, both as ordered integers. A token stands for its direction (towards zero or away from it)
// and the upper part of its magnitude. Functions with internal linkage, because the block kernels use them in
// translation units compiled for different processors. Internal to this folder.
#pragma once
#include <cstdint>

#include "delta/block.hpp"

namespace echoline::delta {

// The token of a step of `magnitude` (at least 1), towards zero or away from it. After the exact tokens, each bit
// length from 4 up has four tokens: two halves of its magnitudes, two directions.
static inline unsigned token_of_step(std::uint64_t magnitude, bool towards_zero) {
  if (magnitude <= kExactMagnitudeMax) return 2 * static_cast<unsigned>(magnitude - 1) + towards_zero;
  const auto length = static_cast<unsigned>(64 - __builtin_clzll(magnitude));
  const auto upper_half = static_cast<unsigned>((magnitude >> (length - 2)) & 1);
  return kExactTokens + 4 * (length - 4) + 2 * upper_half + towards_zero;
}

// The number of bits of the magnitude that a token does not give: all but the two highest.
static inline unsigned extra_bits(unsigned token) { return token < kExactTokens ? 0 : (token - kExactTokens) / 4 + 2; }

// Reads the extra bits of a token; if they are more than 32, those above the lowest 32 come first.
static inline std::uint64_t get_extra(BitReader& bits, unsigned token) {
  const unsigned count = extra_bits(token);
  const std::uint64_t high = count > 32 ? get_bits(bits, count - 32) << 32 : 0;
  return high | get_bits(bits, count > 32 ? 32 : count);
}

// The step of a token with its extra bits; steps towards zero (odd tokens) are negative, in two's complement.
static inline std::uint64_t step_of_token(unsigned token, std::uint64_t extra) {
  std::uint64_t magnitude = token / 2 + 1;
  if (token >= kExactTokens) {
    const std::uint64_t top_bits = 0b10u | ((token - kExactTokens) / 2 & 1);  // the leading one, and the half
    magnitude = top_bits << extra_bits(token) | extra;
  }
  return token & 1 ? ~magnitude + 1 : magnitude;
}

template <class T>
static constexpr T kSignBit = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));

// A bijection from bits to integers that increase with the value, so that neighbouring floats differ by one.
template <class T>
static inline T to_ordered(T bits, bool is_float) {
  if (!is_float) return bits;
  return static_cast<T>(bits & kSignBit<T> ? ~bits : bits | kSignBit<T>);
}
template <class T>
static inline T from_ordered(T ordered, bool is_float) {
  if (!is_float) return ordered;
  return static_cast<T>(ordered & kSignBit<T> ? ordered & ~kSignBit<T> : ~ordered);
}

// The token of a change from `old` to `now`. Sets `magnitude` to the step's; its lowest extra_bits(token) bits follow
// the token. If old and new are equal, `magnitude` is 0, and the result is no token.
template <class T>
static inline unsigned change_token(T old, T now, bool is_float, std::uint64_t& magnitude) {
  const T step = static_cast<T>(to_ordered(now, is_float) - to_ordered(old, is_float));
  // The step is towards zero if a positive value goes down, or a negative float up.
  const bool is_down = step & kSignBit<T>, is_negative = is_float && (old & kSignBit<T>);
  magnitude = is_down ? static_cast<T>(~step + 1) : step;
  return token_of_step(magnitude, is_down != is_negative);
}

// The new bits after a step of step_of_token().
template <class T>
static inline T apply_step(T old, std::uint64_t step, bool is_float) {
  const auto signed_step = static_cast<T>(is_float && (old & kSignBit<T>) ? ~step + 1 : step);
  return from_ordered(static_cast<T>(to_ordered(old, is_float) + signed_step), is_float);
}

// Advances a state past the symbol that its lowest bits selected, by the table entry of these bits (RansEntry: offset,
// frequency - 1 and symbol). Returns whether it took the next word. Branch-free, because a branch on the state would
// often be mispredicted.
static inline bool rans_advance(std::uint32_t& state, RansEntry entry, std::uint16_t next_word) {
  const std::uint32_t frequency = ((entry >> kRansBits) & (kRansSlots - 1)) + 1, offset = entry & (kRansSlots - 1);
  state = frequency * (state >> kRansBits) + offset;
  const bool refill = state < kRansFloor;
  state = refill ? state << 16 | next_word : state;
  return refill;
}

// Reads the next symbol; `table` has an entry for each value of a state's low bits. Past the end it takes zeros as
// words; the caller compares word_index with word_count.
static inline unsigned rans_read(RansReader& reader, const RansEntry* table) {
  std::uint32_t& state = reader.state[reader.turn];
  reader.turn = (reader.turn + 1) % kRansStates;
  const RansEntry entry = table[state & (kRansSlots - 1)];
  std::uint16_t word = 0;
  if (reader.word_index < reader.word_count) std::memcpy(&word, reader.words + 2 * reader.word_index, 2);
  reader.word_index += rans_advance(state, entry, word);
  return entry >> (2 * kRansBits);
}

// Reads symbols [begin, end) of a run with kManyStates interleaved states. On entry symbols[i] is the index of the
// table that codes it.
static inline void rans_read_many_states(ManyStateRansReader& reader, std::uint32_t begin, std::uint32_t end,
                                         const RansEntry* tables, std::uint16_t* symbols) {
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint32_t& state = reader.state[i % kManyStates];
    const RansEntry entry = tables[symbols[i] * kRansSlots + (state & (kRansSlots - 1))];
    std::uint16_t word = 0;
    if (reader.word_index < reader.word_count) std::memcpy(&word, reader.words + 2 * reader.word_index, 2);
    reader.word_index += rans_advance(state, entry, word);
    symbols[i] = static_cast<std::uint16_t>(entry >> (2 * kRansBits));
  }
}

// Reads small symbols [begin, end) of a run. On entry symbols[i] is its element's range << kSymbolBits; the symbol is
// added to it. A range is a group of exponents with one table. A table entry is, from the lowest bit: offset (8 bits),
// frequency - 1 (8), symbol.
static inline void read_small_run(SmallReader& reader, std::uint32_t begin, std::uint32_t end,
                                  const SmallTables& tables, std::uint8_t* symbols) {
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint16_t& state = reader.state[(reader.turn + i) % reader.state_count];
    const std::uint32_t entry = tables.slot[(symbols[i] >> kSymbolBits) * kSmallSlots + (state & (kSmallSlots - 1))];
    const std::uint32_t frequency = (entry >> 8 & 0xff) + 1, offset = entry & 0xff;
    const std::uint32_t next = frequency * (state / kSmallSlots) + offset;
    const bool refill = next < kSmallFloor;
    const auto byte = reader.byte_index < reader.byte_count
                          ? static_cast<std::uint32_t>(reader.bytes[reader.byte_index])
                          : std::uint32_t{0};
    reader.byte_index += refill;
    state = static_cast<std::uint16_t>(refill ? next << 8 | byte : next);
    symbols[i] = static_cast<std::uint8_t>(symbols[i] | entry >> 16);
  }
}

// The number of states after which the next run of small symbols begins: the run's length, in whole vectors.
static inline std::uint32_t states_of_run(std::uint32_t length) {
  return (length + kRunStateAlignment - 1) / kRunStateAlignment * kRunStateAlignment;
}

// Encodes a small symbol into a state. Returns whether the state's low byte was output to `byte` first, which happens
// if the state would become too large. Let x be what is left of the state, and f the symbol's frequency. The new state
// is floor(x / f) * 256 + x % f + first_slot. Here it is computed as x + first_slot + floor(x / f) * (256 - f).
static inline bool put_small(std::uint16_t& state, const SmallCodes& codes, std::uint8_t symbol, std::byte* byte) {
  const std::uint32_t other_slots = codes.other_slots[symbol];
  *byte = static_cast<std::byte>(state & 0xff);
  const bool spill = (state >> 8) + other_slots >= kSmallSlots;  // state / 256 >= f
  const std::uint32_t x = spill ? state >> 8 : state;
  const std::uint32_t reciprocal = codes.reciprocal_low[symbol] | std::uint32_t{codes.reciprocal_high[symbol]} << 8;
  const std::uint32_t quotient = (x * reciprocal >> 16) >> codes.shift[symbol];
  // For frequency 1 (255 other slots) the quotient is one too small, so the product lacks 255.
  const std::uint32_t correction = other_slots == kSmallSlots - 1 ? kSmallSlots - 1 : 0;
  state = static_cast<std::uint16_t>(x + codes.first_slot[symbol] + quotient * other_slots + correction);
  return spill;
}

// Encodes a symbol into a state, like put_small(). Returns whether the state's low word was output first. A RansCode
// is, from the lowest bit: reciprocal (32 bits), other_slots (12), first_slot (12), shift (8).
static inline bool rans_put(std::uint32_t& state, RansCode code, std::uint16_t* word) {
  const auto fields = static_cast<std::uint32_t>(code >> 32);
  const std::uint32_t other_slots = fields & 0xfff, first_slot = fields >> 12 & 0xfff, shift = fields >> 24;
  // The word is always written, but kept only if the state is too large, because a branch would be mispredicted. It is
  // too large from frequency << (31 - kRansBits) on: the encoded state would have more than 31 bits.
  const bool spill = (state + (other_slots << (31 - kRansBits))) >> 31;
  *word = static_cast<std::uint16_t>(state);
  state = spill ? state >> 16 : state;
  const auto quotient = static_cast<std::uint32_t>((state * (code & 0xffffffffu)) >> 32) >> shift;
  state += first_slot + quotient * other_slots;
  return spill;
}

// Reads `count` symbols; table_of(i) is the table of the i-th. The four states stay in registers.
template <class TableOf>
static inline void rans_read_run(RansReader& reader, std::uint64_t count, TableOf&& table_of, std::uint16_t* symbols) {
  std::uint64_t i = 0;
  // Single symbols until it is state 0's turn; then four at a time while four more words are certain.
  for (; i < count && reader.turn != 0; ++i) symbols[i] = static_cast<std::uint16_t>(rans_read(reader, table_of(i)));
  std::uint32_t state0 = reader.state[0], state1 = reader.state[1], state2 = reader.state[2], state3 = reader.state[3];
  std::uint64_t word_index = reader.word_index;
  const auto read = [&](std::uint32_t& state, std::uint64_t index) {
    const RansEntry entry = table_of(index)[state & (kRansSlots - 1)];
    std::uint16_t word;
    std::memcpy(&word, reader.words + 2 * word_index, 2);
    word_index += rans_advance(state, entry, word);
    symbols[index] = static_cast<std::uint16_t>(entry >> (2 * kRansBits));
  };
  for (; i + 4 <= count && word_index + 4 <= reader.word_count; i += 4) {
    read(state0, i);
    read(state1, i + 1);
    read(state2, i + 2);
    read(state3, i + 3);
  }
  reader.state[0] = state0, reader.state[1] = state1, reader.state[2] = state2, reader.state[3] = state3;
  reader.word_index = word_index;
  for (; i < count; ++i) symbols[i] = static_cast<std::uint16_t>(rans_read(reader, table_of(i)));
}

}  // namespace echoline::delta
