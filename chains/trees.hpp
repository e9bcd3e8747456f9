// Trees: a worker may feed several children in a stripe. Planned as a whole, or mended where they broke.
#pragma once
#include <optional>
#include <span>

#include "chains/stripes.hpp"

namespace echoline::chains {

// Sets the chains of every stripe, for workers in the order in which they should stand; as shallow as the plan allows:
// in a stripe few workers forward, each to many.
void build_trees(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology);

struct MendedTrees {
  Topology topology;
  BitRate rate;  // at which everybody receives, as far as uplinks are known
  BitRate best;  // of trees planned as a whole

  // Worth moving everybody.
  bool slow() const { return rate.bits_per_s < 0.8 * best.bits_per_s; }
};

// The trees for `workers`: who is in the topology keeps its parents, as far as they are there and their uplinks carry
// it; newcomers, and those whose parent is gone, are fed by whoever has uplink to spare, near the learner first, and
// bring along what hangs on them. `moved` keeps neither parents nor children. Requires a topology that has workers.
MendedTrees mend_trees(const Topology& topology, BitRate learner_up, std::span<const ChainWorker> workers,
                       std::optional<WorkerId> moved = {});

}  // namespace echoline::chains
