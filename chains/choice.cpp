// Compares the policies of the planner, for the learner and for `echoline plan`.
#include "chains/choice.hpp"

#include <algorithm>

namespace echoline::chains {

Result<Choice> choose_topology(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                               std::span<const WorkerLink> links, const BroadcastGoal& goal,
                               std::optional<TopologyPolicy> current, const Regions& regions) {
  ECHO_CHECK(!workers.empty(), "no workers to choose a topology for");
  std::vector<TopologyPolicy> policies = {TopologyPolicy::kTrees, TopologyPolicy::kStripes,
                                          TopologyPolicy::kBestChains};
  // A star is slow in larger fleets, because the learner feeds all workers itself. A fleet's current policy is always
  // considered.
  if (workers.size() <= kStarWorkersMax || current == TopologyPolicy::kStar) policies.push_back(TopologyPolicy::kStar);
  if (current == TopologyPolicy::kEcho2) policies.push_back(*current);

  const Duration bound = lower_bound(goal.payload, learner_up, links, goal.quorum, regions);
  std::optional<Choice> best;
  double best_weighted_s = 0;
  std::vector<Candidate> candidates;
  for (const TopologyPolicy policy : policies) {
    Choice choice;
    ECHO_ASSIGN(choice.topology, plan_chains(learner_up, chain_rate, workers, policy, goal.quorum, regions));
    choice.chunk = goal.chunk.count > 0 ? goal.chunk : best_chunk(goal.payload, choice.topology, bound);
    ECHO_ASSIGN(choice.times, broadcast_time(choice.topology, goal.payload, choice.chunk, learner_up, links, regions));
    choice.predicted = choice.times.quorum_time(goal.quorum);
    candidates.push_back({policy, choice.predicted});
    // The preferred policy is the current one, or trees. Its time is weighted down, so another policy must be clearly
    // faster.
    const bool is_preferred = policy == current.value_or(TopologyPolicy::kTrees);
    const double preferred_weight = current ? kSwitchTimeShare : kLeaveTreesTimeShare;
    const double weighted_s = seconds(choice.predicted) * (is_preferred ? preferred_weight : 1.0);
    if (best && weighted_s >= best_weighted_s) continue;
    best = std::move(choice);
    best_weighted_s = weighted_s;
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.predicted < b.predicted; });
  best->candidates = std::move(candidates);
  best->lower_bound = bound;
  return *std::move(best);
}

}  // namespace echoline::chains
