// Stripes: several sets of chains or trees at once, for fleets whose uplinks differ.
//
// A chain is as fast as its slowest forwarder. With s stripes, each a set of chains over all workers for 1/s of the
// chunks, a worker forwards as many shares as its uplink carries and stands at the tail of the other stripes' chains.
// In chains it sends at most one copy, however fast it is. With trees it may feed several children in the stripes where
// it forwards, and all uplinks can be used: the bound N*F/(B + sum u) is reached but for rounding (formula 4.6).
#pragma once
#include <span>

#include "chains/topology.hpp"

namespace echoline::chains {

inline constexpr std::size_t kPlannedStripesMax = 16;
// Of trees: whose uplink carries one copy has so many children where it forwards, so the trees are shallow.
inline constexpr std::size_t kTreeStripesMin = 4;
inline constexpr std::size_t kTreeChildrenMax = 8;      // of a worker in one stripe
inline constexpr std::size_t kPlannedChildrenMax = 64;  // of a worker in all stripes

// Of all uplinks together, what can be given to edges of different rates: the rest is in pieces too small for one.
inline constexpr double kSharedOut = 0.95;

// What a plan may use.
struct StripeLimits {
  std::size_t children_max = 1;  // of a worker in one stripe
  BitRate others{};              // what the uplinks carry besides, to workers that are not among these
};

struct StripePlan {
  std::size_t stripes = 1;            // a power of two
  BitRate rate;                       // at which every worker receives, all stripes together
  std::vector<std::size_t> forwards;  // for each worker, its children, counted in every stripe
  std::size_t carried = 0;            // children that all of their uplinks would carry
};

// The highest rate r, up to rounding, for which with q = r/s and c children a worker may have in a stripe:
// sum_i min(s*c, floor(u_i/q)) + floor(B/q) >= s*N, no stripe without a seed, and r <= min(B, d_min); with as few
// stripes as come within 3 % of the best. Workers that may not forward count as uplink 0. What is carried for others:
// N r + others <= kSharedOut (B + sum u). Requires at least one worker.
StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers, const StripeLimits& limits = {});

// For a given rate and number of stripes. It may leave more to be fed by the learner than its uplink carries.
StripePlan plan_at(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                   const StripeLimits& limits);

// The rate of such a plan with so many stripes.
BitRate best_rate(std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                  const StripeLimits& limits);

// Sets the chains of every stripe, for workers in the order in which they should stand and a plan for one child.
void build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology);

}  // namespace echoline::chains
