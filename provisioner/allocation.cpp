#include "provisioner/allocation.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

// A sum that misses the target by rounding alone still meets it.
bool meets(double rollouts_per_s, double target) { return rollouts_per_s >= target * (1 - 1e-12); }

class Selection {
 public:
  explicit Selection(std::span<const Candidate> pool) : pool_(pool), in_(pool.size(), false) {}
  void add(std::size_t i) { in_[i] = true, ++count_; }
  void remove(std::size_t i) { in_[i] = false, --count_; }
  bool has(std::size_t i) const { return in_[i]; }
  std::size_t count() const { return count_; }
  // Summed afresh: repeated adding and subtracting would drift.
  double rate() const { return sum(&Candidate::rollouts_per_s); }
  double cost() const { return sum(&Candidate::usd_per_hour); }
  std::vector<std::size_t> indices() const {
    std::vector<std::size_t> out;
    for (std::size_t i = 0; i < in_.size(); ++i)
      if (in_[i]) out.push_back(i);
    return out;
  }

 private:
  double sum(double Candidate::*field) const {
    double total = 0;
    for (std::size_t i = 0; i < in_.size(); ++i)
      if (in_[i]) total += pool_[i].*field;
    return total;
  }
  std::span<const Candidate> pool_;
  std::vector<bool> in_;
  std::size_t count_ = 0;
};

// Exchanges slow members for faster outsiders, each time the exchange with the least extra cost per rollout gained.
bool reach_by_exchange(std::span<const Candidate> pool, double target, Selection& set) {
  while (!meets(set.rate(), target)) {
    std::optional<std::tuple<double, double, std::size_t, std::size_t>> best;  // cost per gain, -gain, out, in
    for (std::size_t out = 0; out < pool.size(); ++out) {
      if (!set.has(out)) continue;
      for (std::size_t in = 0; in < pool.size(); ++in) {
        const double gain = pool[in].rollouts_per_s - pool[out].rollouts_per_s;
        if (set.has(in) || gain <= 0) continue;
        const std::tuple move((pool[in].usd_per_hour - pool[out].usd_per_hour) / gain, -gain, out, in);
        if (!best || move < *best) best = move;
      }
    }
    if (!best) return false;  // these are the fastest there are
    set.remove(std::get<2>(*best));
    set.add(std::get<3>(*best));
  }
  return true;
}

// Dearest first: what the target does not need goes.
void drop_unneeded(std::span<const Candidate> pool, double target, Selection& set) {
  std::vector<std::size_t> dearest = set.indices();
  std::stable_sort(dearest.begin(), dearest.end(),
                   [&](auto a, auto b) { return pool[a].usd_per_hour > pool[b].usd_per_hour; });
  for (const std::size_t i : dearest) {
    set.remove(i);
    if (!meets(set.rate(), target)) set.add(i);
  }
}

// The last of the order may be larger than what was missing: the cheapest single outsider that suffices takes its
// place.
void replace_last(std::span<const Candidate> pool, std::span<const std::size_t> order, double target, Selection& set) {
  const auto last = std::find_if(order.rbegin(), order.rend(), [&](auto i) { return set.has(i); });
  if (last == order.rend()) return;
  set.remove(*last);
  const double others = set.rate();
  std::size_t substitute = *last;
  for (const std::size_t i : order)
    if (!set.has(i) && meets(others + pool[i].rollouts_per_s, target) &&
        pool[i].usd_per_hour < pool[substitute].usd_per_hour)
      substitute = i;
  set.add(substitute);
}

// Depth-first over candidates in unit-cost order; a branch is cut when even its relaxation costs no less than the best.
class BranchAndBound {
 public:
  BranchAndBound(std::span<const Candidate> pool, double target, std::size_t workers_max)
      : pool_(pool), order_(by_unit_cost(pool)), target_(target), workers_max_(workers_max), set_(pool) {}

  std::optional<std::vector<std::size_t>> solve() {
    visit(0, 0, 0);
    return best_;
  }

 private:
  // Least cost of reaching the target from (depth, rate) when workers could be rented in part; absent if impossible.
  std::optional<double> relaxed(std::size_t depth, double rate, double cost) const {
    for (std::size_t d = depth; d < order_.size(); ++d) {
      if (meets(rate, target_)) return cost;
      const Candidate& c = pool_[order_[d]];
      const double share = std::min(1.0, (target_ - rate) / c.rollouts_per_s);
      rate += share * c.rollouts_per_s;
      cost += share * c.usd_per_hour;
    }
    if (!meets(rate, target_)) return std::nullopt;
    return cost;
  }

  void visit(std::size_t depth, double rate, double cost) {
    if (meets(rate, target_)) {
      if (!best_ || cost < best_cost_ - 1e-12) {
        best_ = set_.indices();
        best_cost_ = cost;
      }
      return;
    }
    if (depth == order_.size() || set_.count() == workers_max_) return;
    const std::optional<double> bound = relaxed(depth, rate, cost);
    if (!bound || (best_ && *bound >= best_cost_ - 1e-12)) return;
    const std::size_t i = order_[depth];
    set_.add(i);
    visit(depth + 1, rate + pool_[i].rollouts_per_s, cost + pool_[i].usd_per_hour);
    set_.remove(i);
    visit(depth + 1, rate, cost);
  }

  std::span<const Candidate> pool_;
  std::vector<std::size_t> order_;
  double target_;
  std::size_t workers_max_;
  Selection set_;
  std::optional<std::vector<std::size_t>> best_;
  double best_cost_ = 0;
};

}  // namespace

std::vector<std::size_t> by_unit_cost(std::span<const Candidate> pool) {
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const auto key = [&](std::size_t i) {
      return std::tuple(pool[i].usd_per_hour / pool[i].rollouts_per_s, -pool[i].rollouts_per_s, i);
    };
    return key(a) < key(b);
  });
  return order;
}

std::optional<Allocation> allocate_greedy(std::span<const Candidate> pool, double target, std::size_t workers_max) {
  const std::vector<std::size_t> order = by_unit_cost(pool);
  Selection set(pool);
  for (const std::size_t i : order) {
    if (meets(set.rate(), target) || set.count() == workers_max) break;
    set.add(i);
  }
  if (!reach_by_exchange(pool, target, set)) return std::nullopt;
  const std::vector<std::size_t> first = set.indices();

  // Either improvement can stand in the other's way, so both orders are tried.
  Selection dropped_first = set;
  drop_unneeded(pool, target, dropped_first);
  replace_last(pool, order, target, dropped_first);
  drop_unneeded(pool, target, dropped_first);
  replace_last(pool, order, target, set);
  drop_unneeded(pool, target, set);
  if (dropped_first.cost() <= set.cost()) set = dropped_first;

  Allocation result{set.indices(), {}, set.rate(), set.cost()};
  for (const std::size_t i : first)
    if (!set.has(i)) result.dropped.push_back(i);
  return result;
}

std::optional<Allocation> allocate_exact(std::span<const Candidate> pool, double target, std::size_t workers_max) {
  ECHO_CHECK(pool.size() <= kExactPoolMax, "{} candidates, at most {}", pool.size(), kExactPoolMax);
  const auto best = BranchAndBound(pool, target, workers_max).solve();
  if (!best) return std::nullopt;
  Selection set(pool);
  for (const std::size_t i : *best) set.add(i);
  return Allocation{*best, {}, set.rate(), set.cost()};
}

std::optional<double> lp_bound(std::span<const Candidate> pool, double target) {
  double rate = 0;
  double cost = 0;
  for (const std::size_t i : by_unit_cost(pool)) {
    if (rate >= target) return cost;
    const double share = std::min(1.0, (target - rate) / pool[i].rollouts_per_s);
    rate += share * pool[i].rollouts_per_s;
    cost += share * pool[i].usd_per_hour;
  }
  if (!meets(rate, target)) return std::nullopt;
  return cost;
}

}  // namespace echoline::provisioner
