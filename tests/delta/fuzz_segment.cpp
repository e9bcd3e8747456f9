// Fuzz target: a byte for the element type, then the body of a segment frame. Every decoded position must lie within
// the segment.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "delta/digest.hpp"
#include "delta/segment.hpp"

using namespace echoline::delta;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

// Two leaves of values that fall into many classes.
std::vector<std::byte> old_content() {
  std::vector<std::byte> bytes(kLeafBytes + 4096);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i / 7 + i / 256);
  return bytes;
}

// As a group of tensors the same content becomes the same.
void check_group(SegmentDecoder& decoder, const Segment& segment, std::span<const std::byte> old, DType dtype) {
  const std::size_t size = dtype_bytes(dtype);
  StateView tensors;
  for (std::size_t at = 0, bytes = 8; at < old.size(); at += bytes, bytes = 3 * bytes + 8)
    tensors.push_back({"", dtype, {}, old.subspan(at, std::min(bytes, old.size() - at))});
  Replacement whole, group;
  const bool decodes = static_cast<bool>(decoder.decode(segment, old, dtype, whole, nullptr));
  std::vector<std::byte> expected(old.begin(), old.end());
  if (decodes) write_values(whole.whole, whole.positions, whole.values, size, expected);
  bool same = true;
  const auto compare = [&](const GroupedTensor& tensor) {
    const auto begin = static_cast<std::size_t>(tensors[tensor.number].bytes.data() - old.data());
    same = same && std::ranges::equal(tensor.content, std::span(expected).subspan(begin, tensor.content.size()));
  };
  require(static_cast<bool>(decoder.decode_group(segment, tensors, group, compare)) == decodes);
  if (!decodes) return;
  require(same && group.whole == whole.whole);
  require(std::ranges::equal(group.positions, whole.positions) && std::ranges::equal(group.values, whole.values));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<std::byte> old = old_content();
  static SegmentDecoder decoder;
  if (size == 0) return 0;
  const DType dtype = kAllDTypes[data[0] % kAllDTypes.size()];
  const auto segment = read_segment(std::as_bytes(std::span(data + 1, size - 1)));
  if (!segment) return 0;
  check_group(decoder, *segment, old, dtype);
  std::vector<Digest> leaves(leaf_count(old.size()));
  Replacement replacement;
  if (!decoder.decode(*segment, old, dtype, replacement, leaves.data())) return 0;
  const std::size_t element_bytes = dtype_bytes(dtype);
  if (replacement.whole) {
    require(replacement.values.size() == old.size());
    return 0;
  }
  require(replacement.values.size() == replacement.positions.size() * element_bytes);
  for (const std::uint32_t position : replacement.positions) require(position < old.size() / element_bytes);
  std::vector<std::byte> result = old;
  write_values(false, replacement.positions, replacement.values, element_bytes, result);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto leaf = std::span(result).subspan(i * kLeafBytes, std::min(kLeafBytes, result.size() - i * kLeafBytes));
    require(leaves[i] == Digest{} || leaves[i] == digest_bytes(leaf));
  }
  return 0;
}
