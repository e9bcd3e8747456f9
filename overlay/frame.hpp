// The framed TCP stream: what a byte stream between two nodes consists of. Byte-exact in FORMAT.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"

namespace echoline::overlay {

enum class FrameType : std::uint8_t {
  kControl = 1,      // a protobuf ControlMessage
  kApplication = 2,  // opaque application bytes
  kChunk = 3,        // a chunk header and the chunk's bytes
};

inline constexpr std::size_t kFrameHeaderBytes = 8;
inline constexpr std::size_t kChunkHeaderBytes = 32;
inline constexpr std::size_t kControlBytesMax = 256 * 1024;
inline constexpr std::size_t kApplicationBytesMax = 4 * 1024 * 1024;
inline constexpr std::size_t kChunkBytesMax = 4 * 1024 * 1024;
inline constexpr std::size_t kChunkBytesMin = 1024;

// A publication's identity: a version may travel as a full snapshot and as deltas on different bases.
struct PublicationKey {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  friend auto operator<=>(const PublicationKey&, const PublicationKey&) = default;
  bool full() const { return !base.has_value(); }
};
std::string to_text(const PublicationKey& key);  // "version 7 on 6", "version 7 (full)"

struct ChunkHeader {
  PublicationKey key;
  std::uint32_t index = 0;
  std::uint32_t length_bytes = 0;
  std::uint64_t xxh3_64 = 0;  // of the chunk's bytes
};

struct FrameHeader {
  FrameType type = FrameType::kControl;
  std::uint32_t body_bytes = 0;
};

// Frame bytes of a control or application message; the body's size must be within its type's limit (checked).
std::vector<std::byte> encode_frame(FrameType type, std::span<const std::byte> body);
// Frame header and chunk header; the chunk's bytes follow on the wire.
std::vector<std::byte> encode_chunk_header(const ChunkHeader& header);

// A decoded frame. The body is valid until the decoder is used again.
struct FrameView {
  FrameType type = FrameType::kControl;
  std::span<const std::byte> body;  // of a chunk: its bytes without the chunk header
  ChunkHeader chunk;                // only for kChunk
};

// Turns a byte stream into frames. Never trusts a length: a limit is checked before a body is awaited, and memory grows
// only with bytes that arrived. Usage: feed() once, then next() until it returns nothing. After an error the stream is
// lost: the connection must be closed.
class FrameDecoder {
 public:
  // A stranger may send one control message, no more; admit() lifts that once the peer has introduced itself.
  void admit() { admitted_ = true; }
  // `bytes` must stay valid until next() has returned nothing.
  void feed(std::span<const std::byte> bytes) { input_ = bytes; }
  // The next complete frame, nothing when more bytes are needed, or kCorrupt with what was expected and found.
  Result<std::optional<FrameView>> next();
  // Bytes held for a frame that is not complete.
  std::size_t buffered_bytes() const { return partial_.size(); }

 private:
  Result<FrameHeader> parse_header(std::span<const std::byte> bytes) const;
  Result<FrameView> parse_body(const FrameHeader& header, std::span<const std::byte> body) const;

  bool admitted_ = false;
  bool partial_delivered_ = false;  // partial_ holds a frame handed out by the last next()
  std::span<const std::byte> input_;
  std::vector<std::byte> partial_;
};

}  // namespace echoline::overlay
