// Control messages as plain values, checked when they are decoded. The protobuf form is control.proto. Names, hosts and
// reasons are text on one line: whatever a machine sent, what is decoded has no control characters and is UTF-8.
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

inline constexpr std::uint32_t kProtocol = 4;
inline constexpr std::size_t kHaveItemsMax = 256;
inline constexpr std::size_t kHeartbeatApplicationBytesMax = 64 * 1024;
inline constexpr std::size_t kTextBytesMax = 1024;  // names, run ids, reasons
inline constexpr std::size_t kTokenBytesMax = 1024;
inline constexpr std::size_t kSignedBytesMax = 64 * 1024;
inline constexpr std::size_t kRevokedMax = 8192;  // ranges of workers in one beacon
inline constexpr std::size_t kReportsMax = 256;   // edges, holdings, progress items in one message
inline constexpr std::uint64_t kPolicyBytesMax = std::uint64_t{kChunksMax} * kChunkBytesMax;
inline constexpr Duration kStageMax = std::chrono::hours(24);  // of an acknowledgement; a longer one counts as that

// A message of the learner that any node can check and pass on: the body exactly as it was signed.
struct Signed {
  std::string body;
  trust::Signature signature{};
  friend bool operator==(const Signed&, const Signed&) = default;
};

// Lets a child be served by a parent; see grant.hpp.
struct SignedGrant : Signed {};

// ---- enrolment ----

struct Enrol {
  std::string token, instance;
  trust::PublicKey key{};
  trust::Signature proof{};  // by that key over the token: who enrols holds it
};
struct Enrolled {
  WorkerId worker;
  std::vector<std::byte> certificate, authority;  // DER
  std::uint64_t unix_ms = 0;                      // the learner's clock
};
// A machine that enrolled before, and whose certificate has ended, comes back with the key it has.
struct Return {
  trust::PublicKey key{};
  trust::Signature proof{};  // by that key over the run's fingerprint
};
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
  // In an acknowledgement, by the worker's clock: from the arrival of the last byte until the application was given the
  // policy, and from then until it was active. At most kStageMax each.
  Duration verify{}, install{};
  friend bool operator==(const Installed&, const Installed&) = default;
};
struct Hello {
  std::string run_id, name;
  Endpoint data;
  std::optional<BitRate> up, down;
  std::optional<Installed> installed;
  std::string place{};  // where it says that it stands; "" where it does not say
};
struct Welcome {
  WorkerId worker;
  Duration heartbeat{}, patience{};  // patience: silence of the learner the worker should put up with
  std::uint64_t unix_ms = 0;         // the learner's clock, by which certificates and manifests expire
  std::string application;
  Duration away_max{};  // how long the learner keeps the place of a worker that is away
  Bytes policy{};       // size of the policy, by which stores are measured; zero: not known
};
struct Parent {
  WorkerId worker;
  Endpoint endpoint;
  std::uint64_t stripes = 1;  // bit j: receives stripe j from this parent
  bool dials = false;         // the parent opens the connections
  friend bool operator==(const Parent&, const Parent&) = default;
};
// Every stripe has exactly one parent.
struct Assign {
  std::uint32_t stripes = 1;
  std::vector<Parent> parents;
  std::optional<SignedGrant> grant{};  // to be shown to the parents
  friend bool operator==(const Assign& a, const Assign& b) { return a.stripes == b.stripes && a.parents == b.parents; }
};
// Learner -> parent: what was granted to this child until then has ended.
struct Release {
  WorkerId child;
  std::uint64_t issued = 0;
};
// Learner -> parent: open the connection to this child.
struct DialChild {
  WorkerId worker;
  Endpoint endpoint;
};
// Worker -> learner: my parents cannot bring me to `target`.
struct NeedHelp {
  Version target;
  bool full_only = false;
  std::optional<Version> position;
  bool stalled = false;  // they, or whoever was to help, have brought nothing for long; otherwise one of them says so
};
struct Help {
  Parent from;
  Version target;
  bool full_only = false;
  std::optional<SignedGrant> grant{};
};

// What a child holds and wants: the version it will have installed when its application is done with what it was
// given, the stripes it receives over this edge, and the chunks of publications beyond its position.
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
struct PeerHello {
  std::string run_id;
  std::uint32_t stream = 0;            // of the edge's parallel connections, from 0
  std::optional<Version> catch_up_to;  // a helper: bring me there, then I close
  bool full_only = false;              // by one full snapshot: deltas could not be installed
  Have have;
  std::optional<SignedGrant> grant{};
  bool have_follows = false;  // in the next message: a stranger says no more than kStrangerBytesMax
};
struct MoreStreams {
  std::uint32_t streams = 1;  // parallel connections wanted, where the parent dials
};
struct ChunkRequest {
  PublicationId publication{};
  std::uint32_t index = 0;
};
// Parent -> child: my store cannot bring you to `target` (behind: it could, but a full snapshot is far cheaper).
struct CannotServe {
  Version target;
  bool behind = false;
};
// How many chunks of every stripe somebody holds.
struct Progress {
  PublicationId publication{};
  std::vector<std::uint32_t> chunks;  // by stripe
};
struct EdgeStatus {
  std::optional<Signed> beacon;
  std::vector<Progress> progress;
};

enum class EdgeTroubleKind : std::uint8_t { kLost = 0, kUnreachable = 1, kSilent = 2, kRefused = 3 };
struct EdgeFailed {
  WorkerId parent;
  EdgeTroubleKind kind = EdgeTroubleKind::kLost;
  std::string reason;
};
struct Poisoned {
  WorkerId parent;
  PublicationId publication{};
  std::uint32_t index = 0;
};
// What holds an edge back, as the sending side's kernel sees it.
enum class EdgeLimit : std::uint8_t { kNothingToSend = 0, kPath = 1, kReceiver = 2, kOwnLimit = 3 };
struct EdgeReport {
  WorkerId child;
  std::uint64_t bytes = 0;  // since the edge was opened
  BitRate rate;             // while there was something to send
  EdgeLimit limit = EdgeLimit::kNothingToSend;
  std::uint32_t streams = 1;
};
// A publication a worker holds whole and can serve to others.
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
struct Draining {};
struct Goodbye {
  std::string reason;
  bool run_ended = false;  // the learner's, in good order
};
// Worker -> learner: something here needs a person.
struct Trouble {
  std::string text;
};
// Learner -> worker: something that a person there should know.
struct Notice {
  std::string text;
};

// Signed bodies travel as they are and are opened in proof.hpp.
struct SignedAnnouncement : Signed {};
struct SignedManifest : Signed {};
struct SignedBeacon : Signed {};

using ControlMessage = std::variant<Enrol, Enrolled, Renew, Renewed, Hello, Welcome, Assign, DialChild, NeedHelp, Help,
                                    SignedAnnouncement, SignedManifest, SignedBeacon, PeerHello, Have, MoreStreams,
                                    ChunkRequest, CannotServe, EdgeStatus, EdgeFailed, Poisoned, Installed, Heartbeat,
                                    Draining, Goodbye, Trouble, SignedGrant, Release, Notice, Return>;

// A whole frame. Texts are cut to kTextBytesMax; other limits are the caller's duty (checked).
std::vector<std::byte> encode_control(const ControlMessage& message);
// kCorrupt with what was expected and found.
Result<ControlMessage> decode_control(std::span<const std::byte> body);

}  // namespace echoline::overlay
