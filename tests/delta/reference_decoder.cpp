#include "reference_decoder.hpp"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <stdexcept>

namespace echoline::delta::reference {
namespace {

using Bytes = std::vector<std::uint8_t>;

void require(bool holds, const char* rule) {
  if (!holds) throw std::runtime_error(rule);
}

struct Input {
  const std::uint8_t* at;
  const std::uint8_t* end;
  explicit Input(const Bytes& b) : at(b.data()), end(b.data() + b.size()) {}
  Bytes take(std::uint64_t n) {
    require(n <= static_cast<std::uint64_t>(end - at), "bytes missing");
    Bytes front(at, at + n);
    at += n;
    return front;
  }
  std::uint64_t number(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= std::uint64_t{take(1)[0]} << (8 * i);
    return value;
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const std::uint64_t byte = number(1);
      value |= (byte & 127) << shift;
      if (byte < 128) return value;
    }
  }
  Bytes stream() {
    const bool is_compressed = number(1) == 1;
    Bytes content(varint());
    if (!is_compressed) return take(content.size());
    const Bytes compressed = take(varint());
    require(ZSTD_decompress(content.data(), content.size(), compressed.data(), compressed.size()) == content.size(),
            "zstd");
    return content;
  }
};

struct TypeInfo {
  int bytes, exponent_shift;
  std::uint64_t exponent_mask;
};
TypeInfo type_info(int dtype) {
  constexpr std::array<int, 22> kBytes = {1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 1, 1, 1, 8, 1, 1, 1};
  TypeInfo info{kBytes.at(static_cast<std::size_t>(dtype)), 0, 0};
  if (dtype == 3 || dtype == 16) info = {1, 3, 15};
  if (dtype == 4 || dtype == 17) info = {1, 2, 31};
  if (dtype == 7) info = {2, 10, 31};
  if (dtype == 8) info = {2, 7, 255};
  if (dtype == 11) info = {4, 23, 255};
  if (dtype == 14) info = {8, 52, 2047};
  return info;
}

// One segment's old content as numbers.
struct Elements {
  TypeInfo type;
  Bytes& data;
  std::uint64_t offset, count;
  std::uint64_t get(std::uint64_t i) const {
    std::uint64_t v = 0;
    for (int b = 0; b < type.bytes; ++b)
      v |= std::uint64_t{data[offset + i * static_cast<unsigned>(type.bytes) + static_cast<unsigned>(b)]} << (8 * b);
    return v;
  }
  void set(std::uint64_t i, std::uint64_t v) const {
    for (int b = 0; b < type.bytes; ++b)
      data[offset + i * static_cast<unsigned>(type.bytes) + static_cast<unsigned>(b)] =
          static_cast<std::uint8_t>(v >> (8 * b));
  }
};

void decode_dense(Input in, const Elements& e) {
  std::vector<std::uint64_t> values(e.count);
  const int width = 8 * e.type.bytes;
  for (int plane = e.type.bytes; plane-- > 0;) {
    const Bytes bytes = in.stream();
    for (std::uint64_t i = 0; i < e.count; ++i) values[i] |= std::uint64_t{bytes.at(i)} << (8 * plane);
  }
  for (std::uint64_t i = 0; i < e.count; ++i)
    e.set(i, e.type.exponent_mask ? values[i] >> 1 | (values[i] & 1) << (width - 1) : values[i]);
}

struct Bits {
  Bytes bytes;
  std::uint64_t at = 0;
  std::uint64_t get(unsigned n) {
    std::uint64_t value = 0;
    for (unsigned i = 0; i < n; ++i, ++at) value |= std::uint64_t{(bytes.at(at / 8) >> (at % 8)) & 1u} << i;
    return value;
  }
  std::uint64_t get_long(unsigned n) {  // the part above 32 bits first
    const std::uint64_t high = n > 32 ? get(n - 32) << 32 : 0;
    return high | get(std::min(n, 32u));
  }
  std::uint64_t number() {
    const auto length = static_cast<unsigned>(get(7));
    return length == 0 ? 0 : std::uint64_t{1} << (length - 1) | get_long(length - 1);
  }
  std::vector<unsigned> table() {
    std::vector<unsigned> f(get(9));
    const std::uint64_t largest = get(9);
    const auto precision = static_cast<unsigned>(get(3));
    unsigned slots_left = 2048;
    for (std::size_t i = 0; i < f.size(); ++i) {
      if (i == largest) continue;
      int ones = 0;
      while (get(1) == 1) ++ones;
      const int expected = i < 2 ? 8 : i - 2 == largest ? 11 : std::bit_width(f[i - 2]);
      const int length = ones % 2 == 0 ? expected + ones / 2 : expected - (ones + 1) / 2;
      if (length == 0) continue;
      const unsigned stored_bits = std::min(static_cast<unsigned>(length) - 1, precision);
      f[i] = (1u << stored_bits | static_cast<unsigned>(get(stored_bits)))
             << (static_cast<unsigned>(length) - 1 - stored_bits);
      slots_left -= f[i];
    }
    require(slots_left >= 1 && slots_left <= 2048, "frequencies");
    f.at(largest) = slots_left;
    return f;
  }
};

// Reads symbols of interleaved rANS states.
struct Symbols {
  std::vector<std::uint32_t> x;  // the states
  Input words;
  unsigned turn = 0;
  Symbols(std::size_t states, Input from) : x(states), words(from) {
    for (auto& state : x) state = static_cast<std::uint32_t>(words.number(4));
  }
  unsigned read(const std::vector<unsigned>& frequencies) {
    std::uint32_t& state = x[turn++ % x.size()];
    unsigned symbol = 0, begin = 0;
    while (begin + frequencies[symbol] <= state % 2048) begin += frequencies[symbol++];
    state = frequencies[symbol] * (state / 2048) + state % 2048 - begin;
    if (state < 32768) state = static_cast<std::uint32_t>(65536 * state + words.number(2));
    return symbol;
  }
  void require_end() const {
    require(words.at == words.end, "words left");
    for (const auto state : x) require(state == 32768, "final states");
  }
};

// Small symbols of dense ranges.
struct SmallTable {
  unsigned low_bits = 0;
  std::array<unsigned, 16> frequencies{};
  explicit SmallTable(Bits& bits) : low_bits(static_cast<unsigned>(bits.get(6))) {
    const std::uint64_t present = bits.get(15);  // a bit for each symbol
    unsigned slots_left = 256;
    for (unsigned i = 0; i < 15; ++i) {
      if ((present >> i & 1) == 0) continue;
      const auto length = static_cast<unsigned>(bits.get(3));
      frequencies[i] = 1u << length | static_cast<unsigned>(bits.get(length));
      slots_left -= frequencies[i];
    }
    require(slots_left >= 1 && slots_left <= 256, "frequencies");
    frequencies[15] = slots_left;
  }
};

struct SmallSymbols {
  std::vector<unsigned> x;
  Input bytes;
  std::uint64_t turn = 0;
  SmallSymbols(std::size_t states, Input from) : x(states), bytes(from) {
    for (auto& state : x) state = static_cast<unsigned>(bytes.number(2));
  }
  unsigned read(const SmallTable& table) {
    unsigned& state = x[turn++ % x.size()];
    unsigned symbol = 0, begin = 0;
    while (begin + table.frequencies[symbol] <= state % 256) begin += table.frequencies[symbol++];
    state = table.frequencies[symbol] * (state / 256) + state % 256 - begin;
    if (state < 256) state = 256 * state + static_cast<unsigned>(bytes.number(1));
    return symbol;
  }
  void next_run() { turn = (turn + 63) / 64 * 64; }
  void require_end() const {
    require(bytes.at == bytes.end, "bytes left");
    for (const auto state : x) require(state == 256, "final states");
  }
};

std::vector<unsigned> gap_table(unsigned t) {
  constexpr std::array<std::uint64_t, 24> kR = {33478, 34894, 36303, 37699, 39076, 40431, 41759, 43055,
                                                44317, 45541, 46724, 47864, 48960, 50010, 51013, 51969,
                                                52877, 53739, 54554, 55323, 56048, 56730, 57370, 57969};
  std::vector<std::uint64_t> w = {1u << 28};
  for (int i = 1; i <= 31; ++i) w.push_back(std::max<std::uint64_t>(w.back() * kR.at(t) >> 16, 1));
  w[31] = (w[31] << 16) / (65536 - kR.at(t));
  std::uint64_t total = 0;
  for (const auto x : w) total += x;
  std::vector<unsigned> f;
  int left = 2048;
  for (const auto x : w) {
    f.push_back(static_cast<unsigned>(std::max<std::uint64_t>(1, 2048 * x / total)));
    left -= static_cast<int>(f.back());
  }
  auto largest = std::max_element(f.begin(), f.end());
  *largest = static_cast<unsigned>(static_cast<int>(*largest) + left);
  return f;
}

std::uint64_t mask_of(int bytes) { return bytes == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * bytes)) - 1; }

// The element's new bits after a step of magnitude `g`, towards zero or away from it.
std::uint64_t moved(std::uint64_t old, std::uint64_t g, bool towards_zero, const TypeInfo& type) {
  const bool is_float = type.exponent_mask != 0;
  const std::uint64_t mask = mask_of(type.bytes), top = (mask >> 1) + 1;
  const bool old_negative = is_float && (old & top);
  const auto ord = [&](std::uint64_t v) { return !is_float ? v : v & top ? ~v & mask : v | top; };
  const bool down = towards_zero != old_negative;
  const std::uint64_t o = (down ? ord(old) - g : ord(old) + g) & mask;
  return !is_float ? o : o & top ? o & ~top : ~o & mask;
}

// The element's new bits after the step of a token, whose extra bits come from `bits`.
std::uint64_t stepped(std::uint64_t old, unsigned token, Bits& bits, const TypeInfo& type) {
  std::uint64_t g = token / 2 + 1;
  if (token >= 16) {
    const unsigned n = (token - 16) / 4 + 4, h = (token - 16) / 2 % 2;
    g = (std::uint64_t{1} << (n - 1)) | std::uint64_t{h} << (n - 2) | bits.get_long(n - 2);
  }
  return moved(old, g, token % 2 == 1, type);
}

void decode_sparse(Input in, bool small, std::uint64_t changed, const Elements& e) {
  Bits bits{in.take(in.varint())};
  const std::uint64_t length = bits.get(13) + 1, first = bits.get(13) + 1, base = bits.get(11);
  const std::uint64_t ranges = bits.get(4) + 1, dense = bits.get(5);
  std::vector<std::uint64_t> bounds;
  for (std::uint64_t r = 0; r + 1 < ranges; ++r) bounds.push_back(bits.get(5));
  bounds.push_back(32);
  const auto block_table = bits.table();
  struct Gaps {
    std::uint64_t count = 0, seen = 0, next = 0;
    unsigned shift = 0, table = 0;
    std::vector<unsigned> step_table, tokens;
    std::vector<std::uint64_t> gaps;
    std::size_t at = 0;
  };
  std::vector<Gaps> gaps(ranges + 1);  // the last: exceptions among dense elements
  for (std::uint64_t r = dense; r < ranges + (small && dense > 0 ? 1 : 0); ++r) {
    if ((gaps[r].count = bits.number()) == 0) continue;
    gaps[r].shift = static_cast<unsigned>(bits.get(5));
    gaps[r].table = static_cast<unsigned>(bits.get(5));
    gaps[r].step_table = bits.table();
  }
  struct DenseTable {
    std::vector<unsigned> frequencies = {2048};
    bool escape = false;
  };
  std::vector<DenseTable> dense_tables(small ? 0 : dense);
  std::vector<SmallTable> small_tables;
  const std::uint64_t lanes = small && dense > 0 ? std::uint64_t{1} << bits.get(4) : 0;
  require(lanes <= 256, "number of states");
  for (std::uint64_t r = 0; small && r < dense; ++r) small_tables.emplace_back(bits);
  for (DenseTable& t : dense_tables)
    if (bits.get(1)) t = {.frequencies = {}, .escape = bits.get(1) == 1}, t.frequencies = bits.table();
  const Bytes narrow = in.take(in.varint());
  Symbols symbols(4, Input(narrow));
  std::optional<Symbols> wide;
  Bits low{{}};
  std::optional<SmallSymbols> steps;
  if (small && dense > 0) {
    low.bytes = in.take(in.varint());
    steps.emplace(lanes, in);
  } else if (in.at != in.end) {
    require(!small, "bytes left");
    wide.emplace(64, in);
  }

  struct Block {
    std::uint64_t begin, end;
    unsigned symbol;
  };
  std::vector<Block> blocks;
  for (std::uint64_t begin = 0; begin < e.count;) {
    std::uint64_t end = begin + 1;
    while (end < e.count && !(end >= first && (end - first) % length == 0) &&
           end * static_cast<unsigned>(e.type.bytes) % 65536 != 0)
      ++end;
    blocks.push_back({.begin = begin, .end = end, .symbol = symbols.read(block_table)});
    begin = end;
  }
  for (Gaps& g : gaps) {
    if (g.count == 0) continue;
    symbols.turn = 0;
    for (std::uint64_t i = 0; i < g.count; ++i) {
      std::uint64_t high = 0;
      unsigned token;
      while ((token = symbols.read(gap_table(g.table))) == 31) high += 31;
      g.gaps.push_back(high + token);
    }
    symbols.turn = 0;
    for (std::uint64_t i = 0; i < g.count; ++i) g.tokens.push_back(symbols.read(g.step_table));
  }
  // The bits of each range: low bits of its gaps, then extra bits of its tokens, which the walk below reads.
  std::vector<Bits> extras;
  for (Gaps& g : gaps) {
    for (auto& gap : g.gaps) gap = gap << g.shift | bits.get(g.shift);
    extras.push_back(bits);
    for (const unsigned token : g.tokens)
      if (token >= 16) bits.at += (token - 16) / 4 + 2;
  }
  symbols.turn = 0;
  std::uint64_t done = 0;
  for (const Block& block : blocks) {
    if (block.symbol == 0) continue;
    if (wide) wide->turn = 0;
    if (steps) steps->next_run();
    const std::int64_t shifted = static_cast<std::int64_t>(base + block.symbol) - 8;
    const auto block_base = static_cast<std::uint64_t>(std::max<std::int64_t>(shifted, 0));
    for (std::uint64_t i = block.begin; i < block.end; ++i) {
      const std::uint64_t old = e.get(i);
      const std::uint64_t exponent = old >> e.type.exponent_shift & e.type.exponent_mask;
      const std::uint64_t c = std::min<std::uint64_t>(exponent > block_base ? exponent - block_base : 0, 31);
      std::uint64_t r = 0;
      while (bounds[r] <= c) ++r;
      // Returns the next change of a range, or of dense elements, if it belongs to this element.
      const auto take_gap = [&](std::uint64_t which) {
        Gaps& g = gaps[which];
        const std::uint64_t rank = g.seen++;
        if (g.at == g.count || rank != g.next + g.gaps[g.at]) return false;
        e.set(i, stepped(old, g.tokens[g.at], extras[which], e.type));
        g.next = rank + 1;
        ++g.at;
        ++done;
        return true;
      };
      if (r < dense && small) {
        const unsigned symbol = steps->read(small_tables[r]), low_bits = small_tables[r].low_bits;
        if (take_gap(ranges)) require(symbol == 15, "symbol of an exception");
        if (symbol == 15) continue;
        const std::int64_t high = static_cast<std::int64_t>(symbol) - 7;
        const auto step = static_cast<std::int64_t>(static_cast<std::uint64_t>(high) << low_bits | low.get(low_bits));
        e.set(i, moved(old, static_cast<std::uint64_t>(step < 0 ? -step : step), step < 0, e.type));
        done += e.get(i) != old;
      } else if (r < dense) {
        const DenseTable& table = dense_tables[r];
        unsigned symbol = (wide ? *wide : symbols).read(table.frequencies);
        if (table.escape && symbol + 1 == table.frequencies.size()) symbol = static_cast<unsigned>(bits.get(9)) + 1;
        if (symbol == 0) continue;
        e.set(i, stepped(old, symbol - 1, bits, e.type));
        ++done;
      } else {
        take_gap(r);
      }
    }
  }
  require(done == changed, "number of changes");
  symbols.require_end();
  if (wide) wide->require_end();
  if (steps) steps->require_end();
  require((low.at + 7) / 8 == low.bytes.size(), "low bits left");
  require((bits.at + 7) / 8 == bits.bytes.size(), "bits left");
}

}  // namespace

State decode(std::span<const std::byte> patch, State state) {
  Bytes bytes(patch.size());
  std::transform(patch.begin(), patch.end(), bytes.begin(), [](std::byte b) { return static_cast<std::uint8_t>(b); });
  Input in(bytes);
  const Bytes magic = in.take(8);
  require(std::string(magic.begin(), magic.end()) == "ECHOPTCH", "magic");
  const std::uint64_t version = in.number(2);
  require(version == 3 || version == 4, "version");
  for (;;) {
    const auto type = static_cast<char>(in.number(1));
    const Bytes body = in.take(in.number(4));
    in.take(8);
    Input frame(body);
    if (type == 'T') return state;
    if (type == 'H') {
      const bool snapshot = frame.number(1) == 1;
      const std::uint64_t tensors = frame.number(4);
      const Bytes table = frame.stream();
      Input entries(table);
      if (snapshot) state.clear();
      for (std::uint64_t t = 0; t < tensors; ++t) {
        Tensor tensor;
        const Bytes name = entries.take(entries.varint());
        tensor.name.assign(name.begin(), name.end());
        tensor.dtype = static_cast<int>(entries.number(1));
        tensor.shape.resize(entries.number(1));
        std::uint64_t size = static_cast<unsigned>(type_info(tensor.dtype).bytes);
        for (auto& dim : tensor.shape) size *= dim = entries.varint();
        if (tensor.dtype == 19) size /= 2;                                  // packed elements of 4 bits
        if (tensor.dtype == 20 || tensor.dtype == 21) size = size * 3 / 4;  // of 6 bits
        if (snapshot) {
          tensor.data.resize(size);
          state.push_back(tensor);
        }
        require(state[t].name == tensor.name && state[t].dtype == tensor.dtype && state[t].shape == tensor.shape,
                "table");
      }
      continue;
    }
    require(type == 'S' || type == 'G', "frame type");
    const std::uint64_t number = frame.varint();
    Tensor& tensor = state.at(number);
    const TypeInfo info = type_info(tensor.dtype);
    const std::uint64_t tensors = type == 'G' ? frame.varint() : 1;
    Bytes group;
    for (std::uint64_t t = number; type == 'G' && t < number + tensors; ++t) {
      require(state.at(t).dtype == tensor.dtype && state[t].data.size() <= 131072, "group");
      group.insert(group.end(), state[t].data.begin(), state[t].data.end());
    }
    Bytes& data = type == 'G' ? group : tensor.data;
    const std::uint64_t offset = type == 'G' ? 0 : frame.varint() * 8388608;
    const std::uint64_t length = std::min<std::uint64_t>(8388608, data.size() - offset);
    const Elements elements{info, data, offset, length / static_cast<unsigned>(info.bytes)};
    for (std::uint64_t layers = frame.varint(); layers > 0; --layers) {
      const std::uint64_t coding = frame.number(1);
      const std::uint64_t changed = frame.varint();
      frame.varint();
      const Bytes payload = frame.take(frame.varint());
      if (coding != 2) {
        decode_sparse(Input(payload), coding == 3, changed, elements);
      } else {
        decode_dense(Input(payload), elements);
      }
    }
    for (std::uint64_t t = number, at = 0; type == 'G' && t < number + tensors; at += state[t++].data.size())
      std::copy_n(group.begin() + static_cast<std::ptrdiff_t>(at), state[t].data.size(), state[t].data.begin());
  }
}

}  // namespace echoline::delta::reference
