// The Lagrangian bound of the cheapest set, and its best prices by bisection.
#include "provisioner/cost_bound.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace echoline::provisioner {
namespace {

constexpr int kBisections = 46;          // narrow the first interval to about 1e-14 of its width
constexpr int kRounds = 8;               // most times that cost_bound() adds candidates to the list
constexpr std::size_t kAddedMax = 2000;  // most candidates that it adds at a time

constexpr double kRounding = 1e-12;      // relative tolerance of sums of rates
constexpr std::size_t kSharersMax = 16;  // if a machine has at most this many useful offers, every set of them is tried

// Returns how many of the fastest candidates reach the target together. If even all do not, returns their number.
std::size_t least_workers(std::span<const Candidate> pool, std::span<const std::size_t> indices, double target) {
  std::vector<double> rates;
  for (const std::size_t i : indices) rates.push_back(pool[i].rollouts_per_s);
  std::sort(rates.begin(), rates.end(), std::greater<>());
  std::size_t count = 0;
  for (double rate = 0; count < rates.size() && rate < target * (1 - kRounding); ++count) rate += rates[count];
  return count;
}

// Computes, for given prices, a set with the least sum of reduced costs. The set need not reach the target, and may
// exceed the limit on workers: the prices stand for both. The kept candidates are in every set, so they are taken off
// the target and the limits first.
class Relaxation {
 public:
  // Sums over the set, without the kept candidates.
  struct Value {
    double reduced_cost = 0, rate = 0, count = 0;
  };

  Relaxation(std::span<const Candidate> pool, std::span<const std::size_t> indices, double target,
             AllocationLimits limits)
      : target_(target),
        workers_max_(static_cast<double>(std::min(limits.workers_max, pool.size()))),
        workers_min_(static_cast<double>(least_workers(pool, indices, target))) {
    std::map<std::uint32_t, std::uint64_t> kept_gpus;      // by machine
    std::map<std::uint32_t, std::size_t> kept_host_count;  // by host: number of kept candidates
    for (const std::size_t i : indices) {
      const Candidate& c = pool[i];
      if (!c.keep) continue;
      target_ -= c.rollouts_per_s;
      workers_max_ -= 1;
      workers_min_ -= 1;
      kept_usd_ += c.usd_per_hour;
      if (c.machine) kept_gpus[c.machine] |= c.gpus;
      ++kept_host_count[c.host];
    }
    std::vector<std::uint32_t> machine_sizes(1), host_sizes(1);  // number of candidates, by machine and by host
    const auto count_in = [](std::vector<std::uint32_t>& sizes, std::uint32_t number) {
      if (sizes.size() <= number) sizes.resize(number + 1);
      ++sizes[number];
    };
    for (const std::size_t i : indices) {
      count_in(machine_sizes, pool[i].machine);
      count_in(host_sizes, pool[i].host);
    }
    std::map<std::uint32_t, std::vector<Candidate>> by_machine;
    std::map<std::uint32_t, Host> by_host;
    for (const std::size_t i : indices) {
      const Candidate& c = pool[i];
      if (c.keep) continue;
      if (c.machine && !kept_gpus.empty())
        if (const auto kept = kept_gpus.find(c.machine); kept != kept_gpus.end() && (kept->second & c.gpus)) continue;
      if (c.host && host_sizes[c.host] > limits.per_host_max) {
        Host& host = by_host[c.host];
        const auto kept = kept_host_count.find(c.host);
        const std::size_t kept_count = kept == kept_host_count.end() ? 0 : kept->second;
        host.free = kept_count < limits.per_host_max ? limits.per_host_max - kept_count : 0;
        // A candidate without a machine number gets one that no machine has: machines are numbered from 1, so they do
        // not reach the numbers ~0, ~1 ...
        host.machines[c.machine ? c.machine : ~static_cast<std::uint32_t>(i)].push_back(c);
      } else if (c.machine && machine_sizes[c.machine] > 1) {
        by_machine[c.machine].push_back(c);
      } else {
        rates_.push_back(c.rollouts_per_s);
        costs_.push_back(c.usd_per_hour);
      }
      unit_cost_max_ = std::max(unit_cost_max_, c.usd_per_hour / c.rollouts_per_s);
      rate_min_ = std::min(rate_min_, c.rollouts_per_s);
    }
    for (auto& [number, machine] : by_machine) machines_.push_back(std::move(machine));
    for (auto& [number, host] : by_host) hosts_.push_back(std::move(host));
  }

  double target() const { return target_; }
  double workers_max() const { return workers_max_; }
  double workers_min() const { return workers_min_; }
  double kept_usd() const { return kept_usd_; }
  // A price of rollouts with which every candidate has a negative reduced cost: a little above the highest unit cost,
  // so that rounding leaves none at 0.
  double highest_price(double usd_per_worker) const {
    return (unit_cost_max_ + std::max(0.0, usd_per_worker) / rate_min_) * (1 + 1e-6) + 1e-12;
  }

  Value least(double usd_per_rollout_s, double usd_per_worker) const {
    Value all;
    // No branches, because a large market has many candidates and best_slice() calls this often.
    for (std::size_t i = 0; i < rates_.size(); ++i) {
      const double reduced = costs_[i] - usd_per_rollout_s * rates_[i] + usd_per_worker;
      const double taken = reduced < 0 ? 1 : 0;
      all.reduced_cost += taken * reduced;
      all.rate += taken * rates_[i];
      all.count += taken;
    }
    const auto reduced_cost = [&](const Candidate& c) {
      return c.usd_per_hour - usd_per_rollout_s * c.rollouts_per_s + usd_per_worker;
    };
    for (const auto& machine : machines_) add(all, least_of_machine(machine, reduced_cost));
    for (const Host& host : hosts_) add(all, least_of_host(host, reduced_cost));
    return all;
  }

  // N of CostBound for this price of workers, without the kept candidates.
  double workers(double usd_per_worker) const { return usd_per_worker >= 0 ? workers_max_ : workers_min_; }
  double bound(const Value& value, double usd_per_rollout_s, double usd_per_worker) const {
    return kept_usd_ + usd_per_rollout_s * target_ - usd_per_worker * workers(usd_per_worker) + value.reduced_cost;
  }

 private:
  struct Host {
    std::map<std::uint32_t, std::vector<Candidate>> machines;
    std::size_t free = 0;  // how many of its candidates may join the kept ones in a set
  };

  static void add(Value& sum, const Value& part) {
    sum.reduced_cost += part.reduced_cost;
    sum.rate += part.rate;
    sum.count += part.count;
  }

  template <class ReducedCost>
  static Value least_of_machine(const std::vector<Candidate>& machine, const ReducedCost& reduced_cost) {
    std::vector<std::pair<double, const Candidate*>> useful;
    for (const Candidate& c : machine)
      if (const double reduced = reduced_cost(c); reduced < 0) useful.emplace_back(reduced, &c);
    Value best;
    if (useful.empty()) return best;
    if (useful.size() > kSharersMax) {  // relaxed: as if they shared nothing
      for (const auto& [reduced, c] : useful) add(best, {reduced, c->rollouts_per_s, 1});
      return best;
    }
    // Tries every set of useful candidates that share no GPU: a set with the GPUs `gpus` and the sums `value`, and all
    // its extensions by useful candidates from the index `from` on.
    const auto visit = [&](const auto& self, std::size_t from, std::uint64_t gpus, const Value& value) -> void {
      if (value.reduced_cost < best.reduced_cost) best = value;
      for (std::size_t i = from; i < useful.size(); ++i) {
        const auto& [reduced, c] = useful[i];
        if (gpus & c->gpus) continue;
        Value extended = value;
        add(extended, {reduced, c->rollouts_per_s, 1});
        self(self, i + 1, gpus | c->gpus, extended);
      }
    };
    visit(visit, 0, 0, {});
    return best;
  }

  // The greater of two lower bounds: one ignores the host's limit, the other ignores shared GPUs.
  template <class ReducedCost>
  static Value least_of_host(const Host& host, const ReducedCost& reduced_cost) {
    Value without_limit;
    std::vector<std::pair<double, double>> useful;  // reduced cost and rate
    for (const auto& [number, machine] : host.machines) {
      add(without_limit, least_of_machine(machine, reduced_cost));
      for (const Candidate& c : machine)
        if (const double reduced = reduced_cost(c); reduced < 0) useful.emplace_back(reduced, c.rollouts_per_s);
    }
    std::sort(useful.begin(), useful.end());
    Value without_gpus;
    for (std::size_t i = 0; i < std::min(host.free, useful.size()); ++i)
      add(without_gpus, {useful[i].first, useful[i].second, 1});
    return without_gpus.reduced_cost > without_limit.reduced_cost ? without_gpus : without_limit;
  }

  double target_, workers_max_, workers_min_;     // without the kept candidates
  double kept_usd_ = 0;                           // $ per hour of the kept candidates
  double unit_cost_max_ = 0, rate_min_ = 1e300;   // over the candidates that are not kept
  std::vector<double> rates_, costs_;             // of the candidates that exclude no other one
  std::vector<std::vector<Candidate>> machines_;  // machines with several candidates
  std::vector<Host> hosts_;                       // hosts with more candidates than a set may have of them
};

// The greatest bound for one price of workers.
struct Slice {
  CostBound bound;
  double count = 0;  // workers at exactly the target rate, interpolated between the sets just below and above it
  bool reaches_target = false;
};

// Bisects the price of rollouts. At the price `low`, the set of least reduced cost does not reach the target; at
// `high`, it does.
Slice best_slice(const Relaxation& relaxation, double usd_per_worker) {
  Slice slice;
  slice.bound.usd_per_worker = usd_per_worker;
  double low = 0, high = relaxation.highest_price(usd_per_worker);
  auto at_low = relaxation.least(low, usd_per_worker), at_high = relaxation.least(high, usd_per_worker);
  // highest_price() can be too low if candidates share a machine: the fastest may be the best only at a higher price.
  for (int i = 0; i < kBisections && at_high.rate < relaxation.target(); ++i) {
    low = high, at_low = at_high;
    high *= 2;
    at_high = relaxation.least(high, usd_per_worker);
  }
  slice.reaches_target = at_high.rate >= relaxation.target() * (1 - kRounding);
  if (!slice.reaches_target) return slice;
  for (int i = 0; i < kBisections && at_low.rate < relaxation.target(); ++i) {
    const double middle = (low + high) / 2;
    const auto at_middle = relaxation.least(middle, usd_per_worker);
    if (at_middle.rate < relaxation.target())
      low = middle, at_low = at_middle;
    else
      high = middle, at_high = at_middle;
  }
  const double low_bound = relaxation.bound(at_low, low, usd_per_worker),
               high_bound = relaxation.bound(at_high, high, usd_per_worker);
  slice.bound.usd_per_hour = std::max(low_bound, high_bound);
  slice.bound.usd_per_rollout_s = high_bound >= low_bound ? high : low;
  const double rate_gap = at_high.rate - at_low.rate;
  const double share = rate_gap > 0 ? std::clamp((relaxation.target() - at_low.rate) / rate_gap, 0.0, 1.0) : 1;
  slice.count = at_low.count + share * (at_high.count - at_low.count);
  return slice;
}

// Whether the kept and the fastest other candidates, `workers_max` in all, reach the target. Ignores that candidates
// can exclude each other.
bool can_reach(std::span<const Candidate> pool, std::span<const std::size_t> indices, double target,
               AllocationLimits limits) {
  std::vector<double> rates;
  double rate = 0;
  std::size_t kept = 0;
  for (const std::size_t i : indices) {
    if (pool[i].keep) {
      rate += pool[i].rollouts_per_s;
      ++kept;
    } else {
      rates.push_back(pool[i].rollouts_per_s);
    }
  }
  const std::size_t free = kept < limits.workers_max ? limits.workers_max - kept : 0;
  const auto added_end = rates.begin() + static_cast<std::ptrdiff_t>(std::min(rates.size(), free));
  std::nth_element(rates.begin(), added_end, rates.end(), std::greater<>());
  rate = std::accumulate(rates.begin(), added_end, rate);
  return rate >= target * (1 - kRounding);
}

}  // namespace

double least_reduced_cost(std::span<const Candidate> pool, AllocationLimits limits, const CostBound& prices) {
  std::vector<std::size_t> all(pool.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  return Relaxation(pool, all, 0, limits).least(prices.usd_per_rollout_s, prices.usd_per_worker).reduced_cost;
}

double bound_of(std::span<const Candidate> pool, double target, AllocationLimits limits, const CostBound& prices) {
  std::vector<std::size_t> all(pool.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  const Relaxation relaxation(pool, all, target, limits);
  return relaxation.bound(relaxation.least(prices.usd_per_rollout_s, prices.usd_per_worker), prices.usd_per_rollout_s,
                          prices.usd_per_worker);
}

std::optional<CostBound> best_bound(std::span<const Candidate> pool, std::span<const std::size_t> indices,
                                    double target, AllocationLimits limits) {
  if (!can_reach(pool, indices, target, limits)) return std::nullopt;
  const Relaxation relaxation(pool, indices, target, limits);
  if (relaxation.target() <= 0) return CostBound{.usd_per_hour = relaxation.kept_usd()};
  const Slice without_price = best_slice(relaxation, 0);
  if (!without_price.reaches_target) return std::nullopt;
  // The bound is concave in the price of workers. Raising the price from 0 raises the bound while more workers are
  // taken than allowed. Lowering it from 0 raises the bound while fewer are taken than any set needs.
  const double count = without_price.count;
  const bool has_too_many = count > relaxation.workers_max(), has_too_few = count < relaxation.workers_min();
  CostBound best = without_price.bound;
  if (has_too_many || has_too_few) {
    const double sign = has_too_many ? 1 : -1;
    // Prices without their sign. `high` begins at the mean cost of a worker, and positive, because it is doubled below.
    double low = 0, high = std::max(best.usd_per_hour / std::max(1.0, relaxation.workers_max()), 1e-9);
    // Tries a price: keeps its bound if it is the greatest, and returns whether the price is at or beyond the optimum.
    const auto try_price = [&](double price) {
      const Slice slice = best_slice(relaxation, sign * price);
      if (slice.bound.usd_per_hour > best.usd_per_hour) best = slice.bound;
      return has_too_many ? slice.count <= relaxation.workers_max() : slice.count >= relaxation.workers_min();
    };
    for (int doublings = 0; doublings < kBisections && !try_price(high); ++doublings) low = high, high *= 2;
    for (int i = 0; i < kBisections && high - low > 1e-10 * high; ++i) {
      const double middle = (low + high) / 2;
      (try_price(middle) ? high : low) = middle;
    }
  }
  double kept = 0;
  for (const std::size_t i : indices) kept += pool[i].keep;
  best.workers = relaxation.workers(best.usd_per_worker) + kept;
  return best;
}

std::optional<CostBound> cost_bound(std::span<const Candidate> pool, std::vector<std::size_t>& indices, double target,
                                    AllocationLimits limits) {
  std::optional<CostBound> best;
  for (int round = 0; round < kRounds; ++round) {
    std::optional<CostBound> bound = best_bound(pool, indices, target, limits);
    if (!bound) {  // the listed candidates cannot reach the target, so all are listed
      if (indices.size() == pool.size()) return best;
      indices.resize(pool.size());
      std::iota(indices.begin(), indices.end(), std::size_t{0});
      continue;
    }
    if (indices.size() == pool.size()) return bound;
    // Now the bound of the whole pool with these prices. Unlisted candidates with negative reduced costs lower it.
    const double list_usd_per_hour = bound->usd_per_hour;
    bound->usd_per_hour = bound_of(pool, target, limits, *bound);
    if (!best || bound->usd_per_hour > best->usd_per_hour) best = bound;
    // Stops if the unlisted candidates hardly lower the bound.
    if (bound->usd_per_hour >= list_usd_per_hour * (1 - 1e-6)) break;
    std::vector<bool> is_listed(pool.size());
    for (const std::size_t i : indices) is_listed[i] = true;
    std::vector<std::pair<double, std::size_t>> useful;
    for (std::size_t i = 0; i < pool.size(); ++i)
      if (!is_listed[i] && bound->reduced_cost(pool[i]) < 0) useful.emplace_back(bound->reduced_cost(pool[i]), i);
    if (useful.empty()) break;
    std::sort(useful.begin(), useful.end());
    if (useful.size() > kAddedMax) useful.resize(kAddedMax);
    for (const auto& [reduced, i] : useful) indices.push_back(i);
  }
  return best;
}

}  // namespace echoline::provisioner
