// Bit strings, least significant bit first; internal to this folder.
#pragma once
#include <bit>
#include <cstdint>
#include <utility>

#include "delta/bytes.hpp"

namespace echoline::delta {

class BitWriter {
 public:
  // The low `count` bits of `value`, at most 57.
  void put(std::uint64_t value, unsigned count) {
    if (filled_ + count > 64) flush();
    pending_ |= (value & ((std::uint64_t{1} << count) - 1)) << (filled_ & 63);
    filled_ += count;
  }
  // Any 64-bit number: its length in seven bits, then the bits below its highest one.
  void put_number(std::uint64_t value) {
    const auto length = static_cast<unsigned>(std::bit_width(value));
    put(length, 7);
    if (length > 33) put(value >> 32, length - 33);
    if (length > 1) put(value, length > 33 ? 32 : length - 1);
  }
  // Pads with zeros to a whole byte.
  ByteVector finish() && {
    filled_ = (filled_ + 7) / 8 * 8;
    flush();
    bytes_.resize(used_);
    return std::move(bytes_);
  }

 private:
  // Moves whole bytes to `bytes_`; at most seven bits remain pending.
  void flush() {
    if (bytes_.size() < used_ + 8) bytes_.resize(2 * bytes_.size() + 64);
    store(bytes_.data() + used_, pending_);
    used_ += filled_ / 8;
    pending_ = filled_ < 64 ? pending_ >> (filled_ / 8 * 8) : 0;
    filled_ %= 8;
  }
  ByteVector bytes_;
  std::size_t used_ = 0;
  std::uint64_t pending_ = 0;
  unsigned filled_ = 0;
};

// Reads the output of BitWriter. Past the end every bit is zero. Plain data and functions with internal linkage,
// because the block kernels use it in translation units compiled for different processors.
struct BitReader {
  const std::byte* bytes = nullptr;
  std::uint64_t byte_count = 0;
  std::uint64_t at = 0;  // bit; beyond 8 * byte_count after reading past the end
};

// At most 57 bits.
static inline std::uint64_t get_bits(BitReader& reader, unsigned count) {
  const std::uint64_t byte = reader.at >> 3;
  std::uint64_t window = 0;
  if (byte + 8 <= reader.byte_count) {
    std::memcpy(&window, reader.bytes + byte, 8);
  } else {
    for (unsigned i = 0; i < 8 && byte + i < reader.byte_count; ++i)
      window |= static_cast<std::uint64_t>(reader.bytes[byte + i]) << (8 * i);
  }
  const std::uint64_t value = (window >> (reader.at & 7)) & ((std::uint64_t{1} << count) - 1);
  reader.at += count;
  return value;
}

static inline std::uint64_t get_number(BitReader& reader) {
  const auto length = static_cast<unsigned>(get_bits(reader, 7));
  if (length > 64) return reader.at = ~std::uint64_t{0} >> 1, 0;
  if (length <= 1) return length;
  const std::uint64_t high = length > 33 ? get_bits(reader, length - 33) << 32 : 0;
  const std::uint64_t low = get_bits(reader, length > 33 ? 32 : length - 1);
  return (std::uint64_t{1} << (length - 1)) | high | low;
}

// Appends bits to memory that has room for them and eight more bytes. Plain data, like BitReader.
struct BitSink {
  std::byte* bytes = nullptr;
  std::uint64_t at = 0;  // whole bytes written
  std::uint64_t pending = 0;
  unsigned filled = 0;  // bits of `pending`, below 8
};

// `value` has at most `count` bits; `count` is at most 56.
static inline void put_bits(BitSink& sink, std::uint64_t value, unsigned count) {
  sink.pending |= value << sink.filled;
  sink.filled += count;
  std::memcpy(sink.bytes + sink.at, &sink.pending, 8);
  sink.at += sink.filled / 8;
  sink.pending >>= sink.filled & 56;
  sink.filled %= 8;
}

static inline bool exhausted(const BitReader& reader) { return reader.at > 8 * reader.byte_count; }

}  // namespace echoline::delta
