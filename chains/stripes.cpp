// Plans stripes for plan_chains(), plan_trees() and plan_relays(), and builds their chains.
#include "chains/stripes.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

namespace echoline::chains {
namespace {

constexpr int kBisections = 60;                // halvings of an interval of rates, to the precision of a double
constexpr double kStripeRateTolerance = 1.03;  // fewer stripes are preferred up to this factor below the best rate
constexpr double kRounding = 1 + 1e-9;         // a ratio that misses an integer by this factor counts as that integer

// Whether all workers can have a parent in each stripe. `child_capacity`: for each worker, and last for the learner,
// the number of children that its uplink can feed, summed over stripes.
bool all_have_parents(std::size_t stripes, std::span<const std::size_t> child_capacity) {
  const std::size_t n = child_capacity.size() - 1, learner_children_max = child_capacity.back();
  const std::size_t worker_children_total =
      std::accumulate(child_capacity.begin(), child_capacity.end() - 1, std::size_t{0});
  // A stripe has n edges, one to each worker. At most n - 1 of them come from workers, because its first worker
  // receives from the learner. The learner feeds the remaining edges.
  const std::size_t worker_edges = std::min(worker_children_total, stripes * (n - 1));
  return stripes * n - worker_edges <= learner_children_max;
}

// Plans the number of children of each worker. `child_capacity`: as for all_have_parents().
std::vector<std::size_t> child_counts_of(std::size_t stripes, std::span<const std::size_t> child_capacity,
                                         std::span<const ChainWorker> workers) {
  const std::size_t n = workers.size(), learner_children_max = child_capacity.back();
  std::vector<std::size_t> counts(child_capacity.begin(), child_capacity.end() - 1);
  std::size_t worker_children_total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  const std::size_t edges_total = stripes * n;
  if (worker_children_total > edges_total) return counts;  // enough without the learner
  // Edges that no worker feeds are the learner's. It feeds as many children as it can, because that makes the paths
  // shorter. It takes over one child at a time from each worker in turn, first from those with the least uplink.
  const auto learner_children = [&] { return edges_total - worker_children_total; };
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return workers[a].forwarding_up() < workers[b].forwarding_up();
  });
  while (learner_children() < learner_children_max && worker_children_total > 0)
    for (const std::size_t i : order) {
      if (counts[i] == 0 || learner_children() >= learner_children_max) continue;
      --counts[i];
      --worker_children_total;
    }
  return counts;
}

// For each worker, then for the learner: the number of children that its uplink can feed while all workers receive at
// `rate`, summed over stripes.
std::vector<std::size_t> child_capacities(BitRate rate, std::size_t stripes, BitRate learner_up,
                                          std::span<const ChainWorker> workers, const StripeLimits& limits) {
  // An edge carries one stripe, 1/stripes of the payload. At least 1 bit/s, because it is a divisor.
  const double stripe_rate = std::max(rate.bits_per_s, 1.0) / static_cast<double>(stripes);
  const auto capacity_of = [&](BitRate up, std::size_t children_max) {
    const double edges = std::floor(up.bits_per_s / stripe_rate * kRounding);
    return static_cast<std::size_t>(std::min(edges, static_cast<double>(children_max)));
  };
  std::vector<std::size_t> capacities;
  const std::size_t worker_children_max = std::min(stripes * limits.children_per_stripe_max, kChildrenOverStripesMax);
  for (const ChainWorker& w : workers) capacities.push_back(capacity_of(w.forwarding_up(), worker_children_max));
  capacities.push_back(capacity_of(learner_up, stripes * workers.size()));
  return capacities;
}

}  // namespace

BitRate best_rate(std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                  const StripeLimits& limits) {
  // Bisects between a rate at which all workers can be fed (`low`) and one at which they cannot (`high`).
  double low = 0, high = learner_up.bits_per_s, sum_up = learner_up.bits_per_s;
  for (const ChainWorker& w : workers) {
    high = std::min(high, w.down.bits_per_s);
    sum_up += w.forwarding_up().bits_per_s;
  }
  if (limits.reserved_up.bits_per_s > 0) {
    // The workers of this plan share the uplink that is not reserved. At least 1 bit/s, also if all is reserved.
    const double uplink_left = kUsableUplinkFraction * sum_up - limits.reserved_up.bits_per_s;
    const double even_share = uplink_left / static_cast<double>(workers.size());
    high = std::min(high, std::max(1.0, even_share));
  }
  const auto feeds_all = [&](double rate) {
    return all_have_parents(stripes, child_capacities({rate}, stripes, learner_up, workers, limits));
  };
  if (feeds_all(high)) return {high};
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    if (feeds_all(middle))
      low = middle;
    else
      high = middle;
  }
  return {low};
}

StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers, const StripeLimits& limits) {
  ECHO_CHECK(!workers.empty());
  std::map<std::size_t, BitRate> rates;                           // by number of stripes
  const bool plans_chains = limits.children_per_stripe_max == 1;  // false: trees
  for (std::size_t s = plans_chains ? 1 : kTreeStripesMin; s <= kPlannedStripesMax; s *= 2)
    rates[s] = best_rate(s, learner_up, workers, limits);
  BitRate best{0};
  for (const auto& [s, rate] : rates) best = std::max(best, rate);
  const auto fewest = std::find_if(rates.begin(), rates.end(), [&](const auto& entry) {
    return entry.second.bits_per_s * kStripeRateTolerance >= best.bits_per_s;
  });
  const auto [stripes, rate] = *fewest;
  return plan_stripes_at_rate(rate, stripes, learner_up, workers, limits);
}

StripePlan plan_stripes_at_rate(BitRate rate, std::size_t stripes, BitRate learner_up,
                                std::span<const ChainWorker> workers, const StripeLimits& limits) {
  StripePlan plan;
  plan.stripes = stripes;
  plan.rate = rate;
  const std::vector<std::size_t> child_capacity = child_capacities(rate, stripes, learner_up, workers, limits);
  plan.child_capacity_total = std::accumulate(child_capacity.begin(), child_capacity.end() - 1, std::size_t{0});
  if (rate.bits_per_s > 0)
    plan.child_counts = child_counts_of(stripes, child_capacity, workers);
  else  // no rate is possible, because no worker can forward; so the learner feeds all workers
    plan.child_counts.assign(workers.size(), 0);
  return plan;
}

void build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t stripes = plan.stripes;
  // A worker that does not forward in a stripe is a tail there: it ends a chain. Deals the tails over the stripes in
  // turn, so all stripes have nearly the same number of chains.
  std::vector<std::vector<bool>> is_tail(stripes, std::vector<bool>(workers.size(), false));
  std::size_t next_stripe = 0;
  for (std::size_t i = 0; i < workers.size(); ++i)
    for (std::size_t k = plan.child_counts[i]; k < stripes; ++k) {
      is_tail[next_stripe][i] = true;
      next_stripe = (next_stripe + 1) % stripes;
    }
  topology.further_stripes.resize(stripes - 1);
  for (std::size_t s = 0; s < stripes; ++s) {
    std::vector<std::size_t> forwarders, tails;
    for (std::size_t i = 0; i < workers.size(); ++i) (is_tail[s][i] ? tails : forwarders).push_back(i);
    if (tails.empty()) {  // plans of plan_stripes() have a tail in each stripe, other plans may have none
      tails.push_back(forwarders.back());
      forwarders.pop_back();
    }
    // In stripe s, the order begins s/stripes of its length later, so that each worker is near the learner in some
    // stripe.
    const auto first = forwarders.begin() + static_cast<std::ptrdiff_t>(s * forwarders.size() / stripes);
    std::rotate(forwarders.begin(), first, forwarders.end());
    Chains chains(tails.size());
    for (std::size_t i = 0; i < forwarders.size(); ++i) chains[i % chains.size()].push_back(workers[forwarders[i]].id);
    // Each chain gets one tail. The first tails in placement order get the last chains, which are the shortest.
    for (std::size_t i = 0; i < tails.size(); ++i) chains[chains.size() - 1 - i].push_back(workers[tails[i]].id);
    topology.stripe(s) = std::move(chains);
  }
}

}  // namespace echoline::chains
