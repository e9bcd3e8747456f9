// Topologies as graphs: the proof that one delivers, independent of how it was built, and a drawing of it.
#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "chains/topology.hpp"

namespace echoline::chains {

struct Edge {
  WorkerId from;
  WorkerId to;
  friend bool operator==(const Edge&, const Edge&) = default;
};

// parent -> child for every worker, chain by chain, of one stripe.
std::vector<Edge> edges_of(const Topology& topology, std::size_t stripe = 0);

// Holds iff the edges form a tree rooted at the learner that spans exactly `workers`: nobody feeds the learner, every
// worker has one parent, no cycle, every worker reachable. kInternal otherwise, naming the worker and the defect.
Status validate_tree(std::span<const Edge> edges, std::span<const WorkerId> workers);

// validate_tree() over the edges of every stripe, and: no empty chain, no worker of `leaves_only` with a child; only
// under trees a worker with two children in one stripe, and there every chain stands behind the one it hangs on.
Status validate(const Topology& topology, std::span<const WorkerId> workers);

// For Graphviz: an arrow for everybody who sends to somebody, with how many of the stripes where there are several;
// dashed who may not forward. `label`: the second line of a worker's box, which may be empty.
std::string to_dot(const Topology& topology, const std::function<std::string(WorkerId)>& label);

}  // namespace echoline::chains
