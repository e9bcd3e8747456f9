// Stripes: several sets of chains at once, for fleets whose uplinks differ.
//
// A chain is as fast as its slowest forwarder. With s stripes, each a set of chains over all workers for 1/s of the
// chunks, a worker forwards as many shares as its uplink carries and stands at the tail of the other stripes' chains.
#pragma once
#include <span>

#include "chains/topology.hpp"

namespace echoline::chains {

inline constexpr std::size_t kPlannedStripesMax = 16;

struct StripePlan {
  std::size_t stripes = 1;            // a power of two
  BitRate rate;                       // at which every worker receives, all stripes together
  std::vector<std::size_t> forwards;  // for each worker, in how many stripes it forwards
};

// The highest rate r, up to rounding, for which with q = r/s: sum_i min(s, floor(u_i/q)) + floor(B/q) >= s*N, no stripe
// without a seed, and r <= min(B, d_min); with as few stripes as come within 3 % of the best. Workers that may not
// forward count as uplink 0. Requires at least one worker.
StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers);

// The chains of every stripe, for workers in the order in which they should stand.
std::vector<Chains> build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers);

}  // namespace echoline::chains
