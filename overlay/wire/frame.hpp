// The framed stream between two nodes. Byte-exact in FORMAT.md.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "overlay/slice.hpp"
#include "overlay/trust/hash.hpp"
#include "overlay/trust/signature.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

enum class FrameType : std::uint8_t {
  kControl = 1,      // a protobuf ControlMessage
  kApplication = 2,  // opaque application bytes
  kChunk = 3,        // a chunk with its proof
};

inline constexpr std::size_t kFrameHeaderBytes = 8;
inline constexpr std::size_t kControlBytesMax = 256 * 1024;
inline constexpr std::size_t kPendingPeerBytesMax = 4 * 1024;   // one frame of a peer that is not admitted yet
inline constexpr std::size_t kApplicationBytesMax = 64 * 1024;  // one frame: a message, or a part of one
inline constexpr std::size_t kChunkBytesMax = 1024 * 1024;
inline constexpr std::size_t kChunkBytesMin = 1024;
inline constexpr std::uint32_t kChunksMax = 1u << 20;  // of one publication

// The key of a publication. A version may travel as a full snapshot and as deltas on different bases.
struct PublicationKey {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  friend auto operator<=>(const PublicationKey&, const PublicationKey&) = default;
  bool full() const { return !base.has_value(); }
};
std::string to_text(const PublicationKey& key);  // "version 7 on 6", "version 7 (full)"

// A seal is the learner's signature over the Merkle root of consecutive chunks.
inline constexpr std::size_t kSealChunksMax = 64;
inline constexpr std::size_t kProofHashesMax = 6;  // log2(kSealChunksMax)
inline constexpr std::size_t kChunkHeadFixedBytes = 96;
inline constexpr std::size_t kChunkHeadBytesMax = kChunkHeadFixedBytes + 32 * kProofHashesMax;

// The head of a chunk: the place of its bytes, and the proof that the learner sealed them.
struct ChunkHead {
  PublicationId publication{};
  std::uint32_t index = 0;
  std::uint32_t length = 0;      // of the chunk, in bytes
  std::uint32_t seal_first = 0;  // the seal covers chunks [seal_first, seal_first + seal_count)
  std::uint16_t seal_count = 1;
  trust::Signature signature{};   // of the seal
  std::vector<trust::Hash> path;  // siblings from the chunk's hash up to the root
};

// Frame bytes of a control or application message; the body's size must be within its type's limit (checked).
std::vector<std::byte> encode_frame(FrameType type, std::span<const std::byte> body);
// The header of an application frame; the body follows it. `more`: the message continues in the next application frame.
std::vector<std::byte> application_header(std::size_t body_bytes, bool more);
// Frame header and chunk head; the chunk's bytes follow on the wire.
std::vector<std::byte> encode_chunk_head(const ChunkHead& head);

struct Frame {
  FrameType type = FrameType::kControl;
  Slice body;         // the message body, or the chunk's bytes
  Slice head;         // only for a chunk: encode_chunk_head(chunk), kept for forwarding
  ChunkHead chunk;    // only for a chunk
  bool more = false;  // only for an application frame: the message continues in the next one
};

// Turns a byte stream into frames without copying chunk bytes. The driver decrypts bytes straight into room(), reports
// their number, and takes complete frames:
//   while (n = read_into(decoder.room())) { ECHO_TRY(decoder.advance(n)); if (auto f = decoder.take()) use(*f); }
// A length is checked against its limit before it is used. After an error, the stream is unusable.
class FrameDecoder {
 public:
  // At first the peer may send only small control messages. admit() lifts this limit once the peer is known.
  void admit() { admitted_ = true; }
  // The memory for the next bytes. Empty only while a complete frame waits in take().
  std::span<std::byte> room();
  // The first `count` bytes of room() were filled. kCorrupt: the stream breaks the format; the error states what was
  // expected and found.
  Status advance(std::size_t count);
  std::optional<Frame> take();
  // Uses `data`, already in shared memory, as the chunk bytes that come next in the stream, without a copy. False if no
  // chunk's bytes come next.
  bool adopt(const Slice& data);
  // The head of the chunk whose bytes come next, none of them read yet; null otherwise.
  const ChunkHead* awaiting_chunk() const {
    return part_ == Part::kBody && type_ == FrameType::kChunk && filled_ == 0 ? &frame_.chunk : nullptr;
  }
  // Bytes held for an incomplete frame.
  std::size_t buffered_bytes() const { return filled_; }

 private:
  // The part of the frame that comes next. kPath: the hashes of a chunk's proof; kWhole: the frame is complete.
  enum class Part { kHeader, kChunkHead, kPath, kBody, kWhole };
  // A message's memory grows by at most this much at a time, so that a peer cannot reserve it by a length alone.
  static constexpr std::size_t kGrowthBytes = 64 * 1024;

  Status read_header();
  Status read_chunk_head();
  void begin_body();
  void finish();

  bool admitted_ = false;
  Part part_ = Part::kHeader;
  std::size_t filled_ = 0;      // received bytes of the current part
  std::size_t body_bytes_ = 0;  // bytes of a control or application frame's body, or of a chunk
  std::size_t head_bytes_ = 0;  // of a chunk frame: header, head and path
  FrameType type_ = FrameType::kControl;
  std::array<std::byte, kFrameHeaderBytes + kChunkHeadBytesMax> head_{};
  std::vector<std::byte> message_;
  std::shared_ptr<std::byte> chunk_;
  Frame frame_;
};

}  // namespace echoline::overlay
