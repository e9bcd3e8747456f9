// Little-endian integers in byte buffers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace echoline::overlay {

template <class T>
void put_le(std::byte* to, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

template <class T>
T get_le(const std::byte* from) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(from[i]) << (8 * i));
  return value;
}

}  // namespace echoline::overlay
