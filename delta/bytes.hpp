// Little-endian writing and bounds-checked reading of byte strings; internal to this folder.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "delta/raw_memory.hpp"

namespace echoline::delta {

static_assert(std::endian::native == std::endian::little, "tensors and patches are little endian, as is the host");

using ByteVector = std::vector<std::byte, PoolAllocator<std::byte>>;
using ByteSpan = std::span<const std::byte>;

inline ByteSpan as_byte_span(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <class Vector>  // of bytes
void put_bytes(Vector& out, ByteSpan bytes) {
  if (bytes.empty()) return;
  const std::size_t old_size = out.size();
  out.resize(old_size + bytes.size());
  std::memcpy(out.data() + old_size, bytes.data(), bytes.size());
}

template <class T>
void put(ByteVector& out, T value) {
  put_bytes(out, std::as_bytes(std::span(&value, 1)));
}

// Calls f with a zero of the unsigned integer type of this size (1, 2, 4 or 8), so that a generic f can name the type.
template <class F>
auto with_element_type(std::size_t element_bytes, F&& f) {
  switch (element_bytes) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

// LEB128: seven bits per byte, low bits first; the high bit is set on all bytes but the last.
inline void put_varint(ByteVector& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<std::byte>(value | 0x80));
  out.push_back(static_cast<std::byte>(value));
}

// Reads from the front. After the first read past the end, or the first malformed varint, failed() is true and every
// read returns zero or nothing. So it is enough to check failed() once after reading a record, before using its values.
class ByteReader {
 public:
  explicit ByteReader(ByteSpan bytes) : remaining_(bytes) {}
  bool failed() const { return failed_; }
  ByteSpan remaining() const { return remaining_; }

  ByteSpan read_bytes(std::uint64_t count) {
    failed_ = failed_ || count > remaining_.size();
    if (failed_) return {};
    const ByteSpan front = remaining_.first(static_cast<std::size_t>(count));
    remaining_ = remaining_.subspan(front.size());
    return front;
  }
  template <class T>
  T read_number() {
    const ByteSpan front = read_bytes(sizeof(T));
    return front.empty() ? T{} : load<T>(front.data());
  }
  std::uint64_t read_varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = read_number<std::uint8_t>();
      if (failed_) return 0;
      if (shift == 63 && byte > 1) break;  // more than 64 bits
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    failed_ = true;
    return 0;
  }

 private:
  ByteSpan remaining_;
  bool failed_ = false;
};

}  // namespace echoline::delta
