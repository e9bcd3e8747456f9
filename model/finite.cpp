// Implements check_finite(): counts values by their bits, in parts of tensors on several threads.
#include "model/finite.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/parallel.hpp"

namespace echoline::model {
namespace {

// Values of a tensor, or of a part of one, that are not finite in bf16.
struct NotFiniteValues {
  std::uint64_t count = 0;
  std::uint64_t first_index = 0;  // only if count > 0
};

// Finds the values whose magnitude, as bits, is at least `threshold`. Whole blocks are counted without a branch, so
// that the compiler vectorises them.
template <class Bits>
NotFiniteValues find_large(std::span<const std::byte> bytes, Bits threshold) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  constexpr std::uint64_t kBlockValues = 16'384;
  const auto is_large = [&](std::uint64_t i) {
    Bits value;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    return static_cast<Bits>((value & kMagnitude) >= threshold);
  };
  std::uint64_t count = 0, first = 0;
  for (std::uint64_t begin = 0, end = bytes.size() / sizeof(Bits); begin < end; begin += kBlockValues) {
    const std::uint64_t block_end = std::min(end, begin + kBlockValues);
    Bits in_block = 0;  // cannot overflow, because kBlockValues fits in 16 bits
    for (std::uint64_t i = begin; i < block_end; ++i) in_block = static_cast<Bits>(in_block + is_large(i));
    if (in_block > 0 && count == 0)
      for (first = begin; !is_large(first);) ++first;
    count += in_block;
  }
  return {.count = count, .first_index = first};
}

// Finds NaN, infinite values, and values that become infinite in bf16.
NotFiniteValues find_not_finite(delta::DType type, std::span<const std::byte> bytes) {
  switch (type) {
    case delta::DType::kBF16:
      return find_large<std::uint16_t>(bytes, 0x7f80);  // bits of infinity
    case delta::DType::kF16:
      return find_large<std::uint16_t>(bytes, 0x7c00);  // bits of infinity
    case delta::DType::kF32:
      return find_large<std::uint32_t>(bytes,
                                       0x7f7f8000);  // halfway from bf16's largest value to the next power of two
    case delta::DType::kF64:
      return find_large<std::uint64_t>(bytes, 0x47eff00000000000);  // the same value as for fp32
    default:
      return {};
  }
}

}  // namespace

Status check_finite(const delta::StateView& state, unsigned threads) {
  constexpr std::uint64_t kPartBytes = 4u << 20;  // bytes that a thread checks at a time
  struct Part {
    std::size_t tensor;
    std::uint64_t first_byte;
    NotFiniteValues not_finite;  // indices within the part
  };
  std::vector<Part> parts;
  for (std::size_t tensor = 0; tensor < state.size(); ++tensor)
    for (std::uint64_t first_byte = 0; first_byte < state[tensor].bytes.size(); first_byte += kPartBytes)
      parts.push_back({.tensor = tensor, .first_byte = first_byte, .not_finite = {}});
  for_each_parallel(parts.size(), threads, [&](unsigned, std::size_t i) {
    Part& part = parts[i];
    const delta::TensorView& tensor = state[part.tensor];
    const auto bytes = tensor.bytes.subspan(part.first_byte);
    part.not_finite = find_not_finite(tensor.dtype, bytes.first(std::min<std::size_t>(bytes.size(), kPartBytes)));
  });
  std::size_t affected_tensors = 0, first_index = 0, last_affected = 0;
  std::uint64_t count = 0;  // in the first affected tensor
  const delta::TensorView* first_affected = nullptr;
  for (const Part& part : parts) {
    if (part.not_finite.count == 0) continue;
    const delta::TensorView& tensor = state[part.tensor];
    if (affected_tensors == 0 || last_affected != part.tensor) ++affected_tensors;
    last_affected = part.tensor;
    if (first_affected == nullptr) {
      first_affected = &tensor;
      first_index = part.first_byte / delta::dtype_bytes(tensor.dtype) + part.not_finite.first_index;
    }
    if (first_affected == &tensor) count += part.not_finite.count;
  }
  if (first_affected == nullptr) return ok();
  return fail(
      Code::kInvalid, "check policy",
      "tensor '{}' holds {} values that are NaN, infinite or too large for bf16, the first at index {} of {}{}; "
      "the values of a policy are finite: has training diverged?",
      first_affected->name, count, first_index,
      first_affected->bytes.size() / delta::dtype_bytes(first_affected->dtype),
      affected_tensors > 1 ? fmt::format(", and {} more tensors have such values", affected_tensors - 1) : "");
}

}  // namespace echoline::model
