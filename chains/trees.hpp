// Plans and repairs trees. A payload is sent in stripes, which are shares of its chunks; each has its own tree. A tree
// is stored as chains: the first worker of a chain receives from the learner or from a worker of another chain, each
// other worker from its predecessor (topology.hpp).
#pragma once
#include <optional>
#include <span>

#include "chains/regions.hpp"
#include "chains/stripes.hpp"

namespace echoline::chains {

// A tree is as fast as the slowest downlink that it is planned for. So workers with slower downlinks are "late", the
// others "in time". A late worker is a leaf in every stripe. It receives as fast as its own downlink allows, from any
// worker with spare uplink, and delays no other worker.

// Returns, by index, whether a worker is late: whether its downlink is below a threshold. Tries all downlinks as
// thresholds. Keeps the thresholds whose time until the fraction `quorum` of the workers holds a large payload is
// within 3 % of the least such time. Keeps those of them whose mean time over all workers is within 3 % of the least.
// Takes the one with the fewest late workers. Requires at least one worker; at least one is not late.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

struct TreePlan {
  std::vector<bool> is_late;
  StripePlan stripe_plan;  // only for the workers in time, which keep their order
};
// Selects the late workers and plans the stripes of the workers in time, as plan_stripes() does.
// `stripes`: as for plan_chains().
TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    std::optional<std::size_t> stripes = {});

// Builds the chains of every stripe for workers in placement order, which is by fitness to forward (planner.cpp). The
// trees are as shallow as the plan allows: in a stripe few workers forward, each to many.
void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology);

// Like build_trees(), for a given rate and number of stripes, with all workers in time. Leaves `reserved_up` of the sum
// of their uplinks unused. Workers for which no uplink suffices become children of the learner all the same, because
// every worker needs a parent; plan_relays() then moves those that the learner cannot feed.
void build_trees_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                         BitRate reserved_up, Topology& topology);

struct RelayPlan;  // relays.hpp

// Attaches orphans (workers of `topology` that have no parent yet) and the late workers. Edges between regions follow
// the plan's routes, and first use the link capacity that the plan assigns.
void attach_orphans(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                    const Regions& regions, Topology& topology);

// The rate at which a fraction `quorum` of the workers receives a large payload over these trees.
BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions);

struct RepairedTrees {
  // Moving all workers to trees planned from scratch is worth it if `rate` is below this fraction of `replanned_rate`.
  static constexpr double kReplanBelowFraction = 0.8;

  Topology topology;
  BitRate rate;            // receiving rate of the workers in time
  BitRate replanned_rate;  // of trees planned from scratch

  bool worth_replanning() const { return rate.bits_per_s < kReplanBelowFraction * replanned_rate.bits_per_s; }
};

// Repairs the trees for `workers`. A worker keeps its parents, except those that are gone or have too little uplink.
// Newcomers, and workers that lost a parent, are attached together with all their descendants. Their new parent is the
// learner, or the worker nearest to it, that has spare uplink. With several regions, a worker attaches to a worker of
// its own region, or, if none there has enough uplink, of another region. `reattached`: a worker that loses all its
// parents and children and gets new ones. Requires a topology with workers.
RepairedTrees repair_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                           double quorum, std::optional<WorkerId> reattached = {}, const Regions& regions = {});

}  // namespace echoline::chains
