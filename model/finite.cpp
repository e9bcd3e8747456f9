#include "model/finite.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace echoline::model {
namespace {

// Values whose magnitude, as bits, is at least `least`: how many there are, and the index of the first. Whole blocks
// are counted without a branch, so the compiler vectorises them.
template <class Bits>
std::pair<std::uint64_t, std::uint64_t> count_from(std::span<const std::byte> bytes, Bits least) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  constexpr std::uint64_t kBlock = 16'384;
  const auto large = [&](std::uint64_t i) {
    Bits value;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    return static_cast<Bits>((value & kMagnitude) >= least);
  };
  std::uint64_t count = 0, first = 0;
  for (std::uint64_t begin = 0, end = bytes.size() / sizeof(Bits); begin < end; begin += kBlock) {
    const std::uint64_t block_end = std::min(end, begin + kBlock);
    Bits found = 0;
    for (std::uint64_t i = begin; i < block_end; ++i) found = static_cast<Bits>(found + large(i));
    if (found > 0 && count == 0)
      for (first = begin; !large(first);) ++first;
    count += found;
  }
  return {count, first};
}

}  // namespace

Status check_finite(const delta::StateView& state) {
  std::optional<std::string> text;
  std::size_t tensors = 0;
  for (const delta::TensorView& tensor : state) {
    std::pair<std::uint64_t, std::uint64_t> found;
    switch (tensor.dtype) {
      case delta::DType::kBF16:
        found = count_from<std::uint16_t>(tensor.bytes, 0x7f80);
        break;
      case delta::DType::kF16:
        found = count_from<std::uint16_t>(tensor.bytes, 0x7c00);
        break;
      case delta::DType::kF32:
        found = count_from<std::uint32_t>(tensor.bytes, 0x7f7f8000);  // half way from bf16's largest value to the next
        break;
      case delta::DType::kF64:
        found = count_from<std::uint64_t>(tensor.bytes, 0x47eff00000000000);
        break;
      default:
        continue;
    }
    if (found.first == 0 || ++tensors > 1) continue;
    text = fmt::format(
        "tensor '{}' holds {} values that are NaN, infinite or too large for bf16, the first at index {} of {}",
        tensor.name, found.first, found.second, tensor.bytes.size() / delta::dtype_bytes(tensor.dtype));
  }
  if (!text) return ok();
  return fail(Code::kInvalid, "check policy", "{}{}; the values of a policy are finite: has training diverged?", *text,
              tensors > 1 ? fmt::format(", and {} more tensors hold some", tensors - 1) : "");
}

}  // namespace echoline::model
