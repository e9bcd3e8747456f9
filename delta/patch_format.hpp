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
  Status begin(PatchKind kind, const StateView& tensors, int zstd_level);
  // Segments in ascending order of (tensor, index).
  Status add(const Segment& segment);
  // Trailer; `stats` has base, result, state_bytes and elements set and gets the rest.
  Status finish(PatchStats& stats);

 private:
  Status put_frame(std::uint8_t type, ByteSpan body);
  const PatchSink& sink_;
  ByteVector frame_, body_, checksums_;
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
