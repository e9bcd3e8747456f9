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

// Divides the content into a group of tensors. The segment must change it in the same way as the undivided content.
void check_group(SegmentDecoder& decoder, const Segment& segment, std::span<const std::byte> old, DType dtype) {
  StateView tensors;
  for (std::size_t begin = 0, bytes = 8; begin < old.size(); begin += bytes, bytes = 3 * bytes + 8)
    tensors.push_back(
        {.name = "", .dtype = dtype, .shape = {}, .bytes = old.subspan(begin, std::min(bytes, old.size() - begin))});
  Replacement single, group;
  const bool decodes = static_cast<bool>(decoder.decode(segment, old, dtype, single, nullptr));
  std::vector<std::byte> expected(old.begin(), old.end());
  if (decodes) write_values(single.whole, single.positions, single.values, dtype_bytes(dtype), expected);
  bool is_same = true;
  const auto compare = [&](const GroupedTensor& tensor) {
    const auto begin = static_cast<std::size_t>(tensors[tensor.index].bytes.data() - old.data());
    is_same = is_same && std::ranges::equal(tensor.content, std::span(expected).subspan(begin, tensor.content.size()));
  };
  require(static_cast<bool>(decoder.decode_group(segment, tensors, group, compare)) == decodes);
  if (!decodes) return;
  require(is_same && group.whole == single.whole);
  require(std::ranges::equal(group.positions, single.positions) && std::ranges::equal(group.values, single.values));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::vector<std::byte> old = old_content();
  static SegmentDecoder decoder;
  if (size == 0) return 0;
  const DType dtype = kAllDTypes[data[0] % kAllDTypes.size()];
  const auto segment = read_segment(std::as_bytes(std::span(data + 1, size - 1)), /*is_group=*/false);
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
