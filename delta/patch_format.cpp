// Writes and parses the frames of a patch; patch_writer.cpp and patch_reader.cpp call it.
#include "delta/patch_format.hpp"

#include <algorithm>

#include "delta/digest.hpp"

namespace echoline::delta {
namespace {

constexpr std::string_view kMagic = "ECHOPTCH";
constexpr std::uint16_t kFormatVersion = 4, kOldestVersion = 3;
constexpr std::uint8_t kHeaderFrame = 'H', kSegmentFrame = 'S', kGroupFrame = 'G', kTrailerFrame = 'T';
constexpr std::size_t kFrameHeadBytes = 5;  // type, and length of the body
constexpr std::size_t kChecksumBytes = 8;   // of a 16-byte digest; enough against accidental damage
constexpr std::uint64_t kBoundBitsMax = std::uint64_t{1} << 40;  // larger values are cut; sums cannot overflow

Error corrupt(std::string_view defect) { return fail(Code::kCorrupt, "read patch", "{}", defect); }

// The tensor table: name, type and shape of each tensor.
ByteVector encode_table(const StateView& state) {
  ByteVector table;
  for (const TensorView& tensor : state) {
    put_varint(table, tensor.name.size());
    put_bytes(table, as_byte_span(tensor.name));
    put(table, static_cast<std::uint8_t>(tensor.dtype));
    put(table, static_cast<std::uint8_t>(tensor.shape.size()));
    for (const std::int64_t dim : tensor.shape) put_varint(table, static_cast<std::uint64_t>(dim));
  }
  return table;
}

// A part of a patch: header, segment, group or trailer.
struct Frame {
  std::uint8_t type = 0;
  ByteSpan body;
  ByteSpan checksum;
};

// Reads the next frame; absent if it is incomplete. `position`: of the frame in the patch, in bytes.
Result<std::optional<Frame>> read_frame(ByteReader& reader, std::uint64_t position) {
  const ByteSpan start = reader.remaining();
  Frame frame;
  frame.type = reader.read_number<std::uint8_t>();
  frame.body = reader.read_bytes(reader.read_number<std::uint32_t>());
  const std::size_t checked_bytes = start.size() - reader.remaining().size();
  frame.checksum = reader.read_bytes(kChecksumBytes);
  if (reader.failed()) return std::optional<Frame>();
  const Digest sum = digest_bytes(start.first(checked_bytes));
  if (!std::equal(frame.checksum.begin(), frame.checksum.end(), sum.bytes.begin()))
    return corrupt(
        fmt::format("the checksum of the frame that begins at byte {} does not match: it was damaged; fetch "
                    "it again",
                    position));
  return std::optional(frame);
}

// Reads a tensor's entry as encode_table() writes it.
Result<PatchTensor> parse_table_entry(ByteReader& reader) {
  PatchTensor tensor;
  const std::uint64_t name_bytes = reader.read_varint();
  if (name_bytes > kNameBytesMax) return corrupt("a tensor name is too long");
  const ByteSpan name = reader.read_bytes(name_bytes);
  tensor.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  const auto dtype = reader.read_number<std::uint8_t>();
  const auto rank = reader.read_number<std::uint8_t>();
  if (reader.failed() || dtype >= kAllDTypes.size() || rank > kRankMax)
    return corrupt("the tensor table is cut short or has an unknown element type or rank");
  tensor.dtype = static_cast<DType>(dtype);
  // A dimension above int64 becomes negative, which tensor_bytes() refuses.
  for (unsigned i = 0; i < rank; ++i) tensor.shape.push_back(static_cast<std::int64_t>(reader.read_varint()));
  if (reader.failed()) return corrupt("the tensor table is cut short");
  const auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
  if (!bytes) return corrupt(fmt::format("tensor '{}': {}", tensor.name, bytes.error().detail));
  tensor.elements = *bytes / dtype_bytes(tensor.dtype);
  return tensor;
}

}  // namespace

std::uint64_t segment_count(std::uint64_t tensor_bytes) { return (tensor_bytes + kSegmentBytes - 1) / kSegmentBytes; }

SegmentRange segment_range(std::uint64_t tensor_bytes, std::uint64_t index) {
  const std::uint64_t first_byte = index * kSegmentBytes;
  return {.first_byte = first_byte, .byte_count = std::min(kSegmentBytes, tensor_bytes - first_byte)};
}

void PatchWriter::begin_frame(std::uint8_t type) {
  frame_begin_ = frame_.size();
  put(frame_, type);
  put(frame_, std::uint32_t{0});  // the length of the body, which end_frame() sets
}

Status PatchWriter::end_frame() {
  const std::size_t body_bytes = frame_.size() - frame_begin_ - kFrameHeadBytes;
  if (body_bytes > UINT32_MAX)
    return fail(Code::kExhausted, "write patch", "a part of {} bytes, at most {} fit; fold fewer deltas", body_bytes,
                UINT32_MAX);
  // + 1: the length follows the type.
  store(frame_.data() + frame_begin_ + 1, static_cast<std::uint32_t>(body_bytes));
  const Digest sum = digest_bytes(ByteSpan(frame_).subspan(frame_begin_));
  const ByteSpan checksum = ByteSpan(sum.bytes).first(kChecksumBytes);
  put_bytes(frame_, checksum);
  put_bytes(checksums_, checksum);
  patch_bytes_ += frame_.size();
  ECHO_TRY(sink_(frame_));
  frame_.clear();
  return ok();
}

Status PatchWriter::begin(PatchKind kind, const StateView& tensors, int table_zstd_level) {
  if (tensors.size() > UINT32_MAX) return fail(Code::kInvalid, "write patch", "more than 2^32 - 1 tensors");
  put_bytes(frame_, as_byte_span(kMagic));
  put(frame_, kFormatVersion);
  begin_frame(kHeaderFrame);
  put(frame_, static_cast<std::uint8_t>(kind));
  put(frame_, static_cast<std::uint32_t>(tensors.size()));
  DenseEncoder(table_zstd_level).encode_stream(encode_table(tensors), SIZE_MAX, frame_);
  return end_frame();
}

Status PatchWriter::add(const Segment& segment) {
  begin_frame(segment.tensors > 1 ? kGroupFrame : kSegmentFrame);
  write_segment(segment, frame_);
  ++segment_count_;
  for (const Layer& layer : segment.layers) changed_ += layer.changed;
  return end_frame();
}

Status PatchWriter::finish(PatchStats& stats) {
  stats.changed = changed_;
  begin_frame(kTrailerFrame);
  put_bytes(frame_, stats.base.value_or(Digest{}).bytes);
  put_bytes(frame_, stats.result.bytes);
  put(frame_, stats.state_bytes);
  put(frame_, stats.elements);
  put(frame_, changed_);
  put(frame_, segment_count_);
  put_bytes(frame_, digest_bytes(checksums_).bytes);
  ECHO_TRY(end_frame());
  stats.patch_bytes = patch_bytes_;
  return ok();
}

Status PatchParser::add_header(ByteSpan body) {
  PatchInfo& info = info_;
  const auto limit_error = [](std::string_view what, std::uint64_t found, std::uint64_t max) {
    return fail(Code::kExhausted, "read patch", "{} {}, the limit is {}", found, what, max);
  };
  ByteReader reader(body);
  const auto kind = reader.read_number<std::uint8_t>();
  const auto tensors = reader.read_number<std::uint32_t>();
  if (reader.failed()) return corrupt("the header is cut short");
  const bool is_known_kind =
      kind == static_cast<std::uint8_t>(PatchKind::kSnapshot) || kind == static_cast<std::uint8_t>(PatchKind::kDelta);
  if (!is_known_kind) return corrupt(fmt::format("unknown patch kind {}", kind));
  info.kind = static_cast<PatchKind>(kind);
  if (tensors > options_.tensors_max) return limit_error("tensors", tensors, options_.tensors_max);
  ECHO_ASSIGN(const Stream stream, read_stream(reader, /*raw_min=*/0, /*raw_max=*/UINT64_MAX));
  if (!reader.remaining().empty()) return corrupt("the header has bytes after the tensor table");
  if (stream.raw_bytes > options_.table_bytes_max)
    return limit_error("bytes of tensor table", stream.raw_bytes, options_.table_bytes_max);
  ByteVector table(stream.raw_bytes);
  ECHO_TRY(expand_stream(stream, table));
  ByteReader entries(table);
  for (std::uint32_t i = 0; i < tensors; ++i) {
    ECHO_ASSIGN(PatchTensor tensor, parse_table_entry(entries));
    if (!info.tensors.empty() && tensor.name <= info.tensors.back().name)
      return corrupt("the tensor table is not in canonical order");
    const std::uint64_t bytes = tensor.elements * dtype_bytes(tensor.dtype);
    // The state is within the limit so far, so the subtraction does not wrap.
    if (info.kind == PatchKind::kSnapshot && bytes > options_.state_bytes_max - info.state_bytes)
      return limit_error("bytes of state at least", info.state_bytes + bytes, options_.state_bytes_max);
    info.state_bytes += bytes;
    info.elements += tensor.elements;
    tensor.coded_elements = tensor.elements;
    info.tensors.push_back(std::move(tensor));
  }
  if (!entries.remaining().empty()) return corrupt("the tensor table has bytes after its last entry");
  return ok();
}

Result<Segment> PatchParser::add_segment(ByteSpan body, bool is_group) {
  ECHO_ASSIGN(Segment segment, read_segment(body, is_group));
  PatchInfo& info = info_;
  if (segment.tensor >= info.tensors.size())
    return corrupt(fmt::format("a segment of tensor {}, there are {}", segment.tensor, info.tensors.size()));
  PatchTensor& tensor = info.tensors[static_cast<std::size_t>(segment.tensor)];
  const std::uint64_t bytes = tensor.elements * dtype_bytes(tensor.dtype);
  if (segment.index >= segment_count(bytes))
    return corrupt(fmt::format("tensor '{}' has no segment {}", tensor.name, segment.index));
  const std::pair place(segment.tensor, segment.index);
  if (last_place_ && place <= *last_place_) return corrupt("the segments are not in order");
  std::uint64_t elements = segment_range(bytes, segment.index).byte_count / dtype_bytes(tensor.dtype);
  if (is_group) {
    if (info.kind == PatchKind::kSnapshot) return corrupt("a snapshot has a group of tensors");
    if (segment.tensors < 2 || segment.tensors > info.tensors.size() - segment.tensor)
      return corrupt(fmt::format("a group of {} tensors from the {}th on", segment.tensors, segment.tensor));
    elements = 0;
    for (std::uint64_t i = 0; i < segment.tensors; ++i) {
      const PatchTensor& member = info.tensors[static_cast<std::size_t>(segment.tensor + i)];
      if (member.dtype != tensor.dtype || member.elements == 0 ||
          member.elements * dtype_bytes(tensor.dtype) > kGroupedBytes)
        return corrupt(fmt::format("tensor '{}' does not belong in a group", member.name));
      elements += member.elements;
    }
    if (elements * dtype_bytes(tensor.dtype) > kSegmentBytes) return corrupt("a group of tensors is too large");
  }
  for (const Layer& layer : segment.layers) {
    if (layer.changed == 0 || layer.changed > elements)
      return corrupt(fmt::format("tensor '{}': a segment declares {} changes of {} elements", tensor.name,
                                 layer.changed, elements));
    tensor.changed += layer.changed;
    tensor.bound_bits += std::min(layer.bound_bits, kBoundBitsMax);
  }
  if (info.kind == PatchKind::kSnapshot &&
      (segment.layers.size() != 1 || segment.layers.front().coding != LayerCoding::kDense))
    return corrupt(fmt::format("tensor '{}' of a snapshot is incomplete", tensor.name));
  if (is_group) {
    tensor.coded_tensors = segment.tensors;
    tensor.coded_elements = elements;
  }
  tensor.payload_bytes += body.size();
  // A group's last tensor counts, so that no later segment may lie in the group.
  last_place_ = std::pair(segment.tensor + segment.tensors - 1, segment.index);
  ++segment_count_;
  return segment;
}

Status PatchParser::check_trailer(ByteSpan body) {
  ByteReader reader(body);
  PatchInfo& info = info_;
  Digest base, checksums_digest;
  for (Digest* digest : {&base, &info.result})
    std::ranges::copy(reader.read_bytes(digest->bytes.size()), digest->bytes.begin());
  const auto state_bytes = reader.read_number<std::uint64_t>();
  const auto elements = reader.read_number<std::uint64_t>();
  const auto changed = reader.read_number<std::uint64_t>();
  const auto segments = reader.read_number<std::uint64_t>();
  std::ranges::copy(reader.read_bytes(checksums_digest.bytes.size()), checksums_digest.bytes.begin());
  if (reader.failed() || !reader.remaining().empty()) return corrupt("the trailer is malformed");
  if (info.kind == PatchKind::kDelta) info.base = base;
  if (info.kind == PatchKind::kSnapshot && base != Digest{}) return corrupt("a snapshot names a base");
  for (const PatchTensor& tensor : info.tensors) {
    info.changed += tensor.changed;
    info.payload_bytes += tensor.payload_bytes;
    info.bound_bits += tensor.bound_bits;
  }
  if (state_bytes != info.state_bytes || elements != info.elements || changed != info.changed)
    return corrupt("the trailer and the segments disagree on the number of elements");
  if (segments != segment_count_)
    return corrupt(fmt::format("the trailer promises {} segments, {} arrived", segments, segment_count_));
  if (checksums_digest != digest_bytes(checksums_)) return corrupt("the trailer is of other segments than arrived");
  if (info.kind == PatchKind::kDelta) return ok();
  std::uint64_t segments_expected = 0;
  for (const PatchTensor& tensor : info.tensors)
    segments_expected += segment_count(tensor.elements * dtype_bytes(tensor.dtype));
  if (segments != segments_expected) return corrupt("the snapshot is incomplete");
  return ok();
}

Result<std::size_t> PatchParser::parse(ByteSpan bytes, std::vector<Segment>& segments) {
  constexpr std::size_t kStartBytes = kMagic.size() + sizeof kFormatVersion;
  ByteReader reader(bytes);
  if (!magic_read_) {
    const ByteSpan start = bytes.first(std::min(bytes.size(), kMagic.size()));
    if (!std::ranges::equal(start, as_byte_span(kMagic).first(start.size())))
      return corrupt("these bytes are not a patch (wrong magic)");
    if (bytes.size() < kStartBytes) return std::size_t{0};
    reader.read_bytes(kMagic.size());
    if (const auto version = reader.read_number<std::uint16_t>(); version < kOldestVersion || version > kFormatVersion)
      return corrupt(fmt::format("patch format version {}, this program reads versions {} and {}", version,
                                 kOldestVersion, kFormatVersion));
    magic_read_ = true;
  }
  const auto consumed_bytes = [&] { return bytes.size() - reader.remaining().size(); };
  std::size_t complete_bytes = consumed_bytes();  // of the magic and of complete frames
  for (; !trailer_read_; complete_bytes = consumed_bytes()) {
    ECHO_ASSIGN(const std::optional<Frame> frame, read_frame(reader, parsed_bytes_ + complete_bytes));
    if (!frame) break;
    const bool is_header = frame->type == kHeaderFrame;
    // The first frame must be a header, and no later one may be.
    if (is_header == header_read_) return corrupt("the header is not the first frame");
    if (frame->type != kTrailerFrame) put_bytes(checksums_, frame->checksum);
    switch (frame->type) {
      case kHeaderFrame:
        ECHO_TRY(add_header(frame->body));
        header_read_ = true;
        break;
      case kSegmentFrame:
      case kGroupFrame: {
        ECHO_ASSIGN(Segment segment, add_segment(frame->body, frame->type == kGroupFrame));
        segments.push_back(std::move(segment));
        break;
      }
      case kTrailerFrame:
        ECHO_TRY(check_trailer(frame->body));
        trailer_read_ = true;
        break;
      default:
        return corrupt(fmt::format("unknown frame type {}", frame->type));
    }
  }
  parsed_bytes_ += complete_bytes;
  info_.patch_bytes = parsed_bytes_;
  return complete_bytes;
}

Status PatchParser::check_complete(std::size_t patch_bytes) const {
  if (!magic_read_) return corrupt(fmt::format("it ends after {} bytes, before its header", patch_bytes));
  if (!trailer_read_)
    return corrupt(
        fmt::format("it ends after {} bytes, within the frame that begins at byte {}", patch_bytes, parsed_bytes_));
  if (parsed_bytes_ != patch_bytes)
    return corrupt(fmt::format("there are {} bytes after the trailer", patch_bytes - parsed_bytes_));
  return ok();
}

Result<ParsedPatch> parse_patch(ByteSpan patch, const DecodeOptions& options) {
  PatchParser parser(options);
  ParsedPatch parsed;
  ECHO_TRY(parser.parse(patch, parsed.segments));
  ECHO_TRY(parser.check_complete(patch.size()));
  parsed.info = std::move(parser.info());
  return parsed;
}

Status check_tensors_match(const PatchInfo& info, const StateView& state) {
  const auto error_of = [](const std::string& name, std::string_view difference) {
    return fail(Code::kInvalid, "apply delta", "tensor '{}' {}: the patch is of another model", name, difference);
  };
  for (std::size_t i = 0; i < info.tensors.size() || i < state.size(); ++i) {
    if (i == info.tensors.size()) return error_of(state[i].name, "is not in the patch");
    const PatchTensor& tensor = info.tensors[i];
    if (i == state.size()) return error_of(tensor.name, "is not in the state");
    if (tensor.name != state[i].name)
      return error_of(tensor.name, fmt::format("is in the place of the state's '{}'", state[i].name));
    if (tensor.dtype != state[i].dtype || tensor.shape != state[i].shape)
      return error_of(tensor.name, fmt::format("is {} [{}] in the patch and {} [{}] in the state",
                                               dtype_name(tensor.dtype), fmt::join(tensor.shape, ", "),
                                               dtype_name(state[i].dtype), fmt::join(state[i].shape, ", ")));
  }
  return ok();
}

}  // namespace echoline::delta
