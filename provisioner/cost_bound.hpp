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
  // nu, $ per hour for each worker. At least 0: the limit on workers makes them scarce. Negative: the target
  // needs at least `workers` workers, because even the fastest candidates do not reach it with fewer.
  double usd_per_worker = 0;
  double workers = 0;  // N, the most workers if nu >= 0, else the least number that can reach the target
  // Cost of a candidate beyond its worth at these prices: negative for those of a cheap set.
  double reduced_cost(const Candidate& c) const {
    return c.usd_per_hour - usd_per_rollout_s * c.rollouts_per_s + usd_per_worker;
  }
  // The constant part of the bound; the other part is the least sum of reduced costs.
  double constant(double target) const { return usd_per_rollout_s * target - usd_per_worker * workers; }
};

// The least sum of reduced costs of candidates that may be rented together, as far as the bound knows: of offers that
// share a GPU at most one counts, and of a host at most per_host_max.
double least_reduced_cost(std::span<const Candidate> pool, AllocationLimits limits, const CostBound& prices);

// The bound for these prices. For a set x that reaches the target D,
//   cost(x) >= cost(x) + lambda (D - rate(x)) + nu (count(x) - N) = lambda D - nu N + sum of reduced costs of x,
// because neither added term is positive: lambda, nu >= 0 and count(x) <= N, or nu < 0 and count(x) >= N.
double bound_of(std::span<const Candidate> pool, double target, AllocationLimits limits, const CostBound& prices);

// The prices with the greatest bound among the candidates of `indices`, which has every kept one. Absent if no set
// reaches the target. The bound counts only the candidates of `indices`.
std::optional<CostBound> best_bound(std::span<const Candidate> pool, std::span<const std::size_t> indices,
                                    double target, AllocationLimits limits);

// The greatest bound found over the whole pool. Starts with the candidates of `indices`, and appends the others that
// the bound needs. Absent if no set reaches the target.
std::optional<CostBound> cost_bound(std::span<const Candidate> pool, std::vector<std::size_t>& indices, double target,
                                    AllocationLimits limits);

}  // namespace echoline::provisioner
