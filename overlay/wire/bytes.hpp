// Little-endian integers in byte buffers, and arrays as the strings of protobuf.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

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

// The array's bytes as a string.
template <class Array>
std::string bytes_as_string(const Array& array) {
  return std::string(reinterpret_cast<const char*>(array.data()), array.size());
}

// Copies the string's bytes into the array. Returns false if the sizes differ.
template <class Array>
bool copy_exact(const std::string& from, Array& to) {
  if (from.size() != to.size()) return false;
  std::memcpy(to.data(), from.data(), to.size());
  return true;
}

}  // namespace echoline::overlay
