// Topologies as graphs: a check, independent of the planner, that every worker is reached, and a drawing.
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

// The edges parent -> child of all workers of one stripe, chain by chain.
std::vector<Edge> edges_of(const Topology& topology, std::size_t stripe = 0);

// Checks that every stripe is a tree rooted at the learner that spans exactly `workers`. Each worker is in one chain,
// and each chain comes after the worker to which it is attached, so no worker has two parents or is on a cycle. Also
// checks that no chain is empty, that no worker of `leaves_only` has a child, and that a worker has several children in
// a stripe only under trees. Returns kInternal otherwise; the message names the worker and the defect.
Status validate(const Topology& topology, std::span<const WorkerId> workers);

// Returns Graphviz text: an arrow per sender and receiver, labelled with its number of stripes if there are several;
// boxes of workers that may not forward are dashed. `label` returns the second line of a box, for a worker or the
// learner; empty: no second line.
std::string to_dot(const Topology& topology, const std::function<std::string(WorkerId)>& label);

}  // namespace echoline::chains
