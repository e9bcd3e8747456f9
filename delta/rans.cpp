// Frequency tables and the encoder of rANS (range asymmetric numeral systems), an entropy code whose state is an
// integer. Coding a symbol multiplies the state by about 1 / probability. The encoders of sparse coding call it. A
// table divides a fixed number of slots among the symbols. The frequency of a symbol is its number of slots; they are
// adjacent, in the order of the symbols.
#include "delta/rans.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "delta/token.hpp"

namespace echoline::delta {

Frequencies normalise(std::span<const std::uint64_t> weights) {
  const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  if (total == 0) return {};
  Frequencies table(weights.size());
  std::int64_t slots_left = kRansSlots;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    table[i] = static_cast<std::uint16_t>(std::max<std::uint64_t>(weights[i] * kRansSlots / total, 1));
    slots_left -= table[i];
  }
  // Rounding left some slots over, or used too many. The largest frequencies take the difference, where it costs least.
  while (slots_left != 0) {
    const auto largest = std::max_element(table.begin(), table.end());
    // 1 - *largest: a symbol that occurs keeps at least one slot.
    const std::int64_t change = std::max<std::int64_t>(slots_left, 1 - *largest);
    *largest = static_cast<std::uint16_t>(*largest + change);
    slots_left -= change;
  }
  while (table.back() == 0) table.pop_back();
  return table;
}

namespace {

// The precision of a table is the number of bits that a frequency keeps below its highest one. The length of a
// frequency is its number of bits.
constexpr unsigned kPrecisionBits = 3;  // of the field that states the precision
constexpr unsigned kFirstLength = 8;    // expected length of the first two frequencies, in bits

unsigned bit_length(unsigned frequency) { return static_cast<unsigned>(std::bit_width(frequency)); }

// A frequency's length is written relative to that of the symbol two before it, because tokens come in pairs: a step
// away from zero, and one of the same size towards zero. The reader computes the largest frequency last, from the slots
// that are left, so kRansBits stands for its length.
unsigned expected_length(const Frequencies& table, std::size_t symbol, std::size_t largest) {
  if (symbol < 2) return kFirstLength;
  return symbol - 2 == largest ? kRansBits : bit_length(table[symbol - 2]);
}

}  // namespace

void coarsen(Frequencies& table, unsigned precision) {
  if (table.empty()) return;
  const auto largest = std::max_element(table.begin(), table.end());
  std::uint32_t slots_left = kRansSlots;
  for (auto frequency = table.begin(); frequency != table.end(); ++frequency) {
    if (frequency == largest || *frequency == 0) continue;
    const unsigned length = bit_length(*frequency);
    const unsigned dropped_bits = length - 1 - std::min(length - 1, precision);
    *frequency = static_cast<std::uint16_t>(*frequency >> dropped_bits << dropped_bits);
    slots_left -= *frequency;
  }
  *largest = static_cast<std::uint16_t>(slots_left);
}

// A more precise table takes more bits, which pays only if many symbols are coded with it.
unsigned precision_for(std::uint64_t symbol_count) { return symbol_count < 4096 ? 2 : symbol_count < 65536 ? 3 : 5; }

void write_frequencies(const Frequencies& table, unsigned precision, BitWriter& out) {
  const auto largest = static_cast<std::size_t>(std::max_element(table.begin(), table.end()) - table.begin());
  out.put(table.size(), kTokenBits);
  out.put(largest, kTokenBits);
  out.put(precision, kPrecisionBits);
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (i == largest) continue;
    const unsigned length = bit_length(table[i]), expected = expected_length(table, i, largest);
    // Maps the differences 0, -1, 1, -2, ... to 0, 1, 2, 3, ...
    const unsigned ones = length >= expected ? 2 * (length - expected) : 2 * (expected - length) - 1;
    out.put((1u << ones) - 1, ones + 1);  // unary: that many ones, then a zero
    if (length < 2) continue;
    const unsigned stored_bits = std::min(length - 1, precision);
    // put() writes only the low `stored_bits` bits, so the highest bit, which is one, is left out.
    out.put(table[i] >> (length - 1 - stored_bits), stored_bits);
  }
}

Frequencies read_frequencies(BitReader& reader, std::size_t symbols_max) {
  const std::size_t count = get_bits(reader, kTokenBits), largest = get_bits(reader, kTokenBits);
  const auto precision = static_cast<unsigned>(get_bits(reader, kPrecisionBits));
  if (count > symbols_max || largest >= count) return {};
  Frequencies table(count);
  std::uint32_t slots_left = kRansSlots;
  for (std::size_t i = 0; i < count; ++i) {
    if (i == largest) continue;
    unsigned ones = 0;
    // The bound is more than any valid difference takes; it ends the loop in malformed input.
    while (ones <= 2 * kRansBits && get_bits(reader, 1) != 0) ++ones;
    const unsigned expected = expected_length(table, i, largest);
    const unsigned length = ones % 2 == 0 ? expected + ones / 2 : expected - (ones + 1) / 2;
    if (length > kRansBits) return {};  // also catches negative values, which are large as unsigned ones
    if (length == 0) continue;
    const unsigned stored_bits = std::min(length - 1, precision);
    const auto frequency =
        static_cast<std::uint32_t>(((1u << stored_bits) | get_bits(reader, stored_bits)) << (length - 1 - stored_bits));
    if (frequency >= slots_left) return {};
    table[i] = static_cast<std::uint16_t>(frequency);
    slots_left -= frequency;
  }
  table[largest] = static_cast<std::uint16_t>(slots_left);
  if (is_exhausted(reader)) return {};
  return table;
}

void fill_decode_table(const Frequencies& table, bool last_is_escape, RansEntry* entries) {
  for (std::uint32_t index = 0; index < table.size(); ++index) {
    const std::uint32_t symbol = last_is_escape && index + 1 == table.size() ? kEscape : index;
    const RansEntry entry = symbol << (2 * kRansBits) | (table[index] - 1u) << kRansBits;
    for (std::uint32_t offset = 0; offset < table[index]; ++offset) *entries++ = entry | offset;
  }
}

// rans_put() divides by multiplying with the reciprocal (T. Granlund and P. Montgomery, "Division by invariant integers
// using multiplication", 1994), exact for every 31-bit state. A frequency of 1 has no 32-bit reciprocal: its factor is
// 2^32 - 1, which gives a quotient of state - 1. kRansSlots - 1 more in the first slot makes up for that. A RansCode
// holds, from the lowest bit: reciprocal, other slots, first slot, shift.
void fill_encode_table(const Frequencies& table, RansCode* codes) {
  std::uint64_t first_slot = 0;
  for (const std::uint64_t frequency : table) {
    const std::uint64_t shift = frequency > 1 ? static_cast<std::uint64_t>(std::bit_width(frequency - 1)) - 1 : 0;
    const std::uint64_t reciprocal =
        frequency > 1 ? ((std::uint64_t{1} << (32 + shift)) + frequency - 1) / frequency : ~0u;
    const std::uint64_t corrected_slot = first_slot + (frequency == 1 ? kRansSlots - 1 : 0);
    *codes++ = reciprocal | (kRansSlots - frequency) << 32 | corrected_slot << 44 | shift << 56;
    first_slot += frequency;
  }
}

namespace {

// The reciprocal of a frequency of at least 2: dividing by it is multiplying by `factor`, then shifting by 16 + shift.
struct SmallReciprocal {
  std::uint32_t factor = 0, shift = 0;
  explicit SmallReciprocal(std::uint32_t frequency)
      : shift(static_cast<std::uint32_t>(std::bit_width(frequency - 1)) - 1) {
    factor = ((1u << (16 + shift)) + frequency - 1) / frequency;
  }
};

// Whether the quotient of SmallReciprocal is exact for every state below 256 times the frequency; larger states output
// a byte first. The rounded-up factor exceeds the true one a little, and this must not reach 1 in the quotient.
bool divides_exactly(std::uint32_t frequency) {
  if (frequency == 1) return true;
  const SmallReciprocal reciprocal(frequency);
  const std::uint64_t excess =
      std::uint64_t{reciprocal.factor} * frequency - (std::uint64_t{1} << (16 + reciprocal.shift));
  return excess * (kSmallSlots * frequency - 1) < std::uint64_t{1} << (16 + reciprocal.shift);
}

}  // namespace

SmallFrequencies normalise_small(const std::array<double, kSmallSymbols>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  SmallFrequencies table{};
  int slots_left = kSmallSlots;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0) continue;
    table[i] = static_cast<std::uint16_t>(std::max<long>(std::lround(weights[i] * kSmallSlots / total), 1));
    slots_left -= table[i];
  }
  // At most 15 other symbols were rounded up, by at most 1 each. So less than 16 is subtracted from the largest, which
  // is at least 256 / 16.
  const auto largest = std::max_element(table.begin(), table.end());
  *largest = static_cast<std::uint16_t>(*largest + slots_left);
  // The writer divides by a 16-bit multiplication, which is not exact for all large frequencies. The second largest
  // gets the amount by which such a frequency is reduced.
  auto second_largest = table.end();
  for (auto frequency = table.begin(); frequency != table.end(); ++frequency)
    if (frequency != largest && *frequency > 0 && (second_largest == table.end() || *frequency > *second_largest))
      second_largest = frequency;
  while (second_largest != table.end() && !divides_exactly(*largest)) --*largest, ++*second_largest;
  return table;
}

void write_small_frequencies(const SmallFrequencies& table, BitWriter& out) {
  // That of kSmallUnchanged, the last symbol, is not written: it is the rest of the slots.
  for (unsigned i = 0; i < kSmallUnchanged; ++i) out.put(table[i] > 0, 1);
  for (unsigned i = 0; i < kSmallUnchanged; ++i) {
    if (table[i] == 0) continue;
    const auto length = static_cast<unsigned>(std::bit_width(table[i]));
    out.put(length - 1, 3);  // lengths are 1 to 8
    out.put(table[i], length - 1);
  }
}

bool read_small_frequencies(BitReader& reader, SmallFrequencies& table) {
  const std::uint64_t symbol_mask = get_bits(reader, kSmallUnchanged);
  std::uint32_t slots_left = kSmallSlots;
  for (unsigned i = 0; i < kSmallUnchanged; ++i) {
    table[i] = 0;
    if ((symbol_mask >> i & 1) == 0) continue;
    const auto low_bit_count = static_cast<unsigned>(get_bits(reader, 3));  // bits below the highest one
    table[i] = static_cast<std::uint16_t>(1u << low_bit_count | get_bits(reader, low_bit_count));
    if (table[i] >= slots_left) return false;
    slots_left -= table[i];
  }
  table[kSmallUnchanged] = static_cast<std::uint16_t>(slots_left);
  return !is_exhausted(reader);
}

// `codes` holds the tables of all ranges, one after another (rans.hpp).
void fill_small_encode_table(unsigned range, const SmallFrequencies& table, SmallCodes& codes) {
  std::uint32_t first_slot = 0;
  for (unsigned symbol = 0; symbol < kSmallSymbols; ++symbol) {
    const unsigned index = range << kSymbolBits | symbol;
    const std::uint32_t frequency = table[symbol];
    // A frequency of 1 has 255 other slots; the encoder then corrects the quotient.
    const bool has_reciprocal = frequency > 1;
    const std::uint32_t factor = has_reciprocal ? SmallReciprocal(frequency).factor : 0xffff;
    codes.other_slots[index] = static_cast<std::uint8_t>(kSmallSlots - std::max(frequency, 1u));
    codes.first_slot[index] = static_cast<std::uint8_t>(first_slot);
    codes.reciprocal_low[index] = static_cast<std::uint8_t>(factor);
    codes.reciprocal_high[index] = static_cast<std::uint8_t>(factor >> 8);
    codes.shift[index] = static_cast<std::uint8_t>(has_reciprocal ? SmallReciprocal(frequency).shift : 0);
    first_slot += frequency;
  }
}

void fill_small_decode_table(unsigned range, const SmallFrequencies& table, SmallTables& tables) {
  std::uint32_t first_slot = 0;
  for (std::uint32_t symbol = 0; symbol < kSmallSymbols; ++symbol) {
    const unsigned index = range << kSymbolBits | symbol;
    const std::uint32_t frequency_minus_one = std::max<std::uint32_t>(table[symbol], 1) - 1;
    tables.first_slot[index] = static_cast<std::uint8_t>(first_slot);  // below 256: kSmallUnchanged comes last
    tables.frequency_minus_one[index] = static_cast<std::uint8_t>(frequency_minus_one);
    for (std::uint32_t offset = 0; offset < table[symbol]; ++offset)
      tables.slot[range * kSmallSlots + first_slot + offset] = symbol << 16 | frequency_minus_one << 8 | offset;
    first_slot += table[symbol];
  }
}

// rANS is written from the end of a buffer to its front, because the decoder reads the symbols in the reverse order of
// encoding.
std::byte* RansWriter::buffer_end(std::size_t bytes) {
  if (bytes > buffer_.size()) {
    buffer_.clear();                    // avoids copying the old content
    buffer_.resize(bytes + bytes / 4);  // a quarter more, so that a slightly larger stream fits too
  }
  return buffer_.data() + buffer_.size() / 2 * 2;  // aligned for words
}

namespace {

// A stream is the final states, with which the decoder begins, and then the words in the order in which it reads them.
template <std::size_t kCount>
void put_stream(const std::uint32_t (&states)[kCount], const std::uint16_t* words_begin, const std::uint16_t* words_end,
                ByteVector& out) {
  put_bytes(out, std::as_bytes(std::span(states)));
  put_bytes(out, std::as_bytes(std::span(words_begin, words_end)));
}

template <std::size_t kCount>
bool open_stream(ByteSpan bytes, std::uint32_t (&states)[kCount], const std::byte*& words, std::uint64_t& word_count) {
  if (bytes.size() < sizeof states || bytes.size() % 2 != 0) return false;
  std::memcpy(states, bytes.data(), sizeof states);
  words = bytes.data() + sizeof states;
  word_count = (bytes.size() - sizeof states) / 2;
  return std::ranges::all_of(states,
                             [](std::uint32_t state) { return state >= kRansFloor && state < kRansFloor << 16; });
}

// The encoder began with states of kRansFloor, so the decoder must end with them. This detects damaged streams.
template <class Reader>
bool is_at_end(const Reader& reader) {
  return reader.word_index == reader.word_count &&
         std::ranges::all_of(reader.state, [](std::uint32_t state) { return state == kRansFloor; });
}

}  // namespace

void RansWriter::write(std::span<const RansRun> runs, ByteVector& out) {
  std::uint32_t states[kRansStates];
  std::fill_n(states, kRansStates, kRansFloor);
  std::size_t total = 0;
  for (const RansRun& run : runs) total += run.symbols.size();
  // A symbol takes at most kRansBits bits, so total * kRansBits / 16 words of 16 bits. kRansStates + 2: each state may
  // output a word early, and the last division rounds down. Times 2: bytes of a word.
  auto* const end = reinterpret_cast<std::uint16_t*>(buffer_end(2 * (total * kRansBits / 16 + kRansStates + 2)));
  std::uint16_t* begin = end;
  for (auto run = runs.rbegin(); run != runs.rend(); ++run)
    for (std::size_t i = run->symbols.size(); i-- > 0;)
      // rans_put() returns whether it wrote a word before `begin`: 0 or 1 words.
      begin -= rans_put(states[i % kRansStates], run->encode_table[run->symbols[i]], begin - 1);
  put_stream(states, begin, end, out);
}

void RansWriter::write_small(const std::uint8_t* symbols, std::span<const std::uint32_t> run_lengths,
                             std::uint32_t range_count, const SmallCodes& codes, std::uint32_t state_count,
                             ByteVector& out) {
  std::uint16_t states[kSmallStatesMax];
  std::fill_n(states, state_count, kSmallFloor);
  // Room for at most a byte per symbol, and one per state.
  std::byte* const end =
      buffer_end(std::accumulate(run_lengths.begin(), run_lengths.end(), std::size_t{kSmallStatesMax}));
  const std::byte* const begin = kernels().write_small(symbols, run_lengths.data(), run_lengths.size(), range_count,
                                                       codes, state_count, states, end);
  put_bytes(out, std::as_bytes(std::span(states, state_count)));
  put_bytes(out, std::span(begin, static_cast<const std::byte*>(end)));
}

bool rans_open(ByteSpan bytes, RansReader& reader) {
  return open_stream(bytes, reader.state, reader.words, reader.word_count);
}
bool rans_open(ByteSpan bytes, ManyStateRansReader& reader) {
  return open_stream(bytes, reader.state, reader.words, reader.word_count);
}

bool rans_open(ByteSpan bytes, std::uint32_t state_count, SmallReader& reader) {
  const std::size_t states_bytes = state_count * sizeof(std::uint16_t);
  if (bytes.size() < states_bytes) return false;
  std::memcpy(reader.state, bytes.data(), states_bytes);
  reader.state_count = state_count;
  reader.bytes = bytes.data() + states_bytes;
  reader.byte_count = bytes.size() - states_bytes;
  reader.byte_index = 0;
  return std::ranges::all_of(std::span(reader.state, state_count),
                             [](std::uint16_t state) { return state >= kSmallFloor; });
}

bool is_rans_at_end(const SmallReader& reader) {
  return reader.byte_index == reader.byte_count &&
         std::ranges::all_of(std::span(reader.state, reader.state_count),
                             [](std::uint16_t state) { return state == kSmallFloor; });
}

bool is_rans_at_end(const RansReader& reader) { return is_at_end(reader); }
bool is_rans_at_end(const ManyStateRansReader& reader) { return is_at_end(reader); }

}  // namespace echoline::delta
