// Simulates one learner that broadcasts to N workers under virtual time, with the real protocol cores. Compares the
// time with the physical lower bound and the formula, and checks that all workers end with the same bytes.
#pragma once
#include <string>
#include <vector>

#include "base/result.hpp"
#include "chains/topology.hpp"
#include "overlay/types.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct WorkerKill {
  std::size_t worker = 0;  // index in the order of joining
  Duration at{};           // after the first publication
  Death death = Death::kCrash;
};

struct BroadcastScenario {
  std::size_t workers = 1;           // present from the start
  std::vector<Duration> late_joins;  // when further workers join, after the first publication
  BitRate learner_up = BitRate::from_mbit_per_s(24);
  overlay::LinkLimits worker_link;                // for workers without an entry in worker_links
  std::vector<overlay::LinkLimits> worker_links;  // for the first workers, late ones included
  // True: the protocol cores pace their sending to the limits, as in a user's emulated WAN, and the network is
  // unlimited. False: the simulated network enforces the limits.
  bool cores_limit_rate = false;
  Duration delay{};  // one way, between nodes whose regions do not state it
  chains::Regions regions;
  std::vector<std::uint32_t> worker_regions;  // of the first workers; 0 for all others
  bool regions_known = true;                  // the learner knows the regions
  Duration jitter{};
  Bytes payload{1'000'000};  // of the first publication, a full snapshot
  Bytes delta{200'000};      // of each later publication, on the version before; zero: full snapshots
  Bytes chunk{64 * 1024};
  std::size_t publications = 1;
  Duration publish_every = std::chrono::seconds(1);
  bool one_at_a_time = false;  // publish_every then runs from the previous publication's quorum
  chains::TopologyPolicy topology = chains::TopologyPolicy::kEcho2;
  // `topology` is the first one; the learner changes it if another is expected to be sufficiently faster.
  bool chooses_topology = false;
  BitRate chain_rate = BitRate::from_mbit_per_s(8);
  double quorum = 0.9;
  Bytes learner_store{1ull << 30}, worker_store{256ull << 20};
  Duration heartbeat = std::chrono::milliseconds(500);
  std::vector<WorkerKill> kills;
  // Interval at which a forwarding worker dies and a new one joins, until the last publication.
  std::optional<Duration> replace_every;
  Death replacement_death = Death::kCrash;
  std::size_t poisoners = 0;     // forwarding workers that flip a bit ...
  double poisoned_share = 0.01;  // ... in this share of the chunks
  // Each flips a byte of the next chunk that the first worker forwards; times as for kills.
  std::vector<Duration> corruptions;
  std::uint64_t seed = 1;
  Duration time_max = std::chrono::hours(1);  // virtual time after which the scenario fails
};

struct PublicationTimes {
  Version version;
  // Time until the quorum had installed, as the learner measured it; absent if the quorum was never reached.
  std::optional<Duration> t_b;
  // Per worker: the time from publication until it, or a newer version, was installed.
  std::vector<std::pair<WorkerId, Duration>> completions;
  Duration last() const;
};

struct BroadcastResult {
  std::vector<PublicationTimes> publications;
  bool finished = false;               // every live worker has the last version, byte for byte
  std::string unfinished;              // if not finished: the versions of the workers
  Bytes learner_bytes_sent;            // all bytes
  Bytes learner_chunk_bytes_sent;      // chunks alone
  Bytes worker_chunk_bytes_in;         // summed over workers
  Bytes bytes_crossed;                 // bytes sent from one region to another
  std::uint64_t chunks_delivered = 0;  // to applications, each compared with the learner's chunk
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0, snapshots_asked = 0;
  std::size_t workers_replaced = 0;
  std::vector<std::uint64_t> poisoned;  // per poisoner, chunks with a flipped bit
  std::size_t poisoners_quarantined = 0, others_quarantined = 0;
  Duration lower_bound{};     // chains::lower_bound() of the first publication
  Duration predicted{};       // chains::broadcast_time() of the first publication's topology, last worker
  chains::Topology topology;  // of the first publication
  Duration virtual_time{};
  std::uint64_t trace_hash = 0, events = 0;
};

// kInvalid for an inconsistent scenario. Deterministic.
Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario);

}  // namespace echoline::sim
