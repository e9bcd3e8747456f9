// The position of the exponent in a type's bits; internal to this folder. FORMAT.md, "Sparse coding".
#pragma once
#include <cstdint>

#include "delta/tensor.hpp"

namespace echoline::delta {

struct ExponentField {
  unsigned shift = 0;
  std::uint32_t mask = 0;  // zero: not a float, all elements are of class 0
};

inline ExponentField exponent_field(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
    case DType::kF8E4M3Fnuz:
      return {3, 0xf};
    case DType::kF8E5M2:
    case DType::kF8E5M2Fnuz:
      return {2, 0x1f};
    case DType::kF16:
      return {10, 0x1f};
    case DType::kBF16:
      return {7, 0xff};
    case DType::kF32:
      return {23, 0xff};
    case DType::kF64:
      return {52, 0x7ff};
    default:
      return {};
  }
}

inline bool is_float(DType dtype) { return exponent_field(dtype).mask != 0; }

}  // namespace echoline::delta
