// Encodes frames and decodes the byte stream of a connection. Called by cores, driver and disk.
#include "overlay/wire/frame.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "overlay/wire/bytes.hpp"
#include "overlay/wire/chunk_memory.hpp"

namespace echoline::overlay {
namespace {

constexpr std::string_view kOperation = "read frame";
constexpr std::uint16_t kMagic = 0xEC02;  // the low byte is the format version
constexpr std::size_t kIdBytes = sizeof(PublicationId), kPathHashBytes = sizeof(trust::Hash);
constexpr std::uint8_t kMoreFlag = 1;  // on an application frame: the message continues in the next one

std::size_t body_bytes_max(FrameType type) {
  switch (type) {
    case FrameType::kControl:
      return kControlBytesMax;
    case FrameType::kApplication:
      return kApplicationBytesMax;
    case FrameType::kChunk:
      return kChunkHeadBytesMax + kChunkBytesMax;
  }
  return 0;
}

// The offsets of the fields, here and below, are in FORMAT.md.
// `body_bytes` is within its type's limit.
void put_header(std::byte* to, FrameType type, std::size_t body_bytes, std::uint8_t flags = 0) {
  put_le<std::uint16_t>(to, kMagic);
  put_le<std::uint8_t>(to + 2, static_cast<std::uint8_t>(type));
  put_le<std::uint8_t>(to + 3, flags);
  put_le<std::uint32_t>(to + 4, static_cast<std::uint32_t>(body_bytes));
}

}  // namespace

std::string to_text(const PublicationKey& key) {
  return key.base ? fmt::format("version {} on {}", key.version, *key.base)
                  : fmt::format("version {} (full)", key.version);
}

std::vector<std::byte> encode_frame(FrameType type, std::span<const std::byte> body) {
  ECHO_CHECK(type != FrameType::kChunk && body.size() <= body_bytes_max(type), "frame body of {} bytes", body.size());
  std::vector<std::byte> frame(kFrameHeaderBytes + body.size());
  put_header(frame.data(), type, body.size());
  if (!body.empty()) std::memcpy(frame.data() + kFrameHeaderBytes, body.data(), body.size());
  return frame;
}

std::vector<std::byte> application_header(std::size_t body_bytes, bool more) {
  ECHO_CHECK(body_bytes <= kApplicationBytesMax && (body_bytes > 0 || !more), "a part of {} bytes", body_bytes);
  std::vector<std::byte> header(kFrameHeaderBytes);
  put_header(header.data(), FrameType::kApplication, body_bytes, more ? kMoreFlag : 0);
  return header;
}

std::vector<std::byte> encode_chunk_head(const ChunkHead& head) {
  ECHO_CHECK(head.length >= 1 && head.length <= kChunkBytesMax && head.path.size() <= kProofHashesMax,
             "chunk of {} bytes with a path of {}", head.length, head.path.size());
  const std::size_t head_bytes = kChunkHeadFixedBytes + kPathHashBytes * head.path.size();
  std::vector<std::byte> frame(kFrameHeaderBytes + head_bytes);
  put_header(frame.data(), FrameType::kChunk, head_bytes + head.length);
  std::byte* to = frame.data() + kFrameHeaderBytes;
  std::memcpy(to, head.publication.data(), kIdBytes);
  put_le<std::uint32_t>(to + 16, head.index);
  put_le<std::uint32_t>(to + 20, head.length);
  put_le<std::uint32_t>(to + 24, head.seal_first);
  put_le<std::uint16_t>(to + 28, head.seal_count);
  put_le<std::uint16_t>(to + 30, static_cast<std::uint16_t>(head.path.size()));
  std::memcpy(to + 32, head.signature.bytes.data(), 64);
  for (std::size_t i = 0; i < head.path.size(); ++i)
    std::memcpy(to + kChunkHeadFixedBytes + kPathHashBytes * i, head.path[i].data(), kPathHashBytes);
  return frame;
}

std::span<std::byte> FrameDecoder::room() {
  switch (part_) {
    case Part::kHeader:
      return {head_.data() + filled_, kFrameHeaderBytes - filled_};
    case Part::kChunkHead:
      return {head_.data() + kFrameHeaderBytes + filled_, kChunkHeadFixedBytes - filled_};
    case Part::kPath:
      return {head_.data() + kFrameHeaderBytes + kChunkHeadFixedBytes + filled_,
              head_bytes_ - kFrameHeaderBytes - kChunkHeadFixedBytes - filled_};
    case Part::kBody:
      if (type_ == FrameType::kChunk) {
        if (!chunk_) chunk_ = chunk_memory(body_bytes_);
        return {chunk_.get() + filled_, body_bytes_ - filled_};
      }
      // The buffer grows with received bytes, not with the announced length.
      if (filled_ == message_.size()) message_.resize(std::min(body_bytes_, filled_ + kGrowthBytes));
      return std::span(message_).subspan(filled_);
    case Part::kWhole:
      break;
  }
  return {};
}

// A part may be empty, so several may end here.
Status FrameDecoder::advance(std::size_t count) {
  filled_ += count;
  for (;;) {
    switch (part_) {
      case Part::kHeader:
        if (filled_ < kFrameHeaderBytes) return ok();
        ECHO_TRY(read_header());
        break;
      case Part::kChunkHead:
        if (filled_ < kChunkHeadFixedBytes) return ok();
        ECHO_TRY(read_chunk_head());
        break;
      case Part::kPath:
        if (filled_ < head_bytes_ - kFrameHeaderBytes - kChunkHeadFixedBytes) return ok();
        begin_body();
        break;
      case Part::kBody:
        if (filled_ < body_bytes_) return ok();
        finish();
        return ok();
      case Part::kWhole:
        return ok();
    }
  }
}

Status FrameDecoder::read_header() {
  filled_ = 0;
  if (const auto magic = get_le<std::uint16_t>(head_.data()); magic != kMagic)
    return fail(Code::kCorrupt, kOperation,
                "expected magic {:#06x}, found {:#06x}: the peer is not an echoline node of this version", kMagic,
                magic);
  const auto type = get_le<std::uint8_t>(head_.data() + 2);
  const auto flags = get_le<std::uint8_t>(head_.data() + 3);
  const auto length = get_le<std::uint32_t>(head_.data() + 4);
  if (type < 1 || type > 3) return fail(Code::kCorrupt, kOperation, "expected frame type 1 to 3, found {}", type);
  type_ = static_cast<FrameType>(type);
  frame_.more = type_ == FrameType::kApplication && flags == kMoreFlag && length > 0;
  if (flags != 0 && !frame_.more)
    return fail(Code::kCorrupt, kOperation, "expected flags 0, found {:#04x} on {} bytes of type {}", flags, length,
                type);
  if (!admitted_ && type_ != FrameType::kControl)
    return fail(Code::kCorrupt, kOperation, "frame type {} from a peer that is not admitted", type);
  const std::size_t length_max = admitted_ ? body_bytes_max(type_) : kPendingPeerBytesMax;
  if (length > length_max)
    return fail(Code::kCorrupt, kOperation, "a frame of type {} may have {} bytes{}, found {}", type, length_max,
                admitted_ ? "" : " before its sender is admitted", length);
  body_bytes_ = length;
  if (type_ == FrameType::kChunk) {
    if (length <= kChunkHeadFixedBytes)
      return fail(Code::kCorrupt, kOperation, "a chunk frame has more than {} bytes, found {}", kChunkHeadFixedBytes,
                  length);
    part_ = Part::kChunkHead;
  } else {
    begin_body();
  }
  return ok();
}

Status FrameDecoder::read_chunk_head() {
  const std::byte* from = head_.data() + kFrameHeaderBytes;
  ChunkHead& head = frame_.chunk;
  std::memcpy(head.publication.data(), from, kIdBytes);
  head.index = get_le<std::uint32_t>(from + 16);
  head.length = get_le<std::uint32_t>(from + 20);
  head.seal_first = get_le<std::uint32_t>(from + 24);
  head.seal_count = get_le<std::uint16_t>(from + 28);
  const auto path_hashes = get_le<std::uint16_t>(from + 30);
  std::memcpy(head.signature.bytes.data(), from + 32, 64);
  if (head.index >= kChunksMax)
    return fail(Code::kCorrupt, kOperation, "expected a chunk index below {}, found {}", kChunksMax, head.index);
  if (head.seal_count < 1 || head.seal_count > kSealChunksMax || head.index < head.seal_first ||
      head.index - head.seal_first >= head.seal_count)
    return fail(Code::kCorrupt, kOperation, "chunk {} is outside of its seal of {} chunks from {} on", head.index,
                head.seal_count, head.seal_first);
  if (path_hashes != std::bit_width(static_cast<unsigned>(head.seal_count - 1)))
    return fail(Code::kCorrupt, kOperation, "expected a path of {} hashes in a seal of {} chunks, found {}",
                std::bit_width(static_cast<unsigned>(head.seal_count - 1)), head.seal_count, path_hashes);
  const std::size_t head_bytes = kChunkHeadFixedBytes + kPathHashBytes * path_hashes;
  if (head.length < 1 || head.length > kChunkBytesMax || body_bytes_ != head_bytes + head.length)
    return fail(Code::kCorrupt, kOperation, "a frame of {} bytes cannot hold a head of {} and a chunk of {} bytes",
                body_bytes_, head_bytes, head.length);
  head_bytes_ = kFrameHeaderBytes + head_bytes;
  body_bytes_ = head.length;
  filled_ = 0;
  part_ = Part::kPath;
  return ok();
}

void FrameDecoder::begin_body() {
  filled_ = 0;
  part_ = Part::kBody;
}

void FrameDecoder::finish() {
  frame_.type = type_;
  if (type_ == FrameType::kChunk) {
    ChunkHead& head = frame_.chunk;
    head.path.resize((head_bytes_ - kFrameHeaderBytes - kChunkHeadFixedBytes) / kPathHashBytes);
    for (std::size_t i = 0; i < head.path.size(); ++i)
      std::memcpy(head.path[i].data(), head_.data() + kFrameHeaderBytes + kChunkHeadFixedBytes + kPathHashBytes * i,
                  kPathHashBytes);
    frame_.head =
        Slice(std::vector<std::byte>(head_.begin(), head_.begin() + static_cast<std::ptrdiff_t>(head_bytes_)));
    frame_.body = Slice(std::move(chunk_), body_bytes_);
  } else {
    message_.resize(body_bytes_);
    frame_.body = Slice(std::exchange(message_, {}));
  }
  filled_ = 0;
  part_ = Part::kWhole;
}

std::optional<Frame> FrameDecoder::take() {
  if (part_ != Part::kWhole) return std::nullopt;
  part_ = Part::kHeader;
  return std::exchange(frame_, {});
}

bool FrameDecoder::adopt(const Slice& data) {
  if (!awaiting_chunk() || data.size() != body_bytes_) return false;
  finish();
  frame_.body = data;
  return true;
}

}  // namespace echoline::overlay
