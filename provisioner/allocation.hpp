// Chooses the workers to rent: the cheapest set whose throughput reaches a target. (ECHO-2 sec. 3.4)
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace echoline::provisioner {

// The parts of an offer that the search uses. Its unit cost is usd_per_hour / rollouts_per_s.
struct Candidate {
  double rollouts_per_s = 0;   // positive
  double usd_per_hour = 0;     // not negative
  std::uint32_t machine = 0;   // numbered from 1 without gaps; 0: shared with no other candidate
  std::uint64_t gpus = ~0ull;  // the machine's GPUs, as bits; two candidates that share one exclude each other
  std::uint32_t host = 0;      // to which per_host_max applies, numbered from 1 without gaps; 0: no limit applies
  bool keep = false;           // must be in the set
};

struct AllocationLimits {
  std::size_t workers_max = std::numeric_limits<std::size_t>::max();
  std::size_t per_host_max = std::numeric_limits<std::size_t>::max();
};

struct Allocation {
  std::vector<std::size_t> chosen;   // indices of the candidates, ascending
  std::vector<std::size_t> dropped;  // members of the prefix (AllocationSearch) that are not chosen; ascending
  double rollouts_per_s = 0;
  double usd_per_hour = 0;
};

// Indices by ascending unit cost; ties: more throughput first, then the lower index.
std::vector<std::size_t> by_unit_cost(std::span<const Candidate> pool);

// A set and the least that any set can cost. Prices of the two constraints (the target and the limit on workers) give a
// lower bound and rank the candidates. Then a branch and bound over the candidates that a cheaper set could contain
// starts from the cheapest known set, and ends after some 300,000 nodes.
struct AllocationSearch {
  std::optional<Allocation> best;  // absent if no set was found
  double usd_per_hour_min = 0;     // no set within the limits that reaches the target costs less
  bool is_proven_best = false;     // no set is cheaper than `best`
  // Cost of the prefix, a simpler set that never costs less than `best`. The prefix has the first candidates by unit
  // cost until they reach the target, without those that the limits or shared machines exclude. If all of them do not
  // reach it, faster candidates replace slow ones at the least extra cost per rollout. Absent if that finds no set.
  std::optional<double> prefix_usd_per_hour;
};
AllocationSearch allocate(std::span<const Candidate> pool, double target, AllocationLimits limits = {});

// Indices of the candidates that allocate() considers first, ascending. In a large pool these are the cheapest per
// rollout, the fastest and the cheapest; in a small one all.
std::vector<std::size_t> shortlist(std::span<const Candidate> pool, AllocationLimits limits);

}  // namespace echoline::provisioner
