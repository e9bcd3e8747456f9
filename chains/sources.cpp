// Divides the first hops of a broadcast among the learner and the nodes. Called by the learner's TopologyPlan.
#include "chains/sources.hpp"

#include <algorithm>
#include <set>
#include <unordered_set>

#include "chains/stripes.hpp"

namespace echoline::chains {
namespace {

// Fewer stripes are preferred up to this factor below the best rate, as plan_stripes() does.
constexpr double kRateTolerance = 1.03;

// The sources and the number of chains that each feeds, over all stripes.
class Shares {
 public:
  Shares(BitRate learner_up, std::span<const SourceNode> nodes) {
    sources_.push_back({kLearnerId, learner_up.bits_per_s, 0});
    for (const SourceNode& node : nodes) sources_.push_back({node.id, node.up.bits_per_s, 0});
  }

  // Returns the source that is least loaded after it has taken one more chain; the first of equals.
  WorkerId take() {
    const auto load = [](const Source& source) { return (source.chains + 1) / source.up; };
    Source& best = *std::min_element(sources_.begin(), sources_.end(),
                                     [&](const Source& a, const Source& b) { return load(a) < load(b); });
    ++best.chains;
    return best.id;
  }

  // The rate at which the most loaded source can feed its chains, each with one of `stripes` shares of the payload.
  double rate(std::size_t stripes) const {
    double rate = std::numeric_limits<double>::infinity();
    for (const Source& source : sources_)
      if (source.chains > 0) rate = std::min(rate, source.up * static_cast<double>(stripes) / source.chains);
    return rate;
  }

 private:
  struct Source {
    WorkerId id;
    double up;
    double chains;
  };
  std::vector<Source> sources_;
};

// The rate at which the sources can feed this topology.
double rate_of(const Topology& topology, BitRate learner_up, std::span<const SourceNode> nodes) {
  Shares shares(learner_up, nodes);
  for (std::size_t s = 0; s < topology.stripes(); ++s)
    for (const auto& chain : topology.stripe(s))
      if (topology.parent_of_chain(s, chain.front()) == kLearnerId) (void)shares.take();
  return shares.rate(topology.stripes());
}

}  // namespace

BitRate total_up(BitRate learner_up, std::span<const SourceNode> nodes) {
  for (const SourceNode& node : nodes) learner_up.bits_per_s += node.up.bits_per_s;
  return learner_up;
}

Result<Topology> plan_for_sources(BitRate learner_up, std::span<const SourceNode> nodes, BitRate chain_rate,
                                  std::span<const ChainWorker> workers, TopologyPolicy policy, double quorum,
                                  const Regions& regions) {
  const BitRate all_up = total_up(learner_up, nodes);
  const bool has_stripes = policy == TopologyPolicy::kStripes || policy == TopologyPolicy::kTrees;
  ECHO_ASSIGN(Topology best, plan_chains(all_up, chain_rate, workers, policy, quorum, regions));
  if (nodes.empty() || workers.empty() || !has_stripes) return best;
  // The sources that feed few chains cannot all be busy, and more stripes make more chains.
  double best_rate = std::min(rate_of(best, learner_up, nodes), all_up.bits_per_s);
  for (std::size_t stripes = 2 * best.stripes(); stripes <= kSourceStripesMax; stripes *= 2) {
    ECHO_ASSIGN(Topology planned, plan_chains(all_up, chain_rate, workers, policy, quorum, regions, stripes));
    const double rate = std::min(rate_of(planned, learner_up, nodes), all_up.bits_per_s);
    if (rate <= kRateTolerance * best_rate) continue;
    best = std::move(planned);
    best_rate = rate;
  }
  return best;
}

Topology add_nodes(Topology topology, BitRate learner_up, std::span<const SourceNode> nodes) {
  if (nodes.empty()) return topology;
  Shares shares(learner_up, nodes);
  topology.grafts.resize(topology.stripes());
  for (std::size_t s = 0; s < topology.stripes(); ++s) {
    for (const auto& chain : topology.stripe(s)) {
      const WorkerId first = chain.front();
      if (topology.parent_of_chain(s, first) != kLearnerId) continue;
      if (const WorkerId source = shares.take(); source != kLearnerId) topology.grafts[s][first] = source;
    }
    Chains chains;  // a graft's parent comes before it
    for (const SourceNode& node : nodes) chains.push_back({node.id});
    for (auto& chain : topology.stripe(s)) chains.push_back(std::move(chain));
    topology.stripe(s) = std::move(chains);
  }
  return topology;
}

Topology remove_nodes(Topology topology, std::span<const WorkerId> nodes) {
  const std::set<WorkerId> removed(nodes.begin(), nodes.end());
  bool has_grafts = false;
  for (std::size_t s = 0; s < topology.stripes(); ++s) {
    std::erase_if(topology.stripe(s), [&](const auto& chain) { return removed.contains(chain.front()); });
    if (s >= topology.grafts.size()) continue;
    std::erase_if(topology.grafts[s], [&](const auto& graft) { return removed.contains(graft.second); });
    has_grafts = has_grafts || !topology.grafts[s].empty();
  }
  if (!has_grafts && topology.policy != TopologyPolicy::kTrees) topology.grafts.clear();
  return topology;
}

}  // namespace echoline::chains
