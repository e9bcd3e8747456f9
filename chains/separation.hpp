// Keeps pairs of workers from being parent and child: a worker and one that it has accused of misconduct. Pure.
#pragma once
#include <set>
#include <span>
#include <utility>

#include "chains/topology.hpp"

namespace echoline::chains {

// Returns the topology with no pair of `forbidden_pairs` (the lesser id first) as parent and child. The child exchanges
// places with a worker that is at least as far from the learner, so the exchange never moves the child nearer to the
// learner. If no worker suits, the learner feeds the child, which then forwards to no worker in that stripe; the
// child's children move to its former parent.
Topology separate_pairs(Topology topology, const std::set<std::pair<WorkerId, WorkerId>>& forbidden_pairs);

}  // namespace echoline::chains
