// Actions: the requests of a protocol core to its driver, and its reports to the application.
#pragma once
#include <string>
#include <variant>
#include <vector>

#include "overlay/slice.hpp"
#include "overlay/types.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

// A connection of one node. The core numbers dialled connections (odd), the driver accepted ones (even).
using ConnId = Id<struct ConnTag>;

namespace act {

// ---- the network ----

// The purpose of a connection. Enrolment is anonymous; every other connection shows the node's certificate. Data
// connections use the congestion control and socket settings of bulk traffic.
enum class Service : std::uint8_t { kEnrol, kControl, kData };
struct Dial {
  ConnId conn;
  Endpoint to;
  Service service = Service::kControl;
  // The peer that must answer: kLearnerId or a worker. If another node answers, the dial fails.
  WorkerId expected;
};
// Sends `head`, then `tail`, after the bytes of all earlier Sends on this connection. on_sent() reports progress.
struct Send {
  ConnId conn;
  Slice head, tail;
};
// Closes the connection once all sent bytes have left; the driver bounds the wait. The driver reports no further event
// of this connection.
struct Close {
  ConnId conn;
};
// The peer is known: the driver's decoder of this connection accepts every type of frame from now on. Before, it
// accepts only short first messages, so that an unknown peer cannot occupy memory.
struct Admit {
  ConnId conn;
};
// Stops or resumes reading on this connection; if `conn` is absent, on all.
struct SetReading {
  std::optional<ConnId> conn;
  bool on = true;
};
// Connections made from now on use this certificate. [DER]
struct UseCertificate {
  std::vector<std::byte> certificate, authority;
};

// ---- the disk; only if the node has one ----

// Replaces the node's state file atomically and durably. on_saved() follows, in order.
struct SaveState {
  std::string bytes;
};
// Keeps the announcement, a chunk or the manifest of a publication: `record` (frame bytes) goes to the end of its log,
// `data` to its place in the payload. on_spooled() follows for a chunk.
struct Spool {
  PublicationId publication{};
  Slice record;
  std::optional<std::uint32_t> chunk;  // absent: announcement or manifest
  std::uint64_t offset = 0;            // of `data` in the payload
  Slice data;
};
// Reads a chunk back; on_chunk_read() follows.
struct ReadChunk {
  PublicationId publication{};
  std::uint32_t chunk = 0;
  std::uint64_t offset = 0;
  std::uint32_t length = 0;
};
// Deletes the spool: all that Spool has kept of a publication.
struct DropSpool {
  PublicationId publication{};
};

// ---- the application of the learner ----

// A worker has joined, for the first time or again after WorkerAway.
struct Joined {
  MemberInfo member;
};
struct WorkerAway {  // unreachable: its leases are void, its membership is kept for LearnerRules::away_max
  WorkerId worker;
  std::string reason;
};
struct Lost {  // gone for good, or expelled
  WorkerId worker;
  std::string reason;
};
// A problem on the worker's machine that an operator must solve.
struct WorkerTrouble {
  WorkerId worker;
  std::string text;
};
// The worker has acknowledged that it installed this version.
struct Acked {
  WorkerId worker;
  Version version;
  Digest policy_digest{};
};
// A message of the worker's application.
struct MessageFrom {
  WorkerId worker;
  std::string bytes;
};
using overlay::HeartbeatReceived;  // only if the application asked for heartbeats
struct BroadcastDone {
  BroadcastReport report;
};
struct TopologyChanged {
  chains::Topology topology;
};
// Asks for a publication that brings a late worker to version `current` and is not stored yet: the stored deltas from
// `from` folded into one, or a full snapshot. At most one request at a time is open.
struct NeedCatchUp {
  Version current;
  std::optional<Version> from;  // absent: a full snapshot
};
// The learner moves the fleet to another kind of topology.
struct ChoseTopology {
  std::string text;  // the new kind, and the reason
};
struct FoundSlowHop {
  SlowHop hop;
};

// ---- the application of a worker ----

// The learner has admitted this worker, for the first time or again.
struct Welcomed {
  WorkerId self;
  std::string welcome;  // the first message of the learner's application
};
// The next publication to install.
struct Deliver {
  Publication publication;
  // If set, `publication` has no payload yet: the driver opens this publication's spool as its payload. Absent: the
  // payload is in memory.
  std::optional<PublicationId> spooled;
  std::uint64_t bytes = 0;  // of the payload
};
struct DeliverPart {  // only if MemberConfig::delivers_parts
  PublicationPart part;
};
// A message of the learner's application.
struct Message {
  std::string bytes;
};
// The learner is unreachable. The worker keeps forwarding and tries to come back; Welcomed follows then.
struct Away {
  std::string reason;
};
struct Disconnected {  // the last action of a core
  std::string reason;
  bool in_order = false;  // a clean exit: the run has ended, or this side left
};

}  // namespace act

using Action =
    std::variant<act::Dial, act::Send, act::Close, act::Admit, act::SetReading, act::UseCertificate, act::SaveState,
                 act::Spool, act::ReadChunk, act::DropSpool, act::Joined, act::WorkerAway, act::Lost,
                 act::WorkerTrouble, act::Acked, act::MessageFrom, act::HeartbeatReceived, act::BroadcastDone,
                 act::TopologyChanged, act::NeedCatchUp, act::ChoseTopology, act::FoundSlowHop, act::Welcomed,
                 act::Deliver, act::DeliverPart, act::Message, act::Away, act::Disconnected>;

}  // namespace echoline::overlay
