// Stripes: several sets of chains or trees at once, for fleets whose uplinks differ.
//
// A chain is as fast as its slowest forwarder. A stripe is a set of chains over all workers for 1/s of the chunks. With
// s stripes, a worker forwards in as many as its uplink carries, and ends a chain (is a tail) in the others. With
// chains it sends at most one copy, however fast it is. With trees it may feed several children in the stripes where it
// forwards. So all uplinks are used, and the bound N*F/(B + sum u) is reached up to rounding: N workers with uplinks u
// receive a payload F, and the learner has the uplink B (broadcast_model.hpp).
#pragma once
#include <span>

#include "chains/topology.hpp"

namespace echoline::chains {

inline constexpr std::size_t kPlannedStripesMax = 16;  // each stripe may give a worker one more parent
// For trees. A worker whose uplink carries one copy of the payload can spend all of it in one of s stripes. There it
// feeds s children, so at least kTreeStripesMin. Hence trees are shallow.
inline constexpr std::size_t kTreeStripesMin = 4;
inline constexpr std::size_t kTreeChildrenMax = 8;          // per worker and stripe
inline constexpr std::size_t kChildrenOverStripesMax = 64;  // per worker, all stripes together

// Usable fraction of the sum of all uplinks if edges (links from parent to child in a stripe) have different rates. The
// rest is left over on single uplinks, in pieces too small for an edge.
inline constexpr double kUsableUplinkFraction = 0.95;

struct StripeLimits {
  std::size_t children_per_stripe_max = 1;  // per worker and stripe
  BitRate reserved_up{};                    // uplink kept free for workers outside this plan
};

struct StripePlan {
  std::size_t stripes = 1;                // a power of two
  BitRate rate;                           // receiving rate of every worker, all stripes together
  std::vector<std::size_t> child_counts;  // by worker: the most children to give it, summed over stripes
  std::size_t child_capacity_total = 0;   // children that the uplinks of all workers could feed
};

// Plans for the highest rate r, up to rounding. u_i are the N workers' uplinks, B the learner's, d_min is the least
// downlink. With q = r/s and c = children_per_stripe_max these limits hold: sum_i min(s*c, floor(u_i/q)) + floor(B/q)
// >= s*N, and r <= min(B, d_min). The learner has a child in every stripe. If `reserved_up` is not 0, N r + reserved_up
// <= kUsableUplinkFraction (B + sum u). Uses the fewest stripes within 3 % of the best rate. Workers that may not
// forward count as uplink 0. Requires at least one worker.
StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers, const StripeLimits& limits = {});

// Returns the plan for a given rate and number of stripes. The learner may get more children than its uplink carries.
StripePlan plan_stripes_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up,
                                std::span<const ChainWorker> workers, const StripeLimits& limits);

// Returns the highest rate with this number of stripes.
BitRate best_rate(std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                  const StripeLimits& limits);

// Builds the chains of every stripe from a plan with at most one child per worker and stripe, for workers in placement
// order (planner.cpp).
void build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology);

}  // namespace echoline::chains
