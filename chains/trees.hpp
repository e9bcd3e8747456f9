// Plans and repairs trees, in which a worker may feed several children in a stripe.
#pragma once
#include <optional>
#include <span>

#include "chains/regions.hpp"
#include "chains/stripes.hpp"

namespace echoline::chains {

// A tree is as fast as the slowest downlink that it is planned for. So slower workers are "late": a late worker is a
// leaf in every stripe and receives, from any worker with spare uplink, as fast as its own downlink allows.

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

// Like build_trees(), for a given rate and number of stripes, with all workers in time. Keeps `others` of their uplink
// free. Workers that neither the learner (uplink `source`) nor the workers can feed are attached to the learner anyway.
void grow_trees(BitRate rate, std::size_t stripes, BitRate source, std::span<const ChainWorker> workers, BitRate others,
                Topology& topology);

struct RelayPlan;

// Attaches the late workers, and the workers of these trees without an existing parent.
void hang_up(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, const Regions& regions,
             Topology& topology);

// The rate at which a fraction `quorum` of the workers receives a large payload over these trees.
BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions);

struct MendedTrees {
  Topology topology;
  BitRate rate;  // at which workers in time receive, by their known uplinks
  BitRate best;  // of trees planned from scratch

  // Whether replanning is worth moving all workers.
  bool slow() const { return rate.bits_per_s < 0.8 * best.bits_per_s; }
};

// Repairs the trees for `workers`. Workers of the topology keep their parents if those exist and their uplinks suffice.
// Newcomers, and workers whose parent is gone, attach to workers with spare uplink, near the learner first, with all
// their descendants. With several regions they attach within their own, and over a link to it only if no worker there
// has enough uplink. `moved` keeps neither parents nor children. Requires a topology with workers.
MendedTrees mend_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                       double quorum, std::optional<WorkerId> moved = {}, const Regions& regions = {});

}  // namespace echoline::chains
