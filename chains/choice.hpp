// Which topology brings a payload to a fleet soonest, by the planner's model (broadcast_model.hpp).
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "chains/planner.hpp"

namespace echoline::chains {

// What is broadcast, and when it has arrived.
struct Cargo {
  Bytes payload;
  Bytes chunk;        // none: whichever is best for a topology (best_chunk())
  double quorum = 1;  // part of the workers that must hold it
};

struct Candidate {
  TopologyPolicy policy;
  Duration predicted{};  // until the quorum holds the payload
};

struct Choice {
  Topology topology;  // of the policy that was chosen
  BroadcastTimes times;
  Bytes chunk;  // with which it was predicted
  Duration predicted{};
  Duration lower_bound{};  // that no schedule can beat
  std::vector<Candidate>
      candidates;  // all that were looked at, the soonest first; trees before others of the same time
};

// Another policy than trees has to be so much sooner: trees can be mended where they break without moving everybody.
inline constexpr double kSoonerToLeaveTrees = 0.98;
// And another one than what a fleet has already.
inline constexpr double kSoonerToMove = 0.8;

// Looks at trees, stripes, best_chains and, in fleets of at most kStarMax workers, star. `present` is what the fleet
// has. Pure. Errors as of plan_chains() and broadcast_time(); requires a worker (checked).
inline constexpr std::size_t kStarMax = 64;
Result<Choice> choose_topology(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                               std::span<const WorkerLink> links, const Cargo& cargo,
                               std::optional<TopologyPolicy> present = {}, const Regions& regions = {});

}  // namespace echoline::chains
