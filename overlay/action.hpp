// Actions: the requests of a protocol core to its driver, and what it reports and delivers to the application.
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

// The purpose of a connection. A node that enrols shows no certificate; on all other connections it does. Data
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
// Stops or resumes reading on this connection, or on all connections if `conn` is absent.
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
// Writes the announcement, a chunk or the manifest of a publication to its spool, the publication's files on this disk:
// `record` (frame bytes) to the end of the log file, `data` to its place in the payload file. on_spooled() follows for
// a chunk.
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
// Deletes the spool of a publication.
struct DropSpool {
  PublicationId publication{};
};

// ---- the application of the learner ----

// A worker has joined, for the first time or again after ReportWorkerAway.
struct ReportWorkerJoined {
  MemberInfo member;
};
// The worker is unreachable: its leases are void, its membership is kept for LearnerRules::away_max.
struct ReportWorkerAway {
  WorkerId worker;
  std::string reason;
};
// The worker is gone for good, or expelled.
struct ReportWorkerLost {
  WorkerId worker;
  std::string reason;
};
// A problem on the worker's machine that an operator must solve.
struct ReportWorkerTrouble {
  WorkerId worker;
  std::string text;
};
// The worker has acknowledged that it installed this version.
struct ReportInstalled {
  WorkerId worker;
  Version version;
  Digest policy_digest{};
};
// A message of the worker's application.
struct DeliverWorkerMessage {
  WorkerId worker;
  std::string bytes;
};
struct ReportHeartbeat {  // only if LearnerConfig::reports_heartbeats
  HeartbeatReceived heartbeat;
};
// A quorum has installed a publication.
struct ReportBroadcast {
  BroadcastReport report;
};
struct ReportTopology {
  chains::Topology topology;
};
// Asks for a publication that brings a late worker to version `current` and is not stored yet: the stored deltas from
// `from` folded into one, or a full snapshot. At most one request at a time is open.
struct RequestCatchUp {
  Version current;
  std::optional<Version> from;  // absent: a full snapshot
};
// The learner moves the fleet to another kind of topology.
struct ReportTopologyChoice {
  std::string text;  // the new kind, and the reason
};
struct ReportSlowHop {
  SlowHop hop;
};

// ---- the application of a worker ----

// The learner has admitted this worker, for the first time or again.
struct ReportWelcome {
  WorkerId self;
  std::string welcome;  // the first message of the learner's application
};
// The next publication to install.
struct DeliverPublication {
  Publication publication;
  // If set, the payload is on disk: the driver sets `publication.payload` to this publication's spool. Absent: the
  // payload is in memory.
  std::optional<PublicationId> spooled;
  std::uint64_t bytes = 0;  // of the payload
};
struct DeliverPart {  // only if MemberConfig::delivers_parts
  PublicationPart part;
};
// A message of the learner's application.
struct DeliverLearnerMessage {
  std::string bytes;
};
// The learner is unreachable. The worker keeps forwarding and tries to come back; ReportWelcome follows then.
struct ReportLearnerAway {
  std::string reason;
};
// The core has ended; this is its last action.
struct ReportEnd {
  std::string reason;
  bool in_order = false;  // a clean exit: the run has ended, or this side left
};

}  // namespace act

using Action =
    std::variant<act::Dial, act::Send, act::Close, act::Admit, act::SetReading, act::UseCertificate, act::SaveState,
                 act::Spool, act::ReadChunk, act::DropSpool, act::ReportWorkerJoined, act::ReportWorkerAway,
                 act::ReportWorkerLost, act::ReportWorkerTrouble, act::ReportInstalled, act::DeliverWorkerMessage,
                 act::ReportHeartbeat, act::ReportBroadcast, act::ReportTopology, act::RequestCatchUp,
                 act::ReportTopologyChoice, act::ReportSlowHop, act::ReportWelcome, act::DeliverPublication,
                 act::DeliverPart, act::DeliverLearnerMessage, act::ReportLearnerAway, act::ReportEnd>;

}  // namespace echoline::overlay
