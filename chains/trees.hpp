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
// thresholds. Takes the one with which the fraction `quorum` of the workers holds a large payload soonest; of equal
// ones, the least mean time over all workers; then the fewest late workers. Times within 3 % of the least count as
// equal. Requires at least one worker; at least one is not late.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

struct TreePlan {
  std::vector<bool> is_late;
  StripePlan stripes;  // for the workers in time, in the order of all workers
};
// Selects the late workers and plans the stripes of the others, as plan_stripes() does.
TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

// Builds the chains of every stripe for workers in placement order, which is by fitness to forward (planner.cpp). The
// trees are as shallow as the plan allows: in a stripe few workers forward, each to many.
void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology);

// Like build_trees(), for a given rate and number of stripes, with all workers in time. Leaves `reserved_up` of the sum
// of their uplinks unused. Workers that neither the learner nor the workers can feed are attached to the learner
// anyway.
void build_trees_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                         BitRate reserved_up, Topology& topology);

struct RelayPlan;

// Attaches the workers of `topology` that have no parent yet, and the late workers. Edges between regions follow the
// plan's routes, and first use the link capacity that the plan assigns (relays.hpp).
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

// Repairs the trees for `workers`. Workers of the topology keep their parents if those exist and their uplinks suffice.
// Newcomers, and workers whose parent is gone, attach to workers with spare uplink, near the learner first, with all
// their descendants. With several regions, a worker attaches to one of its own region; only if none there has enough
// uplink, to one of another region. The worker `reattached` keeps neither parents nor children. Requires a topology
// with workers.
RepairedTrees repair_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                           double quorum, std::optional<WorkerId> reattached = {}, const Regions& regions = {});

}  // namespace echoline::chains
