// Patches as bytes: frames, header, tensor table and trailer. A frame is a typed, checksummed part of a patch. Internal
// to this folder; FORMAT.md, "Patches".
#pragma once
#include <vector>

#include "delta/patch.hpp"
#include "delta/segment.hpp"

namespace echoline::delta {

// Writes the frames of a patch. One thread at a time.
class PatchWriter {
 public:
  explicit PatchWriter(const PatchSink& sink) : sink_(sink) {}
  // Writes the magic and the header frame with the table of `tensors`, which are in canonical order; does not read
  // their bytes.
  Status begin(PatchKind kind, const StateView& tensors, int table_zstd_level);
  // Add segments in ascending order of (tensor, index).
  Status add(const Segment& segment);
  // Writes the trailer. On entry `stats` has base, result, state_bytes and elements; the rest is set here.
  Status finish(PatchStats& stats);

 private:
  // Write a frame's body between these two calls.
  void begin_frame(std::uint8_t type);
  Status end_frame();
  const PatchSink& sink_;
  ByteVector frame_;             // the frame being written; the patch's magic precedes the first one
  ByteVector checksums_;         // of all frames so far
  std::size_t frame_begin_ = 0;  // of the current frame in `frame_`, after the magic
  std::uint64_t patch_bytes_ = 0;
  std::uint64_t segment_count_ = 0;
  std::uint64_t changed_ = 0;  // elements
};

// A patch whose lengths and checksums are verified. The payloads of its segments are not decoded yet and may still be
// malformed. Views point into the patch.
struct ParsedPatch {
  PatchInfo info;
  std::vector<Segment> segments;  // ascending
};
Result<ParsedPatch> parse_patch(ByteSpan patch, const DecodeOptions& options);

// Parses a patch frame by frame while it arrives.
class PatchParser {
 public:
  explicit PatchParser(const DecodeOptions& options) : options_(options) {}
  // `bytes` begin where the frames of the last call ended. Takes all complete frames, up to the trailer, and returns
  // their size. Segments are views into `bytes`. After kCorrupt, do not call it again.
  Result<std::size_t> parse(ByteSpan bytes, std::vector<Segment>& segments);
  bool has_header() const { return header_read_; }    // kind and tensors are known
  bool has_trailer() const { return trailer_read_; }  // the content is complete and matches it
  // kCorrupt unless the patch ended with the last of `patch_bytes` bytes; the message tells what is missing.
  Status check_complete(std::size_t patch_bytes) const;
  PatchInfo& info() { return info_; }

 private:
  Status add_header(ByteSpan body);
  // `is_group`: the segment holds several whole tensors instead of a part of one.
  Result<Segment> add_segment(ByteSpan body, bool is_group);
  Status check_trailer(ByteSpan body);

  DecodeOptions options_;
  PatchInfo info_;
  ByteVector checksums_;  // of all frames so far
  std::uint64_t parsed_bytes_ = 0, segment_count_ = 0;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> last_place_;  // tensor and index of the last segment
  bool magic_read_ = false, header_read_ = false, trailer_read_ = false;
};

// The part of a tensor that its segment number `index` covers; `index` is below segment_count().
struct SegmentRange {
  std::uint64_t first_byte = 0;
  std::uint64_t byte_count = 0;
};
SegmentRange segment_range(std::uint64_t tensor_bytes, std::uint64_t index);
std::uint64_t segment_count(std::uint64_t tensor_bytes);

// kInvalid names the first tensor that differs in name, type or shape.
Status check_tensors_match(const PatchInfo& info, const StateView& state);

// Runs `f`; a failed allocation becomes kExhausted.
template <class F>
auto catch_out_of_memory(std::string_view operation, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(Code::kExhausted, operation, "out of memory");
  }
}

}  // namespace echoline::delta
