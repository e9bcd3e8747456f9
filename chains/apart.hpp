// Keeps two workers from being parent and child, wherever a topology was made. Pure.
#pragma once
#include <set>
#include <span>
#include <utility>

#include "chains/topology.hpp"

namespace echoline::chains {

// The topology with no pair of `apart` (the lesser first) as parent and child. A child changes places with somebody who
// stands no nearer to the learner than it does, so parting never brings it forward; where nobody suits, the learner
// feeds it, and it forwards to nobody in that stripe: its children go to its parent.
Topology keep_apart(Topology topology, const std::set<std::pair<WorkerId, WorkerId>>& apart);

}  // namespace echoline::chains
