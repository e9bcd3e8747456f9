// Plans and repairs trees, in which a worker may feed several children in a stripe.
#pragma once
#include <optional>
#include <span>

#include "chains/regions.hpp"
#include "chains/stripes.hpp"

namespace echoline::chains {

// A tree is as fast as the slowest downlink that it is planned for. So workers with slower downlinks are "late", the
// others "in time". A late worker is a leaf in every stripe. It receives as fast as its own downlink allows, from any
// worker with spare uplink, and delays no other worker.

// Selects the late workers, by index. Compares thresholds between slow and other downlinks. Takes those within 3 % of
// the least time until the fraction `quorum` holds a payload; of these, those within 3 % of the least mean time; of
// these, the one with the fewest late workers. Requires at least one worker; at least one is not late.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

// A plan like plan_stripes(), for the workers in time.
struct TreePlan {
  std::vector<bool> late;
  StripePlan stripes;  // of the workers in time, in order
};
TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

// Builds the chains of every stripe for workers in placement order. The trees are as shallow as the plan allows: in a
// stripe few workers forward, each to many.
void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology);

// Like build_trees(), for a given rate and number of stripes, with all workers in time. Keeps `reserved_up` of their
// uplink free. Workers that neither the learner nor the workers can feed are attached to the learner anyway.
void build_trees_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                         BitRate reserved_up, Topology& topology);

struct RelayPlan;

// Attaches the workers of these trees that have no parent yet, and the late workers.
void attach_orphans(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers,
                    const Regions& regions, Topology& topology);

// The rate at which a fraction `quorum` of the workers receives a large payload over these trees.
BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions);

struct RepairedTrees {
  Topology topology;
  BitRate rate;            // receiving rate of the workers in time, by their known uplinks
  BitRate replanned_rate;  // of trees planned from scratch

  // Whether new trees are so much faster that moving all workers is worth it.
  bool worth_replanning() const { return rate.bits_per_s < 0.8 * replanned_rate.bits_per_s; }
};

// Repairs the trees for `workers`. Workers of the topology keep their parents if those exist and their uplinks suffice.
// Newcomers, and workers whose parent is gone, attach to workers with spare uplink, near the learner first, with all
// their descendants. With several regions they attach within their own, and over a link to it only if no worker there
// has enough uplink. `reattached` keeps neither parents nor children. Requires a topology with workers.
RepairedTrees repair_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                           double quorum, std::optional<WorkerId> reattached = {}, const Regions& regions = {});

}  // namespace echoline::chains
