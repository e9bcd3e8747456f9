// What the overlay talks about with the application: endpoints, link limits, publications, reports.
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
  std::string host;  // an IPv4 or IPv6 address, or a name that is looked up when it is dialled
  std::uint16_t port = 0;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
std::string to_text(const Endpoint& endpoint);  // "127.0.0.1:7070", "[::1]:7070"

// Imposed link rates, with all headers; absent means as fast as the machine goes. Chunks and application messages leave
// evenly, a few milliseconds' worth at a time, when a link of this rate would have carried them. Control messages leave
// at once and occupy the link all the same, so that the rate holds over time.
struct LinkLimits {
  std::optional<BitRate> up, down;
};

// The largest message of the application. Messages travel in parts, in turn with chunks and control messages.
inline constexpr std::size_t kMessageBytesMax = 64 * 1024 * 1024;

// 128 opaque bits; compared, never interpreted.
using Digest = std::array<std::byte, 16>;
std::string to_hex(const Digest& digest);

// Names one publication: the first 16 bytes of the BLAKE3 of its signed announcement.
using PublicationId = std::array<std::byte, 16>;

// The bytes of a publication as a worker received them: pieces in memory, or one file when they are too many for it.
class Payload {
 public:
  Payload() = default;
  explicit Payload(std::vector<Slice> pieces);
  // `file`: an open descriptor that stays valid while the payload lives, even if the file is deleted.
  Payload(std::shared_ptr<const int> file, std::uint64_t size) : size_(size), file_(std::move(file)) {}

  std::uint64_t size() const { return size_; }
  // All bytes in one piece: as they are, gathered, or mapped from the file. Not on the overlay's thread. kIo.
  Result<Slice> bytes() const;
  // Hands over all bytes in order, a piece at a time, without holding more than one that was not in memory. kIo.
  Status visit(const std::function<Status(std::span<const std::byte>)>& use) const;
  // In order, when they are in memory.
  const std::vector<Slice>& pieces() const { return pieces_; }

 private:
  std::uint64_t size_ = 0;
  std::vector<Slice> pieces_;
  std::shared_ptr<const int> file_;
};

// One policy version as it travels: a full snapshot (no base), or a delta that needs `base` installed first.
inline constexpr std::size_t kNoteBytesMax = 4096;
struct Publication {
  PublicationId id{};
  Version version;
  std::optional<Version> base;
  Digest policy_digest{};  // digest of the policy after installation; the application's own, opaque here
  std::string note;        // what the learner's application tells of the policy, signed with the publication
  Payload payload;
  // False for what only leads to a newer version that is delivered right behind it: install it, but let nothing
  // be generated with it.
  bool activate = true;
};

// Bytes of what is not whole yet, a delta on the version that was delivered last or a snapshot of a later one: proven
// to be the learner's, but nothing says yet that the rest will come. Those of one publication come in order, from the
// first byte on, as far as they are in memory; a snapshot's may come between those of deltas.
struct PublicationPart {
  PublicationId id{};
  Version version;
  std::optional<Version> base;
  std::uint64_t offset = 0;  // of its first byte in the payload
  Slice bytes;
};

// A worker as the learner knows it.
struct MemberInfo {
  WorkerId id;
  std::string name;  // what the worker calls itself: its offer id
  Endpoint data;     // where other workers dial it for chunks
  std::optional<BitRate> up, down;
  std::string place{};  // as it says; "" where it does not say
};

// Deltas that are stored, one after the other.
struct StoredDeltas {
  Version from, to;
  Digest base_digest{}, digest{};  // of the policies before and after them
  std::string note;                // of the policy after them
  std::vector<Payload> deltas;
};

// Where the time T_b of one broadcast went, on the way of the worker that completed the quorum. The parts follow each
// other and add up to T_b. A worker's clock is not the learner's, so it reports durations.
struct BroadcastParts {
  Duration
      encode{};  // until the last byte of the publication was made, without `seal`; the first chunks leave meanwhile
  Duration
      seal{};  // hashing and signing of chunks meanwhile; then until the digest was on disk and the publication closed
  Duration send{};         // then until the worker had its last byte: over all hops, with the proof at each of them
  Duration verify{};       // then until its engine was given the policy: proof of what came last, the floor on disk
  Duration install{};      // then until the policy was active: the token under way, decoding, the digest of the result
  Duration acknowledge{};  // the way back to the learner: the delay that dialling the worker has shown
};

// One publication's broadcast, reported once the quorum of the workers active at publication has acknowledged it.
struct BroadcastReport {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  Bytes payload;
  Bytes chunk;              // of a piece of it
  Duration t_b{};           // begin of the publication until the quorum had acknowledged the installation
  BroadcastParts parts;     // of t_b
  std::size_t workers = 0;  // active when it was published
  std::size_t acknowledged =
      0;                      // of them, at that time: all but a few that nobody waits for, or one that is far behind
  Bytes learner_bytes_sent;   // bytes that left the learner on its data connections meanwhile, headers included
  chains::Topology topology;  // when it was published
  std::size_t depth = 0;      // longest way from the learner, in hops
};

struct WorkerView {
  MemberInfo info;
  std::optional<Version> installed;  // as acknowledged
  Digest installed_digest{};
  Bytes bytes_in, bytes_forwarded;  // chunk bytes received and forwarded, by its own heartbeats
  Bytes bytes_delivered;            // that its children say came from it
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
  std::optional<BitRate> forwarding_rate;  // measured by the worker while it had chunks to forward
  bool silent = false;                     // not heard for too long: it has no place in the topology
  bool reachable = false;                  // dialled back at its advertised address
  std::optional<Duration> delay;           // one way from the learner, as dialling it back has shown
  bool quarantined = false;                // forwards nothing, by what several say of it or it says of many
  std::string app_bytes;                   // the application's part of its last heartbeat
};

// A worker's heartbeat that is as it should be.
struct HeardFrom {
  WorkerId worker;
  Bytes bytes_in, bytes_forwarded, bytes_delivered;  // as in its view
  std::string application;                           // what rides on it
};

// A hop that was found to hold a broadcast back, and was routed around.
struct SlowHop {
  WorkerId from, to;
  std::string text;  // "worker 7 -> 8 limited by sender uplink"
};

// A worker out of reach, which may come back.
struct AwayView {
  MemberInfo info;
  std::string reason;
};

struct LearnerStats {
  std::vector<WorkerView> workers;  // by id
  std::vector<AwayView> away;       // by id
  chains::Topology topology;
  Bytes chunk_bytes_sent;            // chunk payload bytes sent to seeds and late joiners
  Bytes bytes_sent, bytes_received;  // everything on the wire, control included, before encryption
  std::uint64_t joined = 0, lost = 0, quarantined = 0;
  std::uint64_t floods = 0;            // workers expelled for saying more than their budgets allow
  std::size_t known_publications = 0;  // remembered for the child for which most are
  std::vector<SlowHop> slow_hops;      // the most recent
};

struct WorkerStats {
  std::optional<WorkerId> id;
  std::vector<WorkerId> parents;  // kLearnerId for a seed
  std::optional<Version> installed;
  Bytes chunk_bytes_in, chunk_bytes_forwarded;
  Bytes bytes_in, bytes_out;  // everything on the wire, control included, before encryption
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
  Bytes memory, memory_peak;           // chunks held in memory
  std::size_t known_publications = 0;  // remembered for the child for which most are
};

}  // namespace echoline::overlay
