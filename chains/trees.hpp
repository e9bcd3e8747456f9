// Trees: a worker may feed several children in a stripe. Planned as a whole, or mended where they broke.
#pragma once
#include <optional>
#include <span>

#include "chains/regions.hpp"
#include "chains/stripes.hpp"

namespace echoline::chains {

// A tree is as fast as the slowest downlink of those that are planned for, so who receives more slowly than the others
// could is late: a leaf in every stripe, sent to by whoever has uplink to spare, as fast as its own downlink takes it.

// Who is late, by number. Of all ways to draw the line between slow downlinks and others: those that come within 3 % of
// the least time until the fraction `quorum` holds a payload; of them those within 3 % of the least mean time over all
// workers; of them the one that makes fewest late. Requires at least one worker; one at least is not late.
std::vector<bool> late_workers(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

// As plan_stripes(), for those that are not late.
struct TreePlan {
  std::vector<bool> late;
  StripePlan stripes;  // of the others, in their order
};
TreePlan plan_trees(BitRate learner_up, std::span<const ChainWorker> workers, double quorum);

// Sets the chains of every stripe, for workers in the order in which they should stand; as shallow as the plan allows:
// in a stripe few workers forward, each to many.
void build_trees(const TreePlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, Topology& topology);

// The same for a given rate and number of stripes, all in time, while `others` of their uplinks is kept free; who is
// more than the learner, whose uplink is `source`, and the others can feed hangs on the learner nevertheless.
void grow_trees(BitRate rate, std::size_t stripes, BitRate source, std::span<const ChainWorker> workers, BitRate others,
                Topology& topology);

struct RelayPlan;

// Hangs up whoever in these trees hangs on nobody that is there, and who is late.
void hang_up(const RelayPlan& plan, BitRate learner_up, std::span<const ChainWorker> workers, const Regions& regions,
             Topology& topology);

// At which a part `quorum` of the workers receives a payload that is large, over these trees.
BitRate steady_rate(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers, double quorum,
                    const Regions& regions);

struct MendedTrees {
  Topology topology;
  BitRate rate;  // at which everybody receives who is not late, as far as uplinks are known
  BitRate best;  // of trees planned as a whole

  // Worth moving everybody.
  bool slow() const { return rate.bits_per_s < 0.8 * best.bits_per_s; }
};

// The trees for `workers`: who is in the topology keeps its parents, as far as they are there and their uplinks carry
// it; newcomers, and those whose parent is gone, are fed by whoever has uplink to spare, near the learner first, and
// bring along what hangs on them. In several regions they are fed in their own, and over a way to it only where nobody
// there has what they need. `moved` keeps neither parents nor children. Requires a topology that has workers.
MendedTrees mend_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                       double quorum, std::optional<WorkerId> moved = {}, const Regions& regions = {});

}  // namespace echoline::chains
