// Conversion to bf16 on the host.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "delta/tensor.hpp"

namespace echoline::model {

// The bits of a finite number rounded to bf16, to nearest with ties to even.
inline std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Copies the values of a tensor, of type BF16 or F32, as bf16. `to` has 2 bytes for each value.
inline void copy_as_bf16(const delta::TensorView& from, std::span<std::byte> to) {
  if (from.dtype == delta::DType::kBF16) {
    std::memcpy(to.data(), from.bytes.data(), to.size());
    return;
  }
  for (std::size_t byte = 0; byte < to.size(); byte += 2) {
    float value = 0;
    std::memcpy(&value, from.bytes.data() + 2 * byte, sizeof value);  // an fp32 value has twice the bytes
    const std::uint16_t rounded = to_bf16(value);
    std::memcpy(to.data() + byte, &rounded, sizeof rounded);
  }
}

}  // namespace echoline::model
