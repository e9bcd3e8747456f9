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

double usable_up(const ChainWorker& w) { return w.may_forward ? w.up.bits_per_s : 0; }

std::size_t shares(double up, double q, std::size_t most) {
  return static_cast<std::size_t>(std::min(std::floor(up / q * kRounding), static_cast<double>(most)));
}

// How many children each worker feeds at rate r, counted in each of `s` stripes; nothing when not everybody is fed.
std::optional<std::vector<std::size_t>> forwards_at(double r, std::size_t s, std::size_t children_max,
                                                    double learner_up, std::span<const ChainWorker> workers) {
  const std::size_t n = workers.size();
  const double q = r / static_cast<double>(s);
  const std::size_t most = std::min(s * children_max, kPlannedChildrenMax);
  std::vector<std::size_t> forwards;
  std::size_t total = 0;
  for (const ChainWorker& w : workers) {
    forwards.push_back(shares(usable_up(w), q, most));
    total += forwards.back();
  }
  const std::size_t seeds_max = shares(learner_up, q, s * n);
  if (seeds_max < s) return std::nullopt;
  // Whoever does not forward in a stripe ends a chain there, and every chain begins at the learner.
  if (s * n - std::min(total, s * (n - 1)) > seeds_max) return std::nullopt;
  // The learner's uplink is used up: those with the least uplink are spared first, for as long as it lasts.
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return usable_up(workers[a]) < usable_up(workers[b]); });
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

double best_rate(std::size_t s, std::size_t children_max, double learner_up, double most,
                 std::span<const ChainWorker> workers) {
  double low = 0, high = most;
  if (forwards_at(high, s, children_max, learner_up, workers)) return high;
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (forwards_at(middle, s, children_max, learner_up, workers) ? low : high) = middle;
  }
  return low;
}

}  // namespace

StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers, std::size_t children_max) {
  ECHO_CHECK(!workers.empty());
  double most = learner_up.bits_per_s;
  for (const ChainWorker& w : workers) most = std::min(most, w.down.bits_per_s);
  std::map<std::size_t, double> rates;  // by stripes
  for (std::size_t s = children_max == 1 ? 1 : kTreeStripesMin; s <= kPlannedStripesMax; s *= 2)
    rates[s] = best_rate(s, children_max, learner_up.bits_per_s, most, workers);
  double best = 0;
  for (const auto& [s, rate] : rates) best = std::max(best, rate);
  const auto chosen =
      std::find_if(rates.begin(), rates.end(), [&](const auto& of) { return of.second * kWorthMoreStripes >= best; });
  StripePlan plan;
  plan.stripes = chosen->first;
  plan.rate = {chosen->second};
  if (chosen->second > 0) {
    plan.forwards = *forwards_at(chosen->second, plan.stripes, children_max, learner_up.bits_per_s, workers);
  } else {  // nobody may forward: the learner serves everybody
    plan.forwards.assign(workers.size(), 0);
  }
  return plan;
}

void build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t s = plan.stripes;
  // Places at a tail go round over the stripes, so every stripe has nearly as many chains as the others, and at
  // least one: in all there are at least s.
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
    // Everybody is near the learner in some stripe.
    if (!forwarders.empty())
      std::rotate(forwarders.begin(),
                  forwarders.begin() + static_cast<std::ptrdiff_t>(j * forwarders.size() / s % forwarders.size()),
                  forwarders.end());
    Chains chains(tails.size());
    for (std::size_t i = 0; i < forwarders.size(); ++i) chains[i % chains.size()].push_back(workers[forwarders[i]].id);
    // The longest chains get their tails last: all are equally long, but for one worker.
    for (std::size_t i = 0; i < tails.size(); ++i) chains[chains.size() - 1 - i].push_back(workers[tails[i]].id);
    topology.stripe(j) = std::move(chains);
  }
}

void build_trees(const StripePlan& plan, std::span<const ChainWorker> workers, Topology& topology) {
  const std::size_t s = plan.stripes, n = workers.size();
  std::vector<std::size_t> left = plan.forwards, order(n), children(n);
  const std::size_t planned = std::accumulate(left.begin(), left.end(), std::size_t{0});
  const std::size_t seeds = s * n - std::min(planned, s * (n - 1));
  topology.further.resize(s - 1);
  topology.grafts.assign(s, {});
  for (std::size_t j = 0; j < s; ++j) {
    // Who has most left to give is asked first: no one is left with more than the remaining stripes can take.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return left[a] > left[b]; });
    std::size_t from_learner = seeds / s + (j < seeds % s), wanted = n - from_learner;
    std::fill(children.begin(), children.end(), 0);
    for (const std::size_t i : order) {
      children[i] = std::min({left[i], wanted, kTreeChildrenMax});
      left[i] -= children[i];
      wanted -= children[i];
    }
    from_learner += wanted;
    // Those with most children stand nearest to the learner, after those that should.
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::tuple(children[a] == 0, !workers[a].may_seed, children[b]) <
             std::tuple(children[b] == 0, !workers[b].may_seed, children[a]);
    });
    constexpr std::size_t kLearner = std::numeric_limits<std::size_t>::max();
    std::deque<std::size_t> open(from_learner, kLearner);  // places to stand, by parent
    std::map<std::size_t, std::size_t> tails;              // of chains: worker -> chain
    Chains& chains = topology.stripe(j);
    for (const std::size_t i : order) {
      const std::size_t parent = open.front();
      open.pop_front();
      open.insert(open.end(), children[i], i);
      if (const auto tail = parent == kLearner ? tails.end() : tails.find(parent); tail != tails.end()) {
        chains[tail->second].push_back(workers[i].id);
        tails[i] = tail->second;
        tails.erase(tail);
        continue;
      }
      if (parent != kLearner) topology.grafts[j][workers[i].id] = workers[parent].id;
      tails[i] = chains.size();
      chains.push_back({workers[i].id});
    }
  }
}

}  // namespace echoline::chains
