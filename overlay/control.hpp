// Control messages as plain values, checked when they are decoded. The protobuf form is control.proto.
#pragma once
#include <map>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "overlay/chunk_set.hpp"
#include "overlay/frame.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

inline constexpr std::uint32_t kProtocol = 1;
inline constexpr std::size_t kHaveItemsMax = 256;
// Bits of partial bitmaps in one Have, so that it stays well below kControlBytesMax.
inline constexpr std::uint32_t kChunksMax = 1u << 19;
inline constexpr std::size_t kHeartbeatApplicationBytesMax = 64 * 1024;
inline constexpr std::size_t kTextBytesMax = 1024;  // names, run ids, reasons

struct Hello {
  std::string run_id, name;
  Endpoint data;
  std::optional<BitRate> up, down;
};
struct Welcome {
  WorkerId worker;
  Duration heartbeat{}, learner_timeout{};
  std::string application;
};
struct Assign {
  WorkerId parent;
  Endpoint endpoint;
};

// Describes a publication before its chunks come.
struct Manifest {
  PublicationKey key;
  Digest policy_digest{}, payload_digest{};  // payload_digest: XXH3-128, canonical (big-endian) bytes
  std::uint64_t payload_bytes = 0;
  std::uint32_t chunk_bytes = 0;
  std::uint32_t chunk_count() const {
    return static_cast<std::uint32_t>((payload_bytes + chunk_bytes - 1) / chunk_bytes);
  }
  std::uint32_t length_of(std::uint32_t chunk) const {
    return static_cast<std::uint32_t>(
        std::min<std::uint64_t>(chunk_bytes, payload_bytes - std::uint64_t{chunk} * chunk_bytes));
  }
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// What a child holds: the version it will have installed once the application is done with what it was given, and
// the chunks of publications in its store.
struct Have {
  std::optional<Version> position;
  std::map<PublicationKey, ChunkSet> chunks;
};
struct PeerHello {
  std::string run_id;
  WorkerId worker;
  std::optional<Version> catch_up_to;  // only to the learner: bring me there, then I close
  bool full_only = false;              // by one full snapshot: deltas could not be installed
  Have have;
};
struct ChunkRequest {
  PublicationKey key;
  std::uint32_t index = 0;
};
// Parent -> child: my store cannot bring you to `target` (behind: it could, but a full snapshot is far cheaper).
struct CannotServe {
  Version target;
  bool behind = false;
};
struct EdgeFailed {
  WorkerId parent;
  std::string reason;
};
struct Ack {
  Version version;
  Digest policy_digest{};
};
// Both ways; the learner fills in only `version`, the newest published.
struct Heartbeat {
  std::optional<Version> version;
  std::uint64_t chunk_bytes_in = 0, chunk_bytes_forwarded = 0, chunks_duplicate = 0, chunks_corrupt = 0;
  std::optional<BitRate> forwarding_rate;
  std::string application;
};
struct Goodbye {
  std::string reason;
};

using ControlMessage = std::variant<Hello, Welcome, Assign, Manifest, Have, PeerHello, ChunkRequest, CannotServe,
                                    EdgeFailed, Ack, Heartbeat, Goodbye>;

// A whole frame. Texts longer than kTextBytesMax are cut; other limits are the caller's duty (checked).
std::vector<std::byte> encode_control(const ControlMessage& message);
// kCorrupt with what was expected and found.
Result<ControlMessage> decode_control(std::span<const std::byte> body);

}  // namespace echoline::overlay
