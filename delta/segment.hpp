// Segments: parts of a tensor that are coded, checked and decoded independently of each other. A group is a segment of
// several small tensors. A fold of several deltas has a layer for each of them. Internal to this folder; patch.hpp is
// the public interface, FORMAT.md defines the bytes.
#pragma once
#include <optional>
#include <vector>

#include "delta/block.hpp"
#include "delta/dense.hpp"
#include "delta/raw_memory.hpp"
#include "delta/sparse.hpp"

namespace echoline::delta {

// The size of every segment of a tensor but the last, which may be shorter; a multiple of the leaf size (digest.hpp).
inline constexpr std::uint64_t kSegmentBytes = 8u << 20;
inline constexpr std::uint64_t kLayersMax = 4096;  // of one segment; a limit of the format

// kSparseOld is the sparse coding of version 3 of the format. This program reads it, but does not write it.
enum class LayerCoding : std::uint8_t { kSparseOld = 1, kDense = 2, kSparse = 3 };

// One delta's change to a segment, as stored in a patch.
struct Layer {
  LayerCoding coding = LayerCoding::kSparse;
  std::uint64_t changed = 0;     // elements
  std::uint64_t bound_bits = 0;  // entropy of the change in the coder's model, for reports
  ByteSpan payload;
};

// A segment's head and layers; payloads are decoded later.
struct Segment {
  std::uint64_t tensor = 0;
  std::uint64_t index = 0;    // within the tensor
  std::vector<Layer> layers;  // applied in order
  std::uint64_t tensors = 1;  // number of tensors; above one: a group, whole tensors from `tensor` on
};
// Adjacent tensors of a type with up to kGroupedBytes each form groups of up to kSegmentBytes.
inline constexpr std::uint64_t kGroupedBytes = 1u << 17;
// Checks everything but the payloads. `body`: the content of a segment's or group's frame.
Result<Segment> read_segment(ByteSpan body, bool is_group);
void write_segment(const Segment& segment, ByteVector& out);

// Encodes segments. Use one per thread.
class SegmentEncoder {
 public:
  // The level is only for encode_stream() of DenseEncoder, which segments do not use.
  explicit SegmentEncoder(int table_zstd_level) : dense_(table_zstd_level) {}
  // Returns the shortest layer that turns `prev` into `cur`; absent if they are equal. Its payload is valid until the
  // next call. `leaf_read` and `entropy` as in SparseEncoder::encode().
  std::optional<Layer> encode(const Content& prev, const Content& cur, const SegmentPlace& place,
                              const LeafRead& leaf_read, EntropyCounter* entropy);
  // Returns a dense layer with all of `cur`, for snapshots. Its payload is valid until the next call.
  Layer encode_whole(ByteSpan cur, DType dtype);

 private:
  SparseEncoder sparse_;
  DenseEncoder dense_;
  ByteVector sparse_bytes_, dense_bytes_;
  RawVector<std::byte> gathered_;  // content of several pieces, made contiguous
};

// The new content of a segment: all bytes, or some elements.
struct Replacement {
  bool whole = false;
  RawVector<std::uint32_t> positions;  // elements of the segment, ascending
  RawVector<std::byte> values;
};

// Writes a replacement's values into a segment's memory.
void write_values(bool whole, std::span<const std::uint32_t> positions, ByteSpan values, std::size_t element_bytes,
                  std::span<std::byte> segment);

// A tensor of a group that may have changed.
struct GroupedTensor {
  std::size_t index = 0;             // within the group
  std::size_t first = 0, count = 0;  // its elements among those of the replacement
  ByteSpan content;                  // its new content; valid during the call
};
using TensorDone = std::function<void(const GroupedTensor&)>;

// Decodes segments. Use one per thread.
class SegmentDecoder {
 public:
  // Decodes all layers on top of `old`, which is not changed. `new_leaves`, unless null, receives the digests of
  // changed leaves; its other entries are not touched.
  Status decode(const Segment& segment, ByteSpan old, DType dtype, Replacement& out, Digest* new_leaves);
  // Decodes a group on top of its `tensors`, which are not changed. Elements are numbered over the group. Calls `done`
  // for the tensors that may have changed, in order; the content is wrong if an error follows.
  Status decode_group(const Segment& segment, std::span<const TensorView> tensors, Replacement& out,
                      const TensorDone& done);

 private:
  Status decode_layers(const Segment& segment, ByteSpan old, DType dtype, Replacement& out, Digest* new_leaves);
  // Receives new content of a group: `content` ends after the first `complete_bytes` of the group.
  using GroupContent = std::function<void(std::size_t complete_bytes, ByteSpan content)>;
  // A replacement is begun, filled leaf by leaf, and ended.
  void begin_replacement(std::uint64_t elements, std::uint64_t changed, std::size_t element_bytes, Replacement& out);
  bool add_changes(ByteSpan before, ByteSpan now, std::size_t first_byte, std::size_t element_bytes, Replacement& out);
  void end_replacement(std::size_t element_bytes, Replacement& out) const;
  Status decode_copied_group(const Segment& segment, const Content& old, DType dtype, Replacement& out,
                             const GroupContent& on_content);
  SparseDecoder sparse_;
  std::size_t replaced_elements_ = 0;  // in the current replacement
  ByteVector folded_content_;          // content after the layers decoded so far
  RawVector<std::byte> window_;        // part of a group's new content
};

}  // namespace echoline::delta
