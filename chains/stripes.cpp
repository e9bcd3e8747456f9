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

constexpr int kBisections = 60;
constexpr double kWorthMoreStripes = 1.03;
constexpr double kRounding = 1 + 1e-9;

// Whether all workers are fed in `s` stripes, given the children that each uplink carries; the learner's is last.
bool all_fed(std::size_t s, std::span<const std::size_t> carried) {
  const std::size_t n = carried.size() - 1, seeds_max = carried.back();
  const std::size_t total = std::accumulate(carried.begin(), carried.end() - 1, std::size_t{0});
  // A worker that does not forward in a stripe ends a chain there, and every chain begins at the learner.
  return seeds_max >= s && s * n - std::min(total, s * (n - 1)) <= seeds_max;
}

// The number of children that each worker feeds, given the number that each uplink carries; the learner's is last.
std::vector<std::size_t> forwards_of(std::size_t s, std::vector<std::size_t> forwards,
                                     std::span<const ChainWorker> workers) {
  const std::size_t n = workers.size(), seeds_max = forwards.back();
  forwards.pop_back();
  std::size_t total = std::accumulate(forwards.begin(), forwards.end(), std::size_t{0});
  // The learner feeds as many as it can; this relieves the workers with the least uplink first.
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return workers[a].usable_up() < workers[b].usable_up(); });
  while (s * n - total < seeds_max && total > 0) {
    bool spared = false;
    for (const std::size_t i : order) {
      if (forwards[i] == 0 || s * n - total >= seeds_max) continue;
      --forwards[i];
      --total;
      spared = true;
    }
    if (!spared) break;
  }
  return forwards;
}

// How many children each uplink, the learner's last, carries while all workers receive at `rate`, summed over stripes.
std::vector<std::size_t> children_carried(BitRate rate, std::size_t stripes, BitRate learner_up,
                                          std::span<const ChainWorker> workers, const StripeLimits& limits) {
  const double q = std::max(rate.bits_per_s, 1.0) / static_cast<double>(stripes);
  const auto carried = [&](BitRate up, std::size_t most) {
    return static_cast<std::size_t>(std::min(std::floor(up.bits_per_s / q * kRounding), static_cast<double>(most)));
  };
  std::vector<std::size_t> children;
  for (const ChainWorker& w : workers)
    children.push_back(carried(w.usable_up(), std::min(stripes * limits.children_max, kPlannedChildrenMax)));
  children.push_back(carried(learner_up, stripes * workers.size()));
  return children;
}

}  // namespace

BitRate best_rate(std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                  const StripeLimits& limits) {
  double low = 0, high = learner_up.bits_per_s, sum_up = learner_up.bits_per_s;
  for (const ChainWorker& w : workers) {
    high = std::min(high, w.down.bits_per_s);
    sum_up += w.usable_up().bits_per_s;
  }
  if (limits.others.bits_per_s > 0) {
    const double left = kSharedOut * sum_up - limits.others.bits_per_s;
    high = std::min(high, std::max(1.0, left / static_cast<double>(workers.size())));
  }
  const auto feeds_all = [&](double rate) {
    return all_fed(stripes, children_carried({rate}, stripes, learner_up, workers, limits));
  };
  if (feeds_all(high)) return {high};
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (feeds_all(middle) ? low : high) = middle;
  }
  return {low};
}

StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers, const StripeLimits& limits) {
  ECHO_CHECK(!workers.empty());
  std::map<std::size_t, BitRate> rates;  // by number of stripes
  for (std::size_t s = limits.children_max == 1 ? 1 : kTreeStripesMin; s <= kPlannedStripesMax; s *= 2)
    rates[s] = best_rate(s, learner_up, workers, limits);
  BitRate best{0};
  for (const auto& [s, rate] : rates) best = std::max(best, rate);
  const auto chosen = std::find_if(rates.begin(), rates.end(), [&](const auto& of) {
    return of.second.bits_per_s * kWorthMoreStripes >= best.bits_per_s;
  });
  return plan_at(chosen->second, chosen->first, learner_up, workers, limits);
}

StripePlan plan_at(BitRate rate, std::size_t stripes, BitRate learner_up, std::span<const ChainWorker> workers,
                   const StripeLimits& limits) {
  StripePlan plan;
  plan.stripes = stripes;
  plan.rate = rate;
  std::vector<std::size_t> carried = children_carried(rate, stripes, learner_up, workers, limits);
  plan.carried = std::accumulate(carried.begin(), carried.end() - 1, std::size_t{0});
  if (rate.bits_per_s > 0)
    plan.forwards = forwards_of(stripes, std::move(carried), workers);
  else  // no worker may forward, so the learner serves all
    plan.forwards.assign(workers.size(), 0);
  return plan;
}

void build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t s = plan.stripes;
  // Deals the tail places over the stripes in turn, so all stripes have nearly the same number of chains, and at least
  // one.
  std::vector<std::vector<bool>> tail(s, std::vector<bool>(workers.size(), false));
  std::size_t next = 0;
  for (std::size_t i = 0; i < workers.size(); ++i)
    for (std::size_t k = plan.forwards[i]; k < s; ++k) {
      tail[next][i] = true;
      next = (next + 1) % s;
    }
  topology.further.resize(s - 1);
  for (std::size_t j = 0; j < s; ++j) {
    std::vector<std::size_t> forwarders, tails;
    for (std::size_t i = 0; i < workers.size(); ++i) (tail[j][i] ? tails : forwarders).push_back(i);
    if (tails.empty()) tails.push_back(std::exchange(forwarders, {forwarders.begin(), forwarders.end() - 1}).back());
    // Rotates the order, so that each worker is near the learner in some stripe.
    if (!forwarders.empty())
      std::rotate(forwarders.begin(),
                  forwarders.begin() + static_cast<std::ptrdiff_t>(j * forwarders.size() / s % forwarders.size()),
                  forwarders.end());
    Chains chains(tails.size());
    for (std::size_t i = 0; i < forwarders.size(); ++i) chains[i % chains.size()].push_back(workers[forwarders[i]].id);
    // The longest chains get their tails last, so lengths differ by at most one.
    for (std::size_t i = 0; i < tails.size(); ++i) chains[chains.size() - 1 - i].push_back(workers[tails[i]].id);
    topology.stripe(j) = std::move(chains);
  }
}

}  // namespace echoline::chains
