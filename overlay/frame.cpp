#include "overlay/frame.hpp"

#include <algorithm>
#include <cstring>

namespace echoline::overlay {
namespace {

constexpr std::uint16_t kMagic = 0xEC01;  // the low byte is the format version
constexpr std::uint8_t kHasBase = 1;

template <class T>
void put(std::byte* to, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}
template <class T>
T get(const std::byte* from) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(from[i]) << (8 * i));
  return value;
}

std::size_t body_bytes_max(FrameType type) {
  switch (type) {
    case FrameType::kControl:
      return kControlBytesMax;
    case FrameType::kApplication:
      return kApplicationBytesMax;
    case FrameType::kChunk:
      return kChunkHeaderBytes + kChunkBytesMax;
  }
  return 0;
}

void put_header(std::byte* to, FrameType type, std::size_t body_bytes) {
  put<std::uint16_t>(to, kMagic);
  put<std::uint8_t>(to + 2, static_cast<std::uint8_t>(type));
  put<std::uint8_t>(to + 3, 0);
  put<std::uint32_t>(to + 4, static_cast<std::uint32_t>(body_bytes));
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

std::vector<std::byte> encode_chunk_header(const ChunkHeader& header) {
  ECHO_CHECK(header.length_bytes >= 1 && header.length_bytes <= kChunkBytesMax, "chunk of {} bytes",
             header.length_bytes);
  std::vector<std::byte> frame(kFrameHeaderBytes + kChunkHeaderBytes);
  put_header(frame.data(), FrameType::kChunk, kChunkHeaderBytes + header.length_bytes);
  std::byte* to = frame.data() + kFrameHeaderBytes;
  frame[3] = static_cast<std::byte>(header.key.base ? kHasBase : 0);
  put<std::uint64_t>(to, header.key.version.value);
  put<std::uint64_t>(to + 8, header.key.base ? header.key.base->value : 0);
  put<std::uint32_t>(to + 16, header.index);
  put<std::uint32_t>(to + 20, header.length_bytes);
  put<std::uint64_t>(to + 24, header.xxh3_64);
  return frame;
}

Result<FrameHeader> FrameDecoder::parse_header(std::span<const std::byte> bytes) const {
  constexpr std::string_view op = "read frame";
  if (const auto magic = get<std::uint16_t>(bytes.data()); magic != kMagic)
    return fail(Code::kCorrupt, op,
                "expected magic {:#06x}, found {:#06x}: the peer is not an echoline node of this version", kMagic,
                magic);
  const auto type = get<std::uint8_t>(bytes.data() + 2);
  const auto flags = get<std::uint8_t>(bytes.data() + 3);
  if (type < 1 || type > 3) return fail(Code::kCorrupt, op, "expected frame type 1 to 3, found {}", type);
  if (flags > (type == static_cast<std::uint8_t>(FrameType::kChunk) ? kHasBase : 0))
    return fail(Code::kCorrupt, op, "frame type {} has unknown flags {:#04x}", type, flags);
  const FrameHeader header{static_cast<FrameType>(type), get<std::uint32_t>(bytes.data() + 4)};
  if (!admitted_ && header.type != FrameType::kControl)
    return fail(Code::kCorrupt, op, "expected an introduction first, found a frame of type {}", type);
  if (header.body_bytes > body_bytes_max(header.type))
    return fail(Code::kCorrupt, op, "frame type {} announces {} bytes, the limit is {}", type, header.body_bytes,
                body_bytes_max(header.type));
  if (header.type == FrameType::kChunk && header.body_bytes <= kChunkHeaderBytes)
    return fail(Code::kCorrupt, op, "a chunk frame announces {} bytes, expected more than {}", header.body_bytes,
                kChunkHeaderBytes);
  return header;
}

Result<FrameView> FrameDecoder::parse_body(const FrameHeader& header, std::span<const std::byte> frame) const {
  const std::span<const std::byte> body = frame.subspan(kFrameHeaderBytes);
  FrameView view{header.type, body, {}};
  if (header.type != FrameType::kChunk) return view;
  const std::byte* from = body.data();
  const bool has_base = std::to_integer<std::uint8_t>(frame[3]) & kHasBase;
  const auto base = get<std::uint64_t>(from + 8);
  view.chunk.key.version = Version{get<std::uint64_t>(from)};
  if (has_base) view.chunk.key.base = Version{base};
  view.chunk.index = get<std::uint32_t>(from + 16);
  view.chunk.length_bytes = get<std::uint32_t>(from + 20);
  view.chunk.xxh3_64 = get<std::uint64_t>(from + 24);
  if (!has_base && base != 0) return fail(Code::kCorrupt, "read chunk", "a full snapshot's chunk names base {}", base);
  if (has_base && base >= view.chunk.key.version.value)
    return fail(Code::kCorrupt, "read chunk", "expected a base below version {}, found {}", view.chunk.key.version,
                base);
  view.body = body.subspan(kChunkHeaderBytes);
  if (view.chunk.length_bytes != view.body.size())
    return fail(Code::kCorrupt, "read chunk", "{} chunk {}: header says {} bytes, the frame holds {}",
                to_text(view.chunk.key), view.chunk.index, view.chunk.length_bytes, view.body.size());
  return view;
}

Result<std::optional<FrameView>> FrameDecoder::next() {
  if (partial_delivered_) {
    partial_.clear();
    partial_delivered_ = false;
    if (partial_.capacity() > 2 * kControlBytesMax) partial_ = {};  // do not hold a large frame's memory for ever
  }
  const auto take = [&](std::size_t wanted) {  // moves input into partial_ until it holds `wanted` bytes
    const std::size_t n = std::min(wanted - partial_.size(), input_.size());
    partial_.insert(partial_.end(), input_.begin(), input_.begin() + static_cast<std::ptrdiff_t>(n));
    input_ = input_.subspan(n);
    return partial_.size() == wanted;
  };
  if (partial_.empty() && input_.size() >= kFrameHeaderBytes) {  // the common case: the frame lies whole in the input
    ECHO_ASSIGN(const FrameHeader header, parse_header(input_));
    const std::size_t total = kFrameHeaderBytes + header.body_bytes;
    if (input_.size() >= total) {
      ECHO_ASSIGN(const FrameView view, parse_body(header, input_.first(total)));
      input_ = input_.subspan(total);
      return std::optional(view);
    }
  }
  if (partial_.size() < kFrameHeaderBytes && !take(kFrameHeaderBytes)) return std::optional<FrameView>();
  ECHO_ASSIGN(const FrameHeader header, parse_header(partial_));
  if (!take(kFrameHeaderBytes + header.body_bytes)) return std::optional<FrameView>();
  ECHO_ASSIGN(const FrameView view, parse_body(header, partial_));
  partial_delivered_ = true;
  return std::optional(view);
}

}  // namespace echoline::overlay
