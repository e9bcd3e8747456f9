// Chooses the topology that brings a payload to a fleet soonest, by the model of broadcast_model.hpp.
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "chains/planner.hpp"

namespace echoline::chains {

// A payload, and the fraction of the workers that must receive it.
struct BroadcastGoal {
  Bytes payload;
  Bytes chunk;  // chunk size; 0: the best one for each topology (best_chunk())
  double quorum = 1;
};

// A policy that choose_topology() considered.
struct Candidate {
  TopologyPolicy policy;
  Duration predicted{};  // time until the quorum holds the payload
};

// The chosen topology, with the model's predictions for it.
struct Choice {
  Topology topology;
  BroadcastTimes times;
  Bytes chunk;  // chunk size used for the prediction
  Duration predicted{};
  Duration lower_bound{};  // of any schedule over any topology
  // All considered policies, the soonest first; on equal times, trees first.
  std::vector<Candidate> candidates;
};

// A policy other than trees is chosen only if it needs less than this fraction of their time, because trees can be
// repaired without moving all workers.
inline constexpr double kLeaveTreesTimeShare = 0.98;
// Another policy replaces the fleet's current one only if it needs less than this fraction of the current policy's
// time.
inline constexpr double kSwitchTimeShare = 0.8;
inline constexpr std::size_t kStarWorkersMax = 64;

// Considers trees, stripes, best_chains and, in fleets of at most kStarWorkersMax workers, star. `links` has one entry
// for each of `workers`, in any order. `current`: the fleet's current policy, which is always considered. `chain_rate`:
// of plan_chains(). Pure. Returns the errors of plan_chains() and broadcast_time(). Requires a worker (checked).
Result<Choice> choose_topology(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                               std::span<const WorkerLink> links, const BroadcastGoal& goal,
                               std::optional<TopologyPolicy> current = {}, const Regions& regions = {});

}  // namespace echoline::chains
