#include "model/finite.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/parallel.hpp"

namespace echoline::model {
namespace {

// The number of values whose magnitude, as bits, is at least `least`, and the index of the first. Whole blocks are
// counted without a branch, so that the compiler vectorises them.
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

std::pair<std::uint64_t, std::uint64_t> count_large(delta::DType type, std::span<const std::byte> bytes) {
  switch (type) {
    case delta::DType::kBF16:
      return count_from<std::uint16_t>(bytes, 0x7f80);
    case delta::DType::kF16:
      return count_from<std::uint16_t>(bytes, 0x7c00);
    case delta::DType::kF32:
      return count_from<std::uint32_t>(bytes, 0x7f7f8000);  // halfway from bf16's largest value to the next
    case delta::DType::kF64:
      return count_from<std::uint64_t>(bytes, 0x47eff00000000000);
    default:
      return {};
  }
}

}  // namespace

Status check_finite(const delta::StateView& state, unsigned threads) {
  constexpr std::uint64_t kPartBytes = 4u << 20;
  struct Part {
    std::size_t tensor;
    std::uint64_t first_byte;
    std::pair<std::uint64_t, std::uint64_t> found;  // count, index within the part
  };
  std::vector<Part> parts;
  for (std::size_t t = 0; t < state.size(); ++t)
    for (std::uint64_t at = 0; at < state[t].bytes.size(); at += kPartBytes) parts.push_back({t, at, {}});
  for_each_parallel(parts.size(), threads, [&](unsigned, std::size_t i) {
    Part& part = parts[i];
    const delta::TensorView& tensor = state[part.tensor];
    const auto bytes = tensor.bytes.subspan(part.first_byte);
    part.found = count_large(tensor.dtype, bytes.first(std::min<std::size_t>(bytes.size(), kPartBytes)));
  });
  std::size_t tensors = 0, first_index = 0, last = 0;
  std::uint64_t count = 0;  // in the first such tensor
  const delta::TensorView* first = nullptr;
  for (const Part& part : parts) {
    if (part.found.first == 0) continue;
    const delta::TensorView& tensor = state[part.tensor];
    if (tensors == 0 || last != part.tensor) ++tensors;
    last = part.tensor;
    if (first == nullptr) {
      first = &tensor;
      first_index = part.first_byte / delta::dtype_bytes(tensor.dtype) + part.found.second;
    }
    if (first == &tensor) count += part.found.first;
  }
  if (first == nullptr) return ok();
  return fail(
      Code::kInvalid, "check policy",
      "tensor '{}' holds {} values that are NaN, infinite or too large for bf16, the first at index {} of {}{}; "
      "the values of a policy are finite: has training diverged?",
      first->name, count, first_index, first->bytes.size() / delta::dtype_bytes(first->dtype),
      tensors > 1 ? fmt::format(", and {} more tensors have such values", tensors - 1) : "");
}

}  // namespace echoline::model
