// The codec proper: one segment (a run of elements of one tensor) to bytes and back. Internal to this folder; patch.hpp
// is the public door, FORMAT.md has the bytes.
#pragma once
#include <memory>
#include <optional>

#include "base/result.hpp"
#include "delta/bytes.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// Every segment but the last of a tensor has this many elements.
inline constexpr std::uint64_t kSegmentElements = 1u << 22;

// A stream is a byte string, stored as it is or zstd-compressed, whichever is shorter; this is its form in a patch.
// Reads one whose content must have `raw_min` to `raw_max` bytes, without decompressing it.
struct Stream {
  bool compressed = false;
  std::size_t raw_bytes = 0;
  ByteSpan stored;
};
Result<Stream> read_stream(Reader& reader, std::uint64_t raw_min, std::uint64_t raw_max);
// The content; kCorrupt when it does not have exactly the declared size.
Status expand_stream(const Stream& stream, std::span<std::byte> to);

enum class SegmentCoding : std::uint8_t { kUntouched = 0, kSparseRaw = 1, kSparseStep = 2, kDense = 3 };

// A segment as found in a patch; lengths are checked, values are not decoded yet.
struct Segment {
  SegmentCoding coding = SegmentCoding::kUntouched;
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  ByteSpan streams;
};
Result<Segment> read_segment(Reader& reader, DType dtype, std::uint64_t elements);

// Decodes a dense segment into `to`, all of its bytes.
Status decode_dense(const Segment& segment, DType dtype, std::span<std::byte> to);

// What a segment puts in place of old values. Swapping twice restores the old ones.
struct Replacement {
  bool all = false;                      // every element, else those at `positions`
  std::vector<std::uint32_t> positions;  // ascending, within the segment
  ByteVector values;
  void swap_with(std::span<std::byte> segment_bytes, std::size_t element_bytes);
};
// `old` is the present content of the segment.
Result<Replacement> decode_replacement(const Segment& segment, DType dtype, ByteSpan old);

// Encodes segments and streams; keeps its working memory between calls. One per thread.
class SegmentEncoder {
 public:
  explicit SegmentEncoder(int zstd_level);
  ~SegmentEncoder();

  // Appends the shortest coding of `cur`; without `prev` the dense one. Gives the number of changed elements.
  std::uint64_t encode(std::optional<ByteSpan> prev, ByteSpan cur, DType dtype, ByteVector& out);
  // Appends a stream unless it takes more than `bytes_max`.
  bool encode_stream(ByteSpan raw, std::size_t bytes_max, ByteVector& out);

 private:
  std::optional<ByteVector> encode_dense(ByteSpan cur, std::size_t element_bytes, std::size_t bytes_max);
  ByteVector encode_sparse(ByteSpan prev, ByteSpan cur, DType dtype);
  struct Context;
  std::unique_ptr<Context> context_;
  std::vector<std::uint32_t> positions_;
};

}  // namespace echoline::delta
