// Numbers that cannot be predicted: for keys, ids and secret seeds. base/random.hpp has draws that a seed repeats.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <random>
#include <string>

namespace echoline {

inline std::uint64_t random_bits64() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

// A text of 8 lower-case hexadecimal digits for each of `words`.
inline std::string random_hex(int words) {
  std::random_device device;
  std::string text;
  for (int i = 0; i < words; ++i) text += fmt::format("{:08x}", device());
  return text;
}

}  // namespace echoline
