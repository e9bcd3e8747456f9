#include "chains/choice.hpp"

#include <algorithm>

namespace echoline::chains {

Result<Choice> choose_topology(BitRate learner_up, BitRate chain_rate, std::span<const ChainWorker> workers,
                               std::span<const WorkerLink> links, const Cargo& cargo,
                               std::optional<TopologyPolicy> present, const Regions& regions) {
  ECHO_CHECK(!workers.empty(), "no workers to choose a topology for");
  std::vector<TopologyPolicy> policies = {TopologyPolicy::kTrees, TopologyPolicy::kStripes,
                                          TopologyPolicy::kBestChains};
  if (workers.size() <= kStarMax || present == TopologyPolicy::kStar) policies.push_back(TopologyPolicy::kStar);
  if (present == TopologyPolicy::kEcho2) policies.push_back(*present);

  const Duration bound = lower_bound(cargo.payload, learner_up, links, cargo.quorum, regions);
  std::optional<Choice> best;
  double best_weighed = 0;
  std::vector<Candidate> candidates;
  for (const TopologyPolicy policy : policies) {
    Choice one;
    ECHO_ASSIGN(one.topology, plan_chains(learner_up, chain_rate, workers, policy, cargo.quorum, regions));
    one.chunk = cargo.chunk.count > 0 ? cargo.chunk : best_chunk(cargo.payload, one.topology, bound);
    ECHO_ASSIGN(one.times, broadcast_time(one.topology, cargo.payload, one.chunk, learner_up, links, regions));
    one.predicted = one.times.fraction(cargo.quorum);
    candidates.push_back({policy, one.predicted});
    // The preferred policy's time counts less.
    const bool preferred = policy == present.value_or(TopologyPolicy::kTrees);
    const double weighed = seconds(one.predicted) * (!preferred ? 1 : present ? kSoonerToMove : kSoonerToLeaveTrees);
    if (best && weighed >= best_weighed) continue;
    best = std::move(one);
    best_weighed = weighed;
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.predicted < b.predicted; });
  best->candidates = std::move(candidates);
  best->lower_bound = bound;
  return *std::move(best);
}

}  // namespace echoline::chains
