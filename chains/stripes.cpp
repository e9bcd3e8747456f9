#include "chains/stripes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace echoline::chains {
namespace {

constexpr int kBisections = 60;
constexpr double kWorthMoreStripes = 1.03;
constexpr double kRounding = 1 + 1e-9;

double usable_up(const ChainWorker& w) { return w.may_forward ? w.up.bits_per_s : 0; }

std::size_t shares(double up, double q, std::size_t most) {
  return static_cast<std::size_t>(std::min(std::floor(up / q * kRounding), static_cast<double>(most)));
}

// In how many of `s` stripes each worker forwards at rate r; nothing when that does not feed everybody.
std::optional<std::vector<std::size_t>> forwards_at(double r, std::size_t s, double learner_up,
                                                    std::span<const ChainWorker> workers) {
  const std::size_t n = workers.size();
  const double q = r / static_cast<double>(s);
  std::vector<std::size_t> forwards;
  std::size_t total = 0;
  for (const ChainWorker& w : workers) {
    forwards.push_back(shares(usable_up(w), q, s));
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

double best_rate(std::size_t s, double learner_up, double most, std::span<const ChainWorker> workers) {
  double low = 0, high = most;
  if (forwards_at(high, s, learner_up, workers)) return high;
  for (int i = 0; i < kBisections; ++i) {
    const double middle = (low + high) / 2;
    (forwards_at(middle, s, learner_up, workers) ? low : high) = middle;
  }
  return low;
}

}  // namespace

StripePlan plan_stripes(BitRate learner_up, std::span<const ChainWorker> workers) {
  ECHO_CHECK(!workers.empty());
  double most = learner_up.bits_per_s;
  for (const ChainWorker& w : workers) most = std::min(most, w.down.bits_per_s);
  std::vector<double> rates;
  for (std::size_t s = 1; s <= kPlannedStripesMax; s *= 2)
    rates.push_back(best_rate(s, learner_up.bits_per_s, most, workers));
  const double best = *std::max_element(rates.begin(), rates.end());
  StripePlan plan;
  for (std::size_t i = 0; rates[i] * kWorthMoreStripes < best; ++i) plan.stripes *= 2;
  const auto chosen = static_cast<std::size_t>(std::countr_zero(plan.stripes));
  plan.rate = {rates[chosen]};
  if (rates[chosen] > 0) {
    plan.forwards = *forwards_at(rates[chosen], plan.stripes, learner_up.bits_per_s, workers);
  } else {  // nobody may forward: the learner serves everybody
    plan.forwards.assign(workers.size(), 0);
  }
  return plan;
}

std::vector<Chains> build_stripes(const StripePlan& plan, std::span<const ChainWorker> workers) {
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
  std::vector<Chains> all;
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
    all.push_back(std::move(chains));
  }
  return all;
}

}  // namespace echoline::chains
