// One learner broadcasting to N workers under virtual time, with the real protocol cores: how long it takes, against
// the physical lower bound and the formula, and that everybody ends with the same bytes.
#pragma once
#include <string>
#include <vector>

#include "base/result.hpp"
#include "chains/topology.hpp"
#include "overlay/types.hpp"
#include "sim/world.hpp"

namespace echoline::sim {

struct WorkerKill {
  std::size_t worker = 0;  // 0 is the first to join
  Duration at{};           // after the first publication
  Death death = Death::kCrash;
};

struct BroadcastScenario {
  std::size_t workers = 1;           // that are there from the start
  std::vector<Duration> late_joins;  // more workers, after the first publication
  BitRate learner_up = BitRate::from_mbit_per_s(24);
  overlay::LinkLimits worker_link;                // of every worker not in worker_links
  std::vector<overlay::LinkLimits> worker_links;  // of the first workers, late ones included
  // True: the cores hold the limits (what a user's emulated WAN does) and the network is unlimited. False: the network.
  bool limits_in_cores = false;
  Duration delay{};  // one way, between any two nodes whose regions do not say it
  chains::Regions regions;
  std::vector<std::uint32_t> worker_regions;  // of the first workers; of all others 0
  bool regions_known = true;                  // to the learner
  Duration jitter{};
  Bytes payload{1'000'000};  // of the first publication, a full snapshot
  Bytes delta{200'000};      // of each further one, on the version before; zero: they are full snapshots as well
  Bytes chunk{64 * 1024};
  std::size_t publications = 1;
  Duration publish_every = std::chrono::seconds(1);
  bool one_at_a_time = false;  // so long after the one before has reached its quorum, instead
  chains::TopologyPolicy topology = chains::TopologyPolicy::kEcho2;
  bool chooses_topology = false;  // that is the first; another is taken where it is expected to be so much sooner
  BitRate chain_rate = BitRate::from_mbit_per_s(8);
  double quorum = 0.9;
  Bytes learner_store{1ull << 30}, worker_store{256ull << 20};
  Duration heartbeat = std::chrono::milliseconds(500);
  std::vector<WorkerKill> kills;
  // So often a worker that forwards dies and a new one joins in its place, until the last publication.
  std::optional<Duration> replace_every;
  Death replaced_by = Death::kCrash;
  std::size_t poisoners = 0;          // workers that forward to others and flip a bit ...
  double poisoned_share = 0.01;       // ... in this share of the chunks
  std::vector<Duration> corruptions;  // a byte of the next chunk the first worker forwards is flipped; times as kills
  std::uint64_t seed = 1;
  Duration time_max = std::chrono::hours(1);  // of virtual time, then the scenario has failed
};

struct PublicationTimes {
  Version version;
  std::optional<Duration> t_b;  // as the learner measured it; absent when its quorum was never reached
  // When each worker had it installed (or a newer one), from its publication; by worker.
  std::vector<std::pair<WorkerId, Duration>> completions;
  Duration last() const;
};

struct BroadcastResult {
  std::vector<PublicationTimes> publications;
  bool finished = false;               // every live worker has the last version, byte for byte
  std::string unfinished;              // who has what, when not
  Bytes learner_bytes_sent;            // everything that left the learner
  Bytes learner_chunk_bytes_sent;      // chunks alone
  Bytes worker_chunk_bytes_in;         // of all workers together
  Bytes crossed;                       // everything that went from one region to another
  std::uint64_t chunks_delivered = 0;  // to applications, each checked against what the learner published
  std::uint64_t chunks_duplicate = 0, chunks_corrupt = 0, snapshots_asked = 0;
  std::size_t replaced = 0;
  std::vector<std::uint64_t> poisoned;  // chunks that each poisoner has flipped a bit in
  std::size_t poisoners_quarantined = 0, others_quarantined = 0;
  Duration lower_bound{};     // formula 4.1, of the first publication
  Duration predicted{};       // chains::broadcast_time() of the topology it went down, last worker
  chains::Topology topology;  // when it was published
  Duration virtual_time{};
  std::uint64_t trace_hash = 0, events = 0;
};

// kInvalid for a scenario that makes no sense. Deterministic in the scenario.
Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario);

}  // namespace echoline::sim
