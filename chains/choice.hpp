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
  Bytes chunk;  // 0: the best for each topology (best_chunk())
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
  Bytes chunk;  // used for the prediction
  Duration predicted{};
  Duration lower_bound{};  // no schedule is faster
  // All considered policies, the soonest first; on equal times, trees first.
  std::vector<Candidate> candidates;
};

// A policy other than trees is chosen only if it needs less than this fraction of their time, because trees can be
// repaired without moving all workers.
inline constexpr double kLeaveTreesTimeShare = 0.98;
// Another policy replaces the fleet's current one only if it needs less than this fraction of its time.
inline constexpr double kSwitchTimeShare = 0.8;

// Considers trees, stripes, best_chains and, in fleets of at most kStarMax workers, star. `current`: the fleet's
// current policy. Pure. Errors as those of plan_chains() and broadcast_time(); requires a worker (checked).
inline constexpr std::size_t kStarMax = 64;
Result<Choice> choose_topology(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                               std::span<const WorkerLink> links, const BroadcastGoal& goal,
                               std::optional<TopologyPolicy> current = {}, const Regions& regions = {});

}  // namespace echoline::chains
