// The types shared by the overlay and the application: endpoints, link limits, publications, reports.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "chains/topology.hpp"
#include "overlay/slice.hpp"

namespace echoline::overlay {

struct Endpoint {
  std::string host;  // an IPv4 or IPv6 address, or a name that is resolved at each dial
  std::uint16_t port = 0;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
std::string to_text(const Endpoint& endpoint);  // "127.0.0.1:7070", "[::1]:7070"

// Link rates to enforce, headers included; absent: unlimited. Chunks and application messages leave evenly, a few
// milliseconds' worth at a time, as a link of this rate would carry them. Control messages leave at once but count, so
// the rate holds over time.
struct LinkLimits {
  std::optional<BitRate> up, down;
};

// The largest message of the application. Messages travel in parts, which alternate with chunks and control messages.
inline constexpr std::size_t kMessageBytesMax = 64 * 1024 * 1024;

// 128 opaque bits; only compared.
using Digest = std::array<std::byte, 16>;
std::string to_hex(const Digest& digest);

// Names one publication: the first 16 bytes of the BLAKE3 of its signed announcement.
using PublicationId = std::array<std::byte, 16>;

// The bytes of a publication as a worker received them: pieces in memory, or one file if they exceed the memory budget.
class Payload {
 public:
  Payload() = default;
  explicit Payload(std::vector<Slice> pieces);
  // `file`: an open descriptor that stays valid while the payload lives, even if the file is deleted.
  Payload(std::shared_ptr<const int> file, std::uint64_t size) : size_(size), file_(std::move(file)) {}

  std::uint64_t size() const { return size_; }
  // Returns all bytes in one piece: the pieces themselves if each follows the one before in memory, otherwise a
  // gathered copy, or the mapped file. Can take long, so it is
  // not called on the overlay's thread. kIo: the file cannot be mapped.
  Result<Slice> bytes() const;
  // Passes all bytes to `use` in order, piece by piece. Reads a file piece by piece, too, so that it never lies in
  // memory as a whole. kIo: the file cannot be read.
  Status visit(const std::function<Status(std::span<const std::byte>)>& use) const;
  // The pieces in order; empty if the bytes are in a file.
  const std::vector<Slice>& pieces() const { return pieces_; }

 private:
  std::uint64_t size_ = 0;
  std::vector<Slice> pieces_;
  std::shared_ptr<const int> file_;
};

inline constexpr std::size_t kNoteBytesMax = 4096;  // of Publication::note

// One policy version as it travels: a full snapshot (no base), or a delta that needs `base` installed first.
struct Publication {
  PublicationId id{};
  Version version;
  std::optional<Version> base;
  Digest policy_digest{};  // digest of the policy after installation; defined by the application, opaque here
  std::string note;        // the learner's application describes the policy in it; signed with the publication
  Payload payload;
  // False for an intermediate version: a newer one is delivered right after it. The engine installs it but generates
  // nothing with it.
  bool activate = true;
};

// Bytes of a publication that is still arriving: a delta on the version delivered last, or a snapshot of a later one.
// They are proven to come from the learner, but the rest may never come. The parts of one publication come in order
// from its first byte, but only while they are in memory. Parts of a snapshot may come between those of deltas.
struct PublicationPart {
  PublicationId id{};
  Version version;
  std::optional<Version> base;
  std::uint64_t offset = 0;  // position of the first byte in the payload
  Slice bytes;
};

// A worker as the learner knows it.
struct MemberInfo {
  WorkerId id;
  std::string name;  // the worker's own name: its offer id
  Endpoint data;     // other workers dial it here for chunks
  std::optional<BitRate> up, down;
  std::string place{};  // the machine's location, as the worker reports it; "" if not reported
};

// Consecutive stored deltas.
struct StoredDeltas {
  Version from, to;
  Digest base_digest{}, digest{};  // of the policies of versions `from` and `to`
  std::string note;                // of the publication of `to`
  std::vector<Payload> deltas;
};

// The parts of the broadcast time T_b of one publication, for the worker that completed the quorum. The parts are
// consecutive and add up to T_b. A worker reports durations, because its clock differs from the learner's.
struct BroadcastParts {
  // From the start of the publication until its last byte was encoded, without hashing and signing. The first chunks
  // leave meanwhile.
  Duration encode{};
  // Hashing and signing of chunks, and the time from the last byte until the digest was on disk and the publication
  // closed.
  Duration seal{};
  Duration send{};         // until the worker had its last byte: all hops, with the proof at each of them.
  Duration verify{};       // until the engine was given the policy: proof of the last chunks, the floor on disk
  Duration install{};      // until the policy was active: the token in progress, decoding, the digest of the result.
  Duration acknowledge{};  // the way back to the learner: the delay measured when dialling the worker
};

// The broadcast of one publication, reported once a quorum of the workers active at publication has acknowledged it.
struct BroadcastReport {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  Bytes payload;
  Bytes chunk;              // size of a chunk
  Duration t_b{};           // from the start of the publication until the quorum had acknowledged the installation
  BroadcastParts parts;     // of t_b
  std::size_t workers = 0;  // active at publication
  // Workers that had acknowledged at the end of t_b. The broadcast waits for neither the slowest few nor a worker far
  // behind.
  std::size_t acknowledged = 0;
  Bytes learner_bytes_sent;   // sent by the learner on its data connections during t_b, headers included
  chains::Topology topology;  // at publication
  std::size_t depth = 0;      // longest path from the learner, in hops
};

struct WorkerView {
  MemberInfo info;
  std::optional<Version> installed;  // as acknowledged
  Digest installed_digest{};
  Bytes bytes_in, bytes_forwarded;  // chunk bytes received and forwarded, from its heartbeats
  Bytes bytes_delivered;            // chunk bytes its children report to have received from it
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
  std::optional<BitRate> forwarding_rate;  // measured by the worker while it had chunks to forward
  bool silent = false;                     // no heartbeat for too long, so no place in the topology
  bool reachable = false;                  // the learner could dial the worker's advertised address
  std::optional<Duration> delay;           // one way from the learner, measured when dialling the worker
  bool quarantined = false;                // may not forward: several workers accuse it, or it accuses many
  std::string application_bytes;           // the application's part of its last heartbeat
};

// A valid heartbeat of a worker.
struct HeartbeatReceived {
  WorkerId worker;
  Bytes bytes_in, bytes_forwarded, bytes_delivered;  // as in WorkerView
  std::string application;                           // the application's part
};

// A hop that slowed a broadcast and was routed around.
struct SlowHop {
  WorkerId from, to;
  std::string text;  // "worker 7 -> 8 limited by sender uplink"
};

// A worker that is unreachable and may come back.
struct AwayView {
  MemberInfo info;
  std::string reason;
};

struct LearnerStats {
  std::vector<WorkerView> workers;  // by id
  std::vector<AwayView> away;       // by id
  chains::Topology topology;
  Bytes chunk_bytes_sent;                               // chunk payload bytes sent to seeds and late joiners
  Bytes bytes_sent, bytes_received;                     // everything on the wire, control included, before encryption
  std::uint64_t joined = 0, lost = 0, quarantined = 0;  // numbers of joins, losses and quarantines so far
  std::uint64_t floods = 0;                             // workers expelled for exceeding their message budgets
  std::size_t known_publications = 0;                   // the largest number of publications remembered for one child
  std::vector<SlowHop> slow_hops;                       // the most recent
};

struct WorkerStats {
  std::optional<WorkerId> id;
  std::vector<WorkerId> parents;  // kLearnerId for a seed
  std::optional<Version> installed;
  Bytes chunk_bytes_in, chunk_bytes_forwarded;
  Bytes bytes_in, bytes_out;  // everything on the wire, control included, before encryption
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
  Bytes memory, memory_peak;           // chunks held in memory
  std::size_t known_publications = 0;  // the largest number of publications remembered for one child
};

}  // namespace echoline::overlay
