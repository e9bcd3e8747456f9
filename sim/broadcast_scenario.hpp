// Simulates one learner that broadcasts publications to N workers under virtual time, with the real protocol cores of
// overlay/. Compares the delivery time with the physical lower bound and the prediction of chains/, and checks that all
// workers end with the same bytes.
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
  std::size_t workers = 1;  // present from the start
  // Nodes of the trainer, which have the indices after those workers. A fast local network connects them with the
  // learner, so they need cores_limit_rate.
  std::size_t nodes = 0;
  BitRate node_up = BitRate::from_mbit_per_s(24);  // uplink of each towards the workers
  std::vector<Duration> late_joins;                // times after the first publication at which one more worker joins
  BitRate learner_up = BitRate::from_mbit_per_s(24);  // the learner's uplink
  overlay::LinkLimits worker_link;                    // for workers without an entry in worker_links
  std::vector<overlay::LinkLimits> worker_links;      // links of the first workers, in the order of joining
  // True: the protocol cores limit their own sending, and the network is unlimited. False: the simulated network
  // enforces the limits.
  bool cores_limit_rate = false;
  bool links_offered = false;  // the learner knows the links from offers, though the workers do not state them
  Duration delay{};            // one-way delay between nodes whose regions define none
  chains::Regions regions;
  std::vector<std::uint32_t> worker_regions;  // regions of the first workers; all others are in region 0
  bool regions_known = true;                  // false: the learner plans without regions
  Duration jitter{};                          // longest random addition to a delay
  Bytes payload{1'000'000};                   // size of a full snapshot; the first publication is one
  Bytes delta{200'000};  // size of each later publication, a delta to the version before; zero: full snapshots
  Bytes chunk{64 * 1024};
  std::size_t publications = 1;
  Duration publish_every = std::chrono::seconds(1);
  // True: a version is published only after the quorum, a share `quorum` of the workers, has installed the previous
  // one, and publish_every runs from that time.
  bool one_at_a_time = false;
  chains::TopologyPolicy topology = chains::TopologyPolicy::kEcho2;
  // True: `topology` is only the first one. The learner changes to another topology that it expects to be clearly
  // faster.
  bool chooses_topology = false;
  BitRate chain_rate = BitRate::from_mbit_per_s(8);  // planned rate of a chain
  double quorum = 0.9;
  Bytes learner_store{1ull << 30}, worker_store{256ull << 20};  // memory for publications
  Duration heartbeat = std::chrono::milliseconds(500);
  std::vector<WorkerKill> kills;
  // At this interval, a random forwarding worker dies and a new one joins, until the last publication.
  std::optional<Duration> replace_every;
  Death replacement_death = Death::kCrash;
  std::size_t poisoners = 0;     // number of forwarding workers that corrupt chunks
  double poisoned_share = 0.01;  // share of their forwarded chunks in which they flip one bit
  // Times after the first publication. At each, the next chunk that the first worker forwards is corrupted.
  std::vector<Duration> corruptions;
  std::uint64_t seed = 1;
  Duration time_max = std::chrono::hours(1);  // virtual time after which the scenario fails
};

struct PublicationTimes {
  Version version;
  // Time from publication until the quorum had installed the version, as the learner measured it. Absent if the quorum
  // was never reached.
  std::optional<Duration> t_b;
  // Per worker: the time from publication until this version or a newer one was installed.
  std::vector<std::pair<WorkerId, Duration>> completions;
  Duration last() const;  // the longest of the completions
};

struct BroadcastResult {
  std::vector<PublicationTimes> publications;
  bool finished = false;               // every live worker has the last version, byte for byte
  std::string unfinished;              // if not finished: errors, and the versions of the workers
  Bytes learner_bytes_sent;            // chunks and messages
  Bytes learner_chunk_bytes_sent;      // chunks alone
  Bytes worker_chunk_bytes_in;         // summed over workers
  Bytes bytes_crossed;                 // bytes sent from one region to another
  std::uint64_t chunks_delivered = 0;  // to the workers' applications, each compared with the learner's chunk
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0;  // received by workers
  std::uint64_t snapshots_asked = 0;                       // by workers that lacked the base of a delta
  std::size_t workers_replaced = 0;
  std::vector<std::uint64_t> poisoned;                            // per poisoner, chunks with a flipped bit
  std::size_t poisoners_quarantined = 0, others_quarantined = 0;  // quarantined workers may not forward any more
  Duration lower_bound{};                                         // chains::lower_bound() of the first publication
  // Time until the last worker has the first publication, as chains::broadcast_time() predicts it.
  Duration predicted{};
  chains::Topology topology;  // of the first publication
  Duration virtual_time{};
  std::uint64_t trace_hash = 0, events = 0;  // hash and number of the world's events
};

// Deterministic. kInvalid for an inconsistent scenario.
Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario);

}  // namespace echoline::sim
