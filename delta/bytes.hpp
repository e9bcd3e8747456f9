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
  const std::size_t at = out.size();
  out.resize(at + bytes.size());
  std::memcpy(out.data() + at, bytes.data(), bytes.size());
}

template <class T>
void put(ByteVector& out, T value) {
  put_bytes(out, std::as_bytes(std::span(&value, 1)));
}

// Calls f with a value of the unsigned integer type of this element size.
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
// read returns zero or nothing. So check once per unit, before using its values.
class Reader {
 public:
  explicit Reader(ByteSpan bytes) : rest_(bytes) {}
  bool failed() const { return failed_; }
  ByteSpan rest() const { return rest_; }

  ByteSpan bytes(std::uint64_t count) {
    if (failed_ || count > rest_.size()) return failed_ = true, ByteSpan{};
    const ByteSpan taken = rest_.first(static_cast<std::size_t>(count));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  template <class T>
  T number() {
    const ByteSpan taken = bytes(sizeof(T));
    return taken.empty() ? T{} : load<T>(taken.data());
  }
  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = number<std::uint8_t>();
      if (failed_) return 0;
      if (shift == 63 && byte > 1) break;
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    failed_ = true;
    return 0;
  }

 private:
  ByteSpan rest_;
  bool failed_ = false;
};

}  // namespace echoline::delta
