// Parents in a topology.
#pragma once
#include <optional>

#include "chains/topology.hpp"

namespace echoline::chains {

// kLearnerId for a seed; absent for the learner and for unknown workers.
inline std::optional<WorkerId> parent_in_first_stripe(const Topology& topology, WorkerId id) {
  const auto parents = topology.parents();
  const auto it = parents.find(id);
  return it == parents.end() ? std::nullopt : std::optional(it->second.front());
}

}  // namespace echoline::chains
