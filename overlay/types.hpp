// What the overlay talks about with the application: endpoints, link limits, publications, reports.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"

namespace echoline::overlay {

struct Endpoint {
  std::string host;  // a numeric IPv4 address
  std::uint16_t port = 0;
  friend bool operator==(const Endpoint&, const Endpoint&) = default;
};
std::string to_text(const Endpoint& endpoint);  // "127.0.0.1:7070"

// Emulated or imposed link rates; absent means as fast as the machine goes. Chunks leave evenly, a few milliseconds'
// worth at a time, when a link of this rate would have carried them. Control and application messages leave at once and
// occupy the link all the same, so that chunks wait and the rate holds over time.
struct LinkLimits {
  std::optional<BitRate> up, down;
};

// 128 opaque bits; compared, never interpreted.
using Digest = std::array<std::byte, 16>;
std::string to_hex(const Digest& digest);
using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;

// One policy version as it travels: a full snapshot (no base), or a delta that needs `base` installed first.
struct Publication {
  Version version;
  std::optional<Version> base;
  Digest policy_digest{};  // digest of the policy after installation; the application's own, opaque here
  SharedBytes payload;
};

// A worker as the learner knows it.
struct MemberInfo {
  WorkerId id;
  std::string name;  // what the worker calls itself: its offer id
  Endpoint data;     // where other workers dial it for chunks
  std::optional<BitRate> up, down;
};

// Chains in forwarding order, seeds first.
using ChainIds = std::vector<std::vector<WorkerId>>;

// One publication's broadcast, reported once the quorum of the workers active at publication has acknowledged it.
struct BroadcastReport {
  Version version;
  std::optional<Version> base;  // absent: a full snapshot
  Bytes payload;
  Duration t_b{};            // publish() until the quorum had acknowledged the installation
  std::size_t workers = 0;   // active when it was published
  Bytes learner_bytes_sent;  // bytes that left the learner on its data connections meanwhile, headers included
  ChainIds topology;         // when it was published
  std::size_t depth = 0;     // longest chain
};

struct WorkerView {
  MemberInfo info;
  std::optional<Version> installed;  // as acknowledged
  Digest installed_digest{};
  Bytes bytes_in, bytes_forwarded;  // chunk bytes received and forwarded, by its own heartbeats
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
  std::optional<BitRate> forwarding_rate;  // measured by the worker while it had chunks to forward
  std::string app_bytes;                   // the application's part of its last heartbeat
};

struct LearnerStats {
  std::vector<WorkerView> workers;  // by id
  ChainIds topology;
  Bytes chunk_bytes_sent;            // chunk payload bytes sent to seeds and late joiners
  Bytes bytes_sent, bytes_received;  // everything on the wire, control included
  std::uint64_t joined = 0, lost = 0;
};

struct WorkerStats {
  std::optional<WorkerId> id;
  std::optional<WorkerId> parent;  // absent before the first assignment; kLearnerId for a seed
  std::optional<Version> installed;
  Bytes chunk_bytes_in, chunk_bytes_forwarded;
  Bytes bytes_in, bytes_out;  // everything on the wire, control included
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;
};

}  // namespace echoline::overlay
