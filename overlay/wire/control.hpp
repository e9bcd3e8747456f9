// Control messages as plain values, checked when decoded. The protobuf form is control.proto. Names, hosts and reasons
// decode to one line of UTF-8 without control characters, whatever a peer sent.
#pragma once
#include <map>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.hpp"
#include "overlay/types.hpp"
#include "overlay/wire/chunk_set.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

inline constexpr std::uint32_t kProtocol = 4;      // version of these messages
inline constexpr std::size_t kHaveItemsMax = 256;  // publications in a child's list of its chunks
inline constexpr std::size_t kHeartbeatApplicationBytesMax = 64 * 1024;
inline constexpr std::size_t kTextBytesMax = 1024;  // names, run ids, reasons
inline constexpr std::size_t kTokenBytesMax = 1024;
inline constexpr std::size_t kSignedBytesMax = 64 * 1024;  // the body of a signed message
inline constexpr std::size_t kRevokedMax = 8192;           // ranges of workers in one beacon
inline constexpr std::size_t kReportsMax = 256;            // edges, holdings, progress items in one message
inline constexpr std::uint64_t kPolicyBytesMax = std::uint64_t{kChunksMax} * kChunkBytesMax;
// The longest duration of a stage in an acknowledgement; longer ones are cut to it.
inline constexpr Duration kStageMax = std::chrono::hours(24);

// A message that any node can verify and forward: the body exactly as the learner signed it.
struct Signed {
  std::string body;
  trust::Signature signature{};
  friend bool operator==(const Signed&, const Signed&) = default;
};

// Permits a parent to serve a child; see grant.hpp.
struct SignedGrant : Signed {};

// ---- enrolment ----

struct Enrol {
  std::string token, instance;
  trust::PublicKey key{};
  trust::Signature proof{};  // by that key over the token: proves possession of the key
};
struct Enrolled {
  WorkerId worker;
  std::vector<std::byte> certificate, authority;  // DER
  std::uint64_t unix_ms = 0;                      // the learner's clock
};
// An enrolled machine whose certificate has expired comes back with its key.
struct Return {
  trust::PublicKey key{};
  trust::Signature proof{};  // by that key over the run's fingerprint
};
// Worker -> learner: asks for the next certificate while the present one is valid; Renewed answers.
struct Renew {
  trust::PublicKey key{};
};
struct Renewed {
  std::vector<std::byte> certificate;
};

// ---- worker <-> learner ----

struct Installed {
  Version version;
  Digest policy_digest{};
  std::uint64_t epoch = 0;  // of the learner; see LearnerState
  // In an acknowledgement, by the worker's clock: from the last byte until the application was given the policy, and
  // from then until the policy was active. At most kStageMax each.
  Duration verify{}, install{};
  friend bool operator==(const Installed&, const Installed&) = default;
};
// Worker -> learner, first on a control connection; Welcome answers.
struct Hello {
  std::string run_id, name;
  Endpoint data;  // other workers dial it here
  std::optional<BitRate> up, down;
  std::optional<Installed> installed;
  std::string place{};  // its location, as it reports it; "" if not reported
};
struct Welcome {
  WorkerId worker;
  Duration heartbeat{}, patience{};  // patience: how long the worker tolerates silence of the learner
  std::uint64_t unix_ms = 0;         // the learner's clock, which decides when certificates and manifests expire
  std::string application;
  Duration away_max{};  // how long the learner keeps the membership of a worker that is away
  Bytes policy{};       // size of the policy, which determines the stores' sizes; zero: unknown
};
struct Parent {
  WorkerId worker;
  Endpoint endpoint;
  std::uint64_t stripe_mask = 1;  // bit j: the child receives stripe j from this parent
  bool dials = false;             // the parent opens the connections
  friend bool operator==(const Parent&, const Parent&) = default;
};
// Learner -> worker: its parents from now on. Every stripe has exactly one.
struct Assign {
  std::uint32_t stripe_count = 1;
  std::vector<Parent> parents;
  std::optional<SignedGrant> grant{};  // the worker shows it to the parents
  // Ignores the grant: a new grant alone changes no parent.
  friend bool operator==(const Assign& a, const Assign& b) {
    return a.stripe_count == b.stripe_count && a.parents == b.parents;
  }
};
// Learner -> parent: grants to this child issued up to `issued` have ended.
struct Release {
  WorkerId child;
  std::uint64_t issued = 0;
};
// Learner -> parent: open the connection to this child.
struct DialChild {
  WorkerId worker;
  Endpoint endpoint;
};
// Worker -> learner: its parents cannot bring it to `target`.
struct NeedHelp {
  Version target;
  bool full_only = false;           // only a full snapshot helps: the worker cannot install deltas
  std::optional<Version> position;  // the worker's version
  bool stalled = false;  // parents and helper have sent nothing for long; false: one of them reported that it cannot
};
// Learner -> worker: the helper that brings it to `target`, the answer to NeedHelp.
struct Help {
  Parent from;
  Version target;
  bool full_only = false;
  std::optional<SignedGrant> grant{};
};

// A child's state and demand: the version it will have installed once its application is done, the stripes it receives
// over this edge, and its chunks of publications beyond that version.
struct Have {
  struct Item {
    PublicationId publication{};
    ChunkSet chunks;
    bool complete = false;
  };
  std::optional<Version> position;
  StripeMask wanted;
  std::map<PublicationKey, Item> items;
};
// Child -> parent, first on each connection of an edge.
struct PeerHello {
  std::string run_id;
  std::uint32_t stream = 0;            // of the edge's parallel connections, from 0
  std::optional<Version> catch_up_to;  // asks a helper to bring the child to this version; the child then closes
  bool full_only = false;              // wants one full snapshot: it cannot install deltas
  Have have;
  std::optional<SignedGrant> grant{};
  // The list is in the next message, because a frame of a peer that is not admitted holds at most kPendingPeerBytesMax.
  bool have_follows = false;
};
// Child -> parent.
struct MoreStreams {
  std::uint32_t streams = 1;  // number of parallel connections wanted; only if the parent dials
};
// Child -> parent: send this chunk again.
struct ChunkRequest {
  PublicationId publication{};
  std::uint32_t index = 0;
};
// Parent -> child: the parent's store cannot bring the child to `target`, or only at far more cost than a full
// snapshot.
struct CannotServe {
  Version target;
  bool snapshot_is_cheaper = false;
};
// Numbers of chunks that a node holds, by stripe.
struct Progress {
  PublicationId publication{};
  std::vector<std::uint32_t> chunks;  // by stripe
};
// Parent -> child, at every heartbeat. It also introduces a parent that has dialled.
struct EdgeStatus {
  std::optional<Signed> beacon;
  std::vector<Progress> progress;
};

// kLost: the connection broke. kUnreachable: it could not be opened. kSilent: nothing was heard for too long. kRefused:
// one end does not accept the other, or its messages.
enum class EdgeTroubleKind : std::uint8_t { kLost = 0, kUnreachable = 1, kSilent = 2, kRefused = 3 };
// Worker -> learner: the edge from this parent failed.
struct EdgeFailed {
  WorkerId parent;
  EdgeTroubleKind kind = EdgeTroubleKind::kLost;
  std::string reason;
};
// Worker -> learner: the parent sent a chunk whose proof fails.
struct Poisoned {
  WorkerId parent;
  PublicationId publication{};
  std::uint32_t index = 0;
};
// The bottleneck of an edge, as its sender sees it: the network path, a receiver that reads too slowly, or the sender's
// own rate limit.
enum class EdgeLimit : std::uint8_t { kNothingToSend = 0, kPath = 1, kReceiver = 2, kOwnLimit = 3 };
struct EdgeReport {
  WorkerId child;
  std::uint64_t bytes = 0;  // since the edge opened
  BitRate rate;             // while it had something to send
  EdgeLimit limit = EdgeLimit::kNothingToSend;
  std::uint32_t streams = 1;
};
// A publication that a worker holds whole and can serve.
struct Holding {
  PublicationKey key;
  std::uint64_t payload_bytes = 0;
};
struct Heartbeat {
  std::optional<Installed> installed;
  std::uint64_t chunk_bytes_in = 0, chunk_bytes_forwarded = 0, chunks_duplicate = 0, chunks_corrupt = 0;
  std::optional<BitRate> forwarding_rate;
  std::vector<Progress> progress;
  std::vector<EdgeReport> edges;
  std::vector<Holding> holdings;
  std::string application;
};
struct Draining {};  // worker -> learner: it hands its children over, and then leaves
struct Goodbye {
  std::string reason;
  bool run_ended = false;  // true: the learner has ended the run in good order
};
// Worker -> learner: a problem on this machine that an operator must solve.
struct Trouble {
  std::string text;
};
// Learner -> worker: information for the operator there.
struct Notice {
  std::string text;
};

// Signed bodies travel unchanged; proof.hpp opens them.
struct SignedAnnouncement : Signed {};
struct SignedManifest : Signed {};
struct SignedBeacon : Signed {};

using ControlMessage = std::variant<Enrol, Enrolled, Renew, Renewed, Hello, Welcome, Assign, DialChild, NeedHelp, Help,
                                    SignedAnnouncement, SignedManifest, SignedBeacon, PeerHello, Have, MoreStreams,
                                    ChunkRequest, CannotServe, EdgeStatus, EdgeFailed, Poisoned, Installed, Heartbeat,
                                    Draining, Goodbye, Trouble, SignedGrant, Release, Notice, Return>;

// Encodes a whole frame. Texts are cut to kTextBytesMax. The caller must respect all other limits (checked).
std::vector<std::byte> encode_control(const ControlMessage& message);
// kCorrupt: the message breaks the format or a limit; the error states what was expected and found.
Result<ControlMessage> decode_control(std::span<const std::byte> body);

}  // namespace echoline::overlay
