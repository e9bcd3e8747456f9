// Broadcasts that begin at several machines of the trainer: the learner, and nodes that receive from it over a fast
// local network. A node has an uplink of its own towards the workers, so the uplinks of all these sources add up.
#pragma once
#include <span>

#include "chains/planner.hpp"

namespace echoline::chains {

// A machine of the trainer, other than the learner's.
struct SourceNode {
  WorkerId id;
  BitRate up;  // towards the workers
};

// With nodes, more stripes may be planned than kPlannedStripesMax: few stripes cannot be divided evenly among three
// sources.
inline constexpr std::size_t kSourceStripesMax = 32;

// The uplinks of the learner and the nodes together.
BitRate total_up(BitRate learner_up, std::span<const SourceNode> nodes);

// Plans as plan_chains() does, without the nodes, for one learner with all the uplinks. For stripes and trees, takes
// the number of stripes with which the sources' uplinks are used best. add_nodes() follows.
Result<Topology> plan_for_sources(BitRate learner_up, std::span<const SourceNode> nodes, BitRate chain_rate,
                                  std::span<const ChainWorker> workers, TopologyPolicy policy, double quorum = 1,
                                  const Regions& regions = {});

// Adds the nodes to a topology that has none. The learner feeds each node in every stripe. The learner's other children
// are divided among learner and nodes in proportion to their uplinks. Each of them that moves to a node becomes the
// first worker of a graft.
Topology add_nodes(Topology topology, BitRate learner_up, std::span<const SourceNode> nodes);

// The reverse of add_nodes().
Topology remove_nodes(Topology topology, std::span<const WorkerId> nodes);

}  // namespace echoline::chains
