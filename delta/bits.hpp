// Bit strings, least significant bit first; internal to this folder.
#pragma once
#include <bit>
#include <cstdint>
#include <utility>

#include "delta/bytes.hpp"

namespace echoline::delta {

class BitWriter {
 public:
  // Appends the low `count` bits of `value`, at most 57: with the seven bits that may be pending they fill a 64-bit
  // word.
  void put(std::uint64_t value, unsigned count) {
    if (pending_bits_ + count > 64) flush();
    // & 63: with 64 pending bits and `count` 0, a shift by 64 would be undefined.
    pending_ |= (value & ((std::uint64_t{1} << count) - 1)) << (pending_bits_ & 63);
    pending_bits_ += count;
  }
  // Appends any 64-bit number: its length in seven bits, then the bits below its highest one. If these are more than
  // 32, the ones above the lowest 32 come first, because put() cannot write all of them at once.
  void put_number(std::uint64_t value) {
    const auto length = static_cast<unsigned>(std::bit_width(value));
    put(length, 7);
    if (length > 33) put(value >> 32, length - 33);
    if (length > 1) put(value, length > 33 ? 32 : length - 1);
  }
  // Pads with zeros to a whole byte.
  ByteVector finish() && {
    pending_bits_ = (pending_bits_ + 7) / 8 * 8;
    flush();
    bytes_.resize(whole_bytes_);
    return std::move(bytes_);
  }

 private:
  // Moves whole bytes to `bytes_`; at most seven bits remain pending.
  void flush() {
    // + 8: store() always writes eight bytes.
    if (bytes_.size() < whole_bytes_ + 8) bytes_.resize(2 * bytes_.size() + 64);
    store(bytes_.data() + whole_bytes_, pending_);
    whole_bytes_ += pending_bits_ / 8;
    pending_ = pending_bits_ < 64 ? pending_ >> (pending_bits_ / 8 * 8) : 0;
    pending_bits_ %= 8;
  }
  ByteVector bytes_;             // its size is the capacity: only the first whole_bytes_ are written
  std::size_t whole_bytes_ = 0;  // written to `bytes_`
  std::uint64_t pending_ = 0;    // bits that are not in `bytes_` yet, the first one lowest
  unsigned pending_bits_ = 0;    // their number
};

// Reads the output of BitWriter. Past the end every bit is zero. Plain data and functions with internal linkage,
// because the block kernels use it in translation units compiled for different processors.
struct BitReader {
  const std::byte* bytes = nullptr;
  std::uint64_t byte_count = 0;
  std::uint64_t bit_index = 0;  // of the next bit; beyond 8 * byte_count after reading past the end
};

// Reads at most 57 bits: they begin within the first byte of an eight-byte word.
static inline std::uint64_t get_bits(BitReader& reader, unsigned count) {
  const std::uint64_t byte = reader.bit_index >> 3;
  std::uint64_t window = 0;
  if (byte + 8 <= reader.byte_count) {
    std::memcpy(&window, reader.bytes + byte, 8);
  } else {
    for (unsigned i = 0; i < 8 && byte + i < reader.byte_count; ++i)
      window |= static_cast<std::uint64_t>(reader.bytes[byte + i]) << (8 * i);
  }
  const std::uint64_t value = (window >> (reader.bit_index & 7)) & ((std::uint64_t{1} << count) - 1);
  reader.bit_index += count;
  return value;
}

// Reads a number that BitWriter::put_number() wrote. If its length is malformed, returns 0 and moves past the end.
static inline std::uint64_t get_number(BitReader& reader) {
  const auto length = static_cast<unsigned>(get_bits(reader, 7));
  if (length > 64) {
    reader.bit_index = ~std::uint64_t{0} >> 1;  // far past the end, but later reads do not overflow
    return 0;
  }
  if (length <= 1) return length;  // 0 and 1 have no bits below the highest one
  const std::uint64_t high = length > 33 ? get_bits(reader, length - 33) << 32 : 0;
  const std::uint64_t low = get_bits(reader, length > 33 ? 32 : length - 1);
  return (std::uint64_t{1} << (length - 1)) | high | low;
}

// Appends bits to memory. It must have room for them and eight more bytes, because put_bits() always stores eight.
// Plain data, like BitReader.
struct BitSink {
  std::byte* bytes = nullptr;
  std::uint64_t whole_bytes = 0;  // written
  std::uint64_t pending = 0;
  unsigned pending_bits = 0;  // below 8
};

// Appends `value`, which has at most `count` bits; `count` is at most 56, because seven more bits may be pending.
static inline void put_bits(BitSink& sink, std::uint64_t value, unsigned count) {
  sink.pending |= value << sink.pending_bits;
  sink.pending_bits += count;
  std::memcpy(sink.bytes + sink.whole_bytes, &sink.pending, 8);
  sink.whole_bytes += sink.pending_bits / 8;
  sink.pending >>= sink.pending_bits & 56;  // by whole bytes: 56 clears the three lowest bits
  sink.pending_bits %= 8;
}

// Whether more bits were read than there are.
static inline bool is_exhausted(const BitReader& reader) { return reader.bit_index > 8 * reader.byte_count; }

}  // namespace echoline::delta
