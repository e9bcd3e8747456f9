// A lower bound of the cost of the cheapest set of offers within the limits on workers and hosts. Private to
// provisioner/.
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "provisioner/allocation.hpp"

namespace echoline::provisioner {

// Prices of the two constraints (Lagrange multipliers), and the bound that follows from them.
struct CostBound {
  double usd_per_hour = 0;       // no set that reaches the target within the limits costs less
  double usd_per_rollout_s = 0;  // lambda >= 0, $ per hour for a rollout/s of the target
  // nu, $ per hour for each worker. Positive if the limit on workers makes them scarce. Negative if the target needs at
  // least `workers` workers, because even the fastest candidates do not reach it with fewer.
  double usd_per_worker = 0;
  double workers = 0;  // N: if nu >= 0 the most workers allowed, else the fewest that can reach the target
  // The cost of a candidate less its worth at these prices: negative for the candidates of a cheap set.
  double reduced_cost(const Candidate& c) const {
    return c.usd_per_hour - usd_per_rollout_s * c.rollouts_per_s + usd_per_worker;
  }
  // The part of the bound that does not depend on the set (see bound_of()).
  double constant(double target) const { return usd_per_rollout_s * target - usd_per_worker * workers; }
};

// A lower bound of the sum of reduced costs of any candidates that may be rented together. Per machine it respects
// shared GPUs. Per host it respects either shared GPUs or per_host_max, whichever bounds more.
double least_reduced_cost(std::span<const Candidate> pool, AllocationLimits limits, const CostBound& prices);

// The bound for these prices. For a set x that reaches the target D,
//   cost(x) >= cost(x) + lambda (D - rate(x)) + nu (count(x) - N) = lambda D - nu N + sum of reduced costs of x,
// because neither added term is positive: rate(x) >= D, and count(x) <= N if nu >= 0, else count(x) >= N.
double bound_of(std::span<const Candidate> pool, double target, AllocationLimits limits, const CostBound& prices);

// The prices with the greatest bound over the sets of candidates of `indices`, which must contain every candidate with
// `keep`. Absent if no such set reaches the target.
std::optional<CostBound> best_bound(std::span<const Candidate> pool, std::span<const std::size_t> indices,
                                    double target, AllocationLimits limits);

// The greatest bound found over the sets of the whole pool. Computes prices from the candidates of `indices`, and
// appends to it the other candidates that would lower the bound. Absent if no set reaches the target.
std::optional<CostBound> cost_bound(std::span<const Candidate> pool, std::vector<std::size_t>& indices, double target,
                                    AllocationLimits limits);

}  // namespace echoline::provisioner
