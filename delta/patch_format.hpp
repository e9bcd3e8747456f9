// Patches as bytes: frames, header, tensor table and trailer. Internal to this folder; FORMAT.md, "Patches".
#pragma once
#include <vector>

#include "delta/patch.hpp"
#include "delta/segment.hpp"

namespace echoline::delta {

// Writes the frames of a patch. One thread at a time.
class PatchWriter {
 public:
  explicit PatchWriter(const PatchSink& sink) : sink_(sink) {}
  // Magic and header frame with the table of `tensors`, which are canonical; their bytes are not read.
  Status begin(PatchKind kind, const StateView& tensors, int table_zstd_level);
  // Segments in ascending order of (tensor, index).
  Status add(const Segment& segment);
  // Trailer; `stats` has base, result, state_bytes and elements set and gets the rest.
  Status finish(PatchStats& stats);

 private:
  // A frame's body is put between the two.
  void begin_frame(std::uint8_t type);
  Status end_frame();
  const PatchSink& sink_;
  ByteVector frame_, checksums_;
  std::size_t frame_at_ = 0;  // where the present frame begins in `frame_`
  std::uint64_t bytes_ = 0;
  std::uint64_t segments_ = 0;
  std::uint64_t changed_ = 0;
};

// A patch with every length walked and every checksum verified; the only surprises left are inside layers' payloads.
// Views point into the patch.
struct ParsedPatch {
  PatchInfo info;
  std::vector<Segment> segments;  // ascending
};
Result<ParsedPatch> parse_patch(ByteSpan patch, const DecodeOptions& options);

// The same, a frame after the other as they arrive.
class PatchParser {
 public:
  explicit PatchParser(const DecodeOptions& options) : options_(options) {}
  // `bytes` begin where the frames of the last call ended. Takes all frames that are whole, up to the trailer; returns
  // their size. Segments are views into `bytes`. kCorrupt; nothing may be taken after that.
  Result<std::size_t> take(ByteSpan bytes, std::vector<Segment>& segments);
  bool begun() const { return begun_; }  // the header was there: kind and tensors are known
  bool ended() const { return ended_; }  // the trailer was there, and promises what has come
  // kCorrupt, with what is missing, unless it ended with the last byte of `size`.
  Status check_whole(std::size_t size) const;
  PatchInfo& info() { return info_; }

 private:
  Status add_header(ByteSpan body);
  Result<Segment> add_segment(ByteSpan body, bool group);
  Status check_trailer(ByteSpan body);

  DecodeOptions options_;
  PatchInfo info_;
  ByteVector checksums_;
  std::uint64_t taken_ = 0, segments_ = 0;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> last_;  // last tensor and index of the last segment
  bool magic_ = false, begun_ = false, ended_ = false;
};

// The part of a tensor that a segment covers.
struct SegmentRange {
  std::uint64_t first_byte = 0;
  std::uint64_t byte_count = 0;
};
SegmentRange segment_range(std::uint64_t tensor_bytes, std::uint64_t index);
std::uint64_t segment_count(std::uint64_t tensor_bytes);

// kInvalid names the first tensor that is not the same in name, type and shape.
Status check_tensors_match(const PatchInfo& info, const StateView& state);

// Runs `f`; an allocation that fails becomes kExhausted.
template <class F>
auto guarded(std::string_view operation, F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(Code::kExhausted, operation, "out of memory");
  }
}

}  // namespace echoline::delta
