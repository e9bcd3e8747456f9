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

// Holds iff every stripe is a tree rooted at the learner that spans exactly `workers`: each worker stands in one chain,
// and each chain behind the worker it hangs on, so no worker has two parents or stands on a cycle. And: no empty chain,
// no worker of `leaves_only` with a child; only under trees a worker with two children in one stripe. kInternal
// otherwise, naming the worker and the defect.
Status validate(const Topology& topology, std::span<const WorkerId> workers);

// For Graphviz: an arrow for everybody who sends to somebody, with how many of the stripes where there are several;
// dashed who may not forward. `label`: the second line of a worker's box, which may be empty.
std::string to_dot(const Topology& topology, const std::function<std::string(WorkerId)>& label);

}  // namespace echoline::chains
