#include "delta/rans.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace echoline::delta {

Frequencies normalise(std::span<const std::uint64_t> weights) {
  const std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  if (total == 0) return {};
  Frequencies table(weights.size());
  std::int64_t left = kRansSlots;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    table[i] = static_cast<std::uint16_t>(std::max<std::uint64_t>(weights[i] * kRansSlots / total, 1));
    left -= table[i];
  }
  while (left != 0) {
    const auto largest = std::max_element(table.begin(), table.end());
    const std::int64_t change = std::max<std::int64_t>(left, 1 - *largest);
    *largest = static_cast<std::uint16_t>(*largest + change);
    left -= change;
  }
  while (table.back() == 0) table.pop_back();
  return table;
}

namespace {

constexpr unsigned kPrecisionBits = 3;
constexpr unsigned kFirstLength = 8;  // expected of the first two symbols

unsigned bit_length(unsigned frequency) { return static_cast<unsigned>(std::bit_width(frequency)); }

// The length of a frequency is written as its difference to that of the symbol two before it: tokens come in pairs.
unsigned expected_length(const Frequencies& table, std::size_t symbol, std::size_t largest) {
  if (symbol < 2) return kFirstLength;
  return symbol - 2 == largest ? kRansBits : bit_length(table[symbol - 2]);
}

}  // namespace

void coarsen(Frequencies& table, unsigned precision) {
  if (table.empty()) return;
  const auto largest = std::max_element(table.begin(), table.end());
  std::uint32_t left = kRansSlots;
  for (auto f = table.begin(); f != table.end(); ++f) {
    if (f == largest || *f == 0) continue;
    const unsigned length = bit_length(*f);
    const unsigned lost = length - 1 - std::min(length - 1, precision);
    *f = static_cast<std::uint16_t>(*f >> lost << lost);
    left -= *f;
  }
  *largest = static_cast<std::uint16_t>(left);
}

unsigned precision_for(std::uint64_t symbols) { return symbols < 4096 ? 2 : symbols < 65536 ? 3 : 5; }

void write_frequencies(const Frequencies& table, unsigned precision, BitWriter& out) {
  const auto largest = static_cast<std::size_t>(std::max_element(table.begin(), table.end()) - table.begin());
  out.put(table.size(), kTokenBits);
  out.put(largest, kTokenBits);
  out.put(precision, kPrecisionBits);
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (i == largest) continue;
    const unsigned length = bit_length(table[i]), expected = expected_length(table, i, largest);
    const unsigned code = length >= expected ? 2 * (length - expected) : 2 * (expected - length) - 1;
    out.put((1u << code) - 1, code + 1);  // that many ones, and a zero
    if (length < 2) continue;
    const unsigned given = std::min(length - 1, precision);
    out.put(table[i] >> (length - 1 - given), given);
  }
}

Frequencies read_frequencies(BitReader& reader, std::size_t symbols_max) {
  const std::size_t count = get_bits(reader, kTokenBits), largest = get_bits(reader, kTokenBits);
  const auto precision = static_cast<unsigned>(get_bits(reader, kPrecisionBits));
  if (count > symbols_max || largest >= count) return {};
  Frequencies table(count);
  std::uint32_t left = kRansSlots;
  for (std::size_t i = 0; i < count; ++i) {
    if (i == largest) continue;
    unsigned code = 0;
    while (code <= 2 * kRansBits && get_bits(reader, 1) != 0) ++code;
    const unsigned expected = expected_length(table, i, largest);
    const unsigned length = code % 2 == 0 ? expected + code / 2 : expected - (code + 1) / 2;
    if (length > kRansBits) return {};  // less than zero too
    if (length == 0) continue;
    const unsigned given = std::min(length - 1, precision);
    const auto frequency =
        static_cast<std::uint32_t>(((1u << given) | get_bits(reader, given)) << (length - 1 - given));
    if (frequency >= left) return {};
    table[i] = static_cast<std::uint16_t>(frequency);
    left -= frequency;
  }
  table[largest] = static_cast<std::uint16_t>(left);
  if (exhausted(reader)) return {};
  return table;
}

void rans_table(const Frequencies& table, RansEntry* entries) {
  for (std::uint32_t symbol = 0; symbol < table.size(); ++symbol)
    for (std::uint32_t offset = 0; offset < table[symbol]; ++offset)
      *entries++ = symbol << (2 * kRansBits) | (table[symbol] - 1u) << kRansBits | offset;
}

namespace {

// A symbol as the writer needs it. Division by the frequency is multiplication by its reciprocal (T. Granlund and
// P. Montgomery, "Division by invariant integers using multiplication", 1994): exact for every 31-bit state.
struct WriteSymbol {
  std::uint64_t reciprocal = 0;
  std::uint32_t start = 0;
  std::uint32_t frequency = 0;
  unsigned shift = 0;

  WriteSymbol() = default;
  WriteSymbol(std::uint32_t first, std::uint32_t f) : start(first), frequency(f) {
    if (f == 0) return;
    shift = static_cast<unsigned>(std::bit_width(f - 1));
    reciprocal = ((std::uint64_t{1} << (31 + shift)) + f - 1) / f;
  }
  std::uint32_t quotient(std::uint32_t state) const {
    return static_cast<std::uint32_t>((state * reciprocal) >> (31 + shift));
  }
};

}  // namespace

void rans_write(std::span<const RansRun> runs, ByteVector& out) {
  std::uint32_t states[kRansStates];
  std::fill_n(states, kRansStates, kRansFloor);
  std::size_t total = 0;
  for (const RansRun& run : runs) total += run.symbols.size();
  // At most 11 bits a symbol, written from the end.
  std::vector<std::uint16_t> words(total * kRansBits / 16 + kRansStates + 1);
  std::uint16_t* at = words.data() + words.size();
  std::size_t tables_max = 0;
  for (const RansRun& run : runs) tables_max = std::max(tables_max, run.tables.size());
  std::vector<WriteSymbol> symbols(tables_max << kTokenBits);
  for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
    if (run->symbols.empty()) continue;
    for (std::size_t t = 0; t < run->tables.size(); ++t) {
      std::uint32_t start = 0;
      for (std::size_t s = 0; s < run->tables[t].size(); ++s) {
        symbols[t << kTokenBits | s] = WriteSymbol(start, run->tables[t][s]);
        start += run->tables[t][s];
      }
    }
    for (std::size_t i = run->symbols.size(); i-- > 0;) {
      const WriteSymbol& symbol = symbols[run->symbols[i]];
      std::uint32_t state = states[i % kRansStates];
      // Written in any case, kept when the state is too large: whether it is cannot be predicted.
      const bool spill = state >> (31 - kRansBits) >= symbol.frequency;
      at[-1] = static_cast<std::uint16_t>(state);
      at -= spill;
      state = spill ? state >> 16 : state;
      const std::uint32_t quotient = symbol.quotient(state);
      states[i % kRansStates] = (quotient << kRansBits) + (state - quotient * symbol.frequency) + symbol.start;
    }
  }
  for (const std::uint32_t state : states) put(out, state);
  put_bytes(out, std::as_bytes(std::span(at, words.data() + words.size())));
}

bool rans_open(ByteSpan bytes, RansReader& reader) {
  constexpr std::size_t kStateBytes = 4 * kRansStates;
  if (bytes.size() < kStateBytes || bytes.size() % 2 != 0) return false;
  for (unsigned i = 0; i < kRansStates; ++i) {
    reader.state[i] = load<std::uint32_t>(bytes.data() + 4 * i);
    if (reader.state[i] < kRansFloor || reader.state[i] >= kRansFloor << 16) return false;
  }
  reader.words = bytes.data() + kStateBytes;
  reader.word_count = (bytes.size() - kStateBytes) / 2;
  reader.at = 0;
  reader.turn = 0;
  return true;
}

bool rans_at_end(const RansReader& reader) {
  return reader.at == reader.word_count &&
         std::ranges::all_of(reader.state, [](std::uint32_t state) { return state == kRansFloor; });
}

}  // namespace echoline::delta
