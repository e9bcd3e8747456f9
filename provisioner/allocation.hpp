// Which workers to rent: the cheapest set whose throughput reaches a target. (ECHO-2 sec. 3.4)
#pragma once
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace echoline::provisioner {

struct Candidate {
  double rollouts_per_s = 0;  // mu, positive
  double usd_per_hour = 0;    // c, not negative
};

struct Allocation {
  std::vector<std::size_t> chosen;   // indices of the candidates, ascending
  std::vector<std::size_t> dropped;  // first chosen, then found unnecessary; ascending
  double rollouts_per_s = 0;
  double usd_per_hour = 0;
};

// Indices by c/mu ascending; ties: more throughput first, then the lower index.
std::vector<std::size_t> by_unit_cost(std::span<const Candidate> pool);

// Cheapest prefix by c/mu that reaches `target`, then dearest-first removal of what is not needed and a cheaper single
// worker in place of the last, in whichever order ends cheaper. At most `workers_max` workers: a prefix that is too
// long is cut, and slow members are exchanged for faster ones at the least extra cost per rollout until the target is
// met. Absent when no set of at most workers_max workers reaches the target.
std::optional<Allocation> allocate_greedy(std::span<const Candidate> pool, double target,
                                          std::size_t workers_max = std::numeric_limits<std::size_t>::max());

// The cheapest set of all, by branch and bound. Requires at most kExactPoolMax candidates.
inline constexpr std::size_t kExactPoolMax = 20;
std::optional<Allocation> allocate_exact(std::span<const Candidate> pool, double target,
                                         std::size_t workers_max = std::numeric_limits<std::size_t>::max());

// Cost of the cheapest prefix whose last worker is rented only in part: no set costs less. Absent when the whole
// pool is below the target.
std::optional<double> lp_bound(std::span<const Candidate> pool, double target);

}  // namespace echoline::provisioner
