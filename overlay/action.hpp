// What a protocol core asks of its driver, and what it tells its application.
#pragma once
#include <string>
#include <variant>
#include <vector>

#include "overlay/slice.hpp"
#include "overlay/types.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

// A connection of one node. The core numbers the ones it dials (odd), the driver those it accepts (even).
using ConnId = Id<struct ConnTag>;

namespace act {

// ---- the network ----

// What a connection is for: enrolment is anonymous, everything else shows the node's certificate; data connections get
// the congestion control and socket settings of bulk traffic.
enum class Service : std::uint8_t { kEnrol, kControl, kData };
struct Dial {
  ConnId conn;
  Endpoint to;
  Service service = Service::kControl;
  // Who must answer: kLearnerId, or a worker; with anybody else the dial fails.
  WorkerId expected;
};
// `head`, then `tail`, in order after everything sent before on this connection; on_sent() reports progress.
struct Send {
  ConnId conn;
  Slice head, tail;
};
// After what was sent has left (the driver bounds the wait). No further event comes for this connection.
struct Close {
  ConnId conn;
};
// The peer is known: its decoder may take every type of frame.
struct Admit {
  ConnId conn;
};
// Stop or resume reading on this connection, or on all.
struct SetReading {
  std::optional<ConnId> conn;
  bool on = true;
};
// Use this certificate for connections from now on. [DER]
struct UseCertificate {
  std::vector<std::byte> certificate, authority;
};

// ---- the disk; nothing is asked for when the core was told that there is none ----

// Replace the node's state file atomically and durably; on_saved() follows, in order.
struct SaveState {
  std::string bytes;
};
// Keep the announcement, a chunk or the manifest of a publication: `record` (frame bytes) goes to the end of its log,
// `data` to its place in the payload. on_spooled() follows for a chunk.
struct Spool {
  PublicationId publication{};
  Slice record;
  std::optional<std::uint32_t> chunk;  // absent: announcement or manifest
  std::uint64_t offset = 0;            // of `data` in the payload
  Slice data;
};
// Read a chunk back; on_unspooled() follows.
struct Unspool {
  PublicationId publication{};
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint32_t length = 0;
};
struct DropSpool {
  PublicationId publication{};
};

// ---- the application of the learner ----

struct Joined {  // again when it came back after WorkerAway
  MemberInfo member;
};
struct WorkerAway {  // out of reach: what it was doing is void, its place is kept for LearnerConfig::away_max
  WorkerId worker;
  std::string reason;
};
struct Lost {  // gone for good, or told to leave
  WorkerId worker;
  std::string reason;
};
struct TroubleOf {
  WorkerId worker;
  std::string text;
};
struct Acked {
  WorkerId worker;
  Version version;
  Digest policy_digest{};
};
struct MessageFrom {
  WorkerId worker;
  std::string bytes;
};
using overlay::HeardFrom;  // where the application wants to hear of heartbeats
struct BroadcastDone {
  BroadcastReport report;
};
struct TopologyChanged {
  chains::Topology topology;
};
// A late worker needs a publication that is not stored: of `current`, as the stored deltas from `from` folded into one,
// or as a full snapshot. One at a time.
struct NeedCatchUp {
  Version current;
  std::optional<Version> from;  // absent: a full snapshot
};
// The fleet is moved to another kind of topology.
struct ChoseTopology {
  std::string text;  // which, and why
};
struct FoundSlowHop {
  SlowHop hop;
};

// ---- the application of a worker ----

struct Welcomed {
  WorkerId self;
  std::string welcome;
};
struct Deliver {
  Publication publication;
  // The payload lies in the spool of this publication: the driver opens it.
  std::optional<PublicationId> spooled;
  std::uint64_t bytes = 0;
};
struct DeliverPart {  // where MemberConfig::delivers_parts
  PublicationPart part;
};
struct Message {
  std::string bytes;
};
// The learner is out of reach; the worker goes on forwarding and tries to come back (Welcomed follows then).
struct Away {
  std::string reason;
};
struct Disconnected {  // the last action of a core
  std::string reason;
  bool in_order = false;  // the run has ended, or this side wanted to leave
};

}  // namespace act

using Action = std::variant<act::Dial, act::Send, act::Close, act::Admit, act::SetReading, act::UseCertificate,
                            act::SaveState, act::Spool, act::Unspool, act::DropSpool, act::Joined, act::WorkerAway,
                            act::Lost, act::TroubleOf, act::Acked, act::MessageFrom, act::HeardFrom, act::BroadcastDone,
                            act::TopologyChanged, act::NeedCatchUp, act::ChoseTopology, act::FoundSlowHop,
                            act::Welcomed, act::Deliver, act::DeliverPart, act::Message, act::Away, act::Disconnected>;

}  // namespace echoline::overlay
