// Searches for the cheapest set of offers; make_plan() and FleetCore call it. Candidates are numbered by their index in
// the pool. The unit cost of a candidate is its price per rollout.
#include "provisioner/allocation.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

// Members and outsiders (candidates that are not members) that are considered for exchanges of two.
constexpr std::size_t kExchangeMembersMax = 64, kExchangeOutsidersMax = 48;
constexpr int kExchangesMax = 1000;
constexpr double kRounding = 1e-12;                 // relative tolerance of sums of rates and costs
constexpr std::uint64_t kNearestNodesMax = 20'000;  // of the exact search that ends allocate_greedy()

// Tolerates rounding: a sum just below the target meets it.
bool meets(double rollouts_per_s, double target) { return rollouts_per_s >= target * (1 - kRounding); }

bool is_cheaper(double cost, double other_cost) { return cost < other_cost * (1 - kRounding); }

using Members = std::span<const std::size_t>;

// A set of candidates that keeps to the limits and to machines' GPUs.
class Selection {
 public:
  Selection(std::span<const Candidate> pool, AllocationLimits limits)
      : pool_(pool), limits_(limits), is_member_(pool.size(), false) {
    std::uint32_t machines = 0, hosts = 0;
    for (const Candidate& c : pool) {
      machines = std::max(machines, c.machine);
      hosts = std::max(hosts, c.host);
    }
    gpus_in_use_.resize(machines + 1, 0);
    host_count_.resize(hosts + 1, 0);
    for (std::size_t i = 0; i < pool.size(); ++i)
      if (pool[i].keep) add(i);
  }

  void add(std::size_t i) {
    is_member_[i] = true;
    members_.push_back(i);
    const Candidate& c = pool_[i];
    if (c.machine) gpus_in_use_[c.machine] |= c.gpus;
    ++host_count_[c.host];
  }
  void remove(std::size_t i) {
    is_member_[i] = false;
    members_.erase(std::find(members_.begin(), members_.end(), i));
    const Candidate& c = pool_[i];
    if (c.machine) gpus_in_use_[c.machine] &= ~c.gpus;
    --host_count_[c.host];
  }
  void exchange(Members leaving, Members joining) {
    for (const std::size_t i : leaving) remove(i);
    for (const std::size_t i : joining) add(i);
  }
  bool contains(std::size_t i) const { return is_member_[i]; }
  std::size_t count() const { return members_.size(); }
  const std::vector<std::size_t>& members() const { return members_; }
  // Whether the limits hold after `leaving` are removed and `joining` are added.
  bool allows(Members joining, Members leaving = {}) const {
    if (count() - leaving.size() + joining.size() > limits_.workers_max) return false;
    for (std::size_t k = 0; k < joining.size(); ++k) {
      const Candidate& c = pool_[joining[k]];
      if (c.machine) {
        std::uint64_t gpus_in_use = gpus_in_use_[c.machine];
        for (const std::size_t leaver : leaving)
          if (pool_[leaver].machine == c.machine) gpus_in_use &= ~pool_[leaver].gpus;
        for (std::size_t earlier = 0; earlier < k; ++earlier)
          if (pool_[joining[earlier]].machine == c.machine) gpus_in_use |= pool_[joining[earlier]].gpus;
        if (gpus_in_use & c.gpus) return false;
      }
      if (c.host) {
        std::size_t count_after = host_count_[c.host];
        for (const std::size_t leaver : leaving) count_after -= pool_[leaver].host == c.host;
        for (const std::size_t joiner : joining) count_after += pool_[joiner].host == c.host;
        if (count_after > limits_.per_host_max) return false;
      }
    }
    return true;
  }
  bool allows(std::size_t i) const { return allows(Members(&i, 1)); }
  // Returns the members that must leave before candidate `i` can join: those with the same GPUs and, if its host has
  // the maximum, the slowest member of that host. Absent if a member that must leave has to be kept.
  std::optional<std::vector<std::size_t>> members_excluding(std::size_t i) const {
    const Candidate& c = pool_[i];
    std::vector<std::size_t> leaving;
    std::size_t count_of_host = c.host ? host_count_[c.host] : 0;
    std::optional<std::size_t> slowest_of_host;
    for (const std::size_t m : members_) {
      const Candidate& other = pool_[m];
      const bool shares_gpu = c.machine && other.machine == c.machine && (other.gpus & c.gpus) != 0;
      const bool has_same_host = c.host && other.host == c.host;
      if (shares_gpu) {
        if (other.keep) return std::nullopt;
        leaving.push_back(m);
        count_of_host -= has_same_host;
      } else if (has_same_host && !other.keep &&
                 (!slowest_of_host || other.rollouts_per_s < pool_[*slowest_of_host].rollouts_per_s)) {
        slowest_of_host = m;
      }
    }
    if (c.host && count_of_host >= limits_.per_host_max) {
      if (!slowest_of_host) return std::nullopt;
      leaving.push_back(*slowest_of_host);
    }
    return leaving;
  }
  // rate() and cost() are computed from scratch, because the errors of repeated additions and subtractions would add
  // up.
  double rate() const { return sum(&Candidate::rollouts_per_s); }
  double cost() const { return sum(&Candidate::usd_per_hour); }
  std::vector<std::size_t> sorted_members() const {
    std::vector<std::size_t> sorted = members_;
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  }
  Allocation allocation() const {
    return {.chosen = sorted_members(), .dropped = {}, .rollouts_per_s = rate(), .usd_per_hour = cost()};
  }

 private:
  double sum(double Candidate::*field) const {
    double total = 0;
    for (const std::size_t i : members_) total += pool_[i].*field;
    return total;
  }
  std::span<const Candidate> pool_;
  AllocationLimits limits_;
  std::vector<bool> is_member_;
  std::vector<std::size_t> members_;
  std::vector<std::uint64_t> gpus_in_use_;  // by machine
  std::vector<std::size_t> host_count_;     // members by host
};

// Replaces slow members, and members that exclude an outsider, by faster outsiders until the target is met. Each step
// has the least extra cost per rollout gained. Returns false if the target cannot be met.
bool reach_by_exchange(std::span<const Candidate> pool, double target, AllocationLimits limits, Selection& set) {
  while (!meets(set.rate(), target)) {
    std::optional<std::tuple<double, double, std::size_t>> best;  // cost per gained rollout, -gain, joining candidate
    std::vector<std::size_t> best_leaving;
    for (std::size_t joining = 0; joining < pool.size(); ++joining) {
      if (set.contains(joining)) continue;
      auto leaving = set.members_excluding(joining);
      if (!leaving) continue;
      double gain = pool[joining].rollouts_per_s, cost = pool[joining].usd_per_hour;
      for (const std::size_t leaver : *leaving) gain -= pool[leaver].rollouts_per_s, cost -= pool[leaver].usd_per_hour;
      const auto consider = [&](double extra_gain, double extra_cost, std::optional<std::size_t> also_leaving) {
        if (extra_gain <= 0) return;
        const std::tuple exchange(extra_cost / extra_gain, -extra_gain, joining);
        if (best && exchange >= *best) return;
        best = exchange;
        best_leaving = *leaving;
        if (also_leaving) best_leaving.push_back(*also_leaving);
      };
      if (set.count() - leaving->size() + 1 <= limits.workers_max) {
        consider(gain, cost, std::nullopt);
        continue;
      }
      for (const std::size_t leaver : set.members())
        if (!pool[leaver].keep) consider(gain - pool[leaver].rollouts_per_s, cost - pool[leaver].usd_per_hour, leaver);
    }
    if (!best) return false;
    const std::size_t joining = std::get<2>(*best);
    set.exchange(best_leaving, Members(&joining, 1));
  }
  return true;
}

// Drops members that the target does not need, dearest first.
void drop_unneeded(std::span<const Candidate> pool, double target, Selection& set) {
  std::vector<std::size_t> dearest_first = set.sorted_members();
  std::stable_sort(dearest_first.begin(), dearest_first.end(),
                   [&](auto a, auto b) { return pool[a].usd_per_hour > pool[b].usd_per_hour; });
  for (const std::size_t i : dearest_first) {
    if (pool[i].keep) continue;
    set.remove(i);
    if (!meets(set.rate(), target)) set.add(i);
  }
}

// Exchanges one or two members for one or two outsiders while that lowers the cost.
class Improver {
 public:
  Improver(std::span<const Candidate> pool, std::span<const std::size_t> order, double target, Selection& set)
      : pool_(pool), order_(order), target_(target), set_(set) {}

  // `drop_first`: drops unneeded members before the first exchange, not only after each exchange.
  void run(bool drop_first) {
    for (int i = 0; i < kExchangesMax; ++i) {
      const bool drops = drop_first || i > 0;
      if (drops) drop_unneeded(pool_, target_, set_);
      rate_ = set_.rate();
      best_saving_ = kRounding * std::max(1.0, set_.cost());
      has_exchange_ = false;
      try_singles();
      if (!has_exchange_) try_pairs();
      if (!has_exchange_ && drops) return;
      if (has_exchange_)
        set_.exchange(Members(leaving_.data(), leaving_count_), Members(joining_.data(), joining_count_));
    }
  }

 private:
  // One or two candidates that leave or join together.
  struct Part {
    std::array<std::size_t, 2> indices{};
    std::size_t count = 0;
    double rate = 0, cost = 0;
  };

  void consider(const Part& leaving, const Part& joining) {
    const double saving = leaving.cost - joining.cost;
    if (saving <= best_saving_ || !meets(rate_ - leaving.rate + joining.rate, target_)) return;
    if (!set_.allows(Members(joining.indices.data(), joining.count), Members(leaving.indices.data(), leaving.count)))
      return;
    best_saving_ = saving;
    has_exchange_ = true;
    leaving_ = leaving.indices, leaving_count_ = leaving.count;
    joining_ = joining.indices, joining_count_ = joining.count;
  }
  Part single(std::size_t i) const {
    return {.indices = {i, 0}, .count = 1, .rate = pool_[i].rollouts_per_s, .cost = pool_[i].usd_per_hour};
  }
  Part pair(std::size_t a, std::size_t b) const {
    return {.indices = {a, b},
            .count = 2,
            .rate = pool_[a].rollouts_per_s + pool_[b].rollouts_per_s,
            .cost = pool_[a].usd_per_hour + pool_[b].usd_per_hour};
  }
  std::vector<Part> singles_and_pairs(const std::vector<std::size_t>& candidates) const {
    std::vector<Part> parts;
    for (std::size_t a = 0; a < candidates.size(); ++a) {
      parts.push_back(single(candidates[a]));
      for (std::size_t b = 0; b < a; ++b) parts.push_back(pair(candidates[a], candidates[b]));
    }
    return parts;
  }
  // The members that may leave, dearest per rollout first, because their exchange saves most.
  std::vector<std::size_t> replaceable_members() const {
    std::vector<std::size_t> members;
    for (auto it = order_.rbegin(); it != order_.rend() && members.size() < kExchangeMembersMax; ++it)
      if (set_.contains(*it) && !pool_[*it].keep) members.push_back(*it);
    return members;
  }

  void try_singles() {
    for (const std::size_t m : replaceable_members()) {
      const Part leaving = single(m);
      for (const std::size_t i : order_)
        if (!set_.contains(i)) consider(leaving, single(i));
    }
  }

  void try_pairs() {
    std::vector<std::size_t> outsiders;
    for (const std::size_t i : order_) {
      if (outsiders.size() == kExchangeOutsidersMax) break;
      if (!set_.contains(i)) outsiders.push_back(i);
    }
    std::vector<Part> cheapest_first = singles_and_pairs(outsiders);
    std::sort(cheapest_first.begin(), cheapest_first.end(),
              [](const Part& a, const Part& b) { return a.cost < b.cost; });
    for (const Part& leaving : singles_and_pairs(replaceable_members()))
      for (const Part& joining : cheapest_first) {
        if (joining.cost >= leaving.cost - best_saving_) break;
        consider(leaving, joining);
      }
    // Tries two members for any single outsider as well, because that outsider may be far back in the order.
    for (const Part& leaving : singles_and_pairs(replaceable_members()))
      if (leaving.count == 2)
        for (const std::size_t i : order_)
          if (!set_.contains(i)) consider(leaving, single(i));
  }

  std::span<const Candidate> pool_;
  std::span<const std::size_t> order_;
  double target_;
  Selection& set_;
  double rate_ = 0;  // of set_
  // The best exchange so far, which saves best_saving_.
  double best_saving_ = 0;
  bool has_exchange_ = false;
  std::array<std::size_t, 2> leaving_{}, joining_{};
  std::size_t leaving_count_ = 0, joining_count_ = 0;
};

// Searches depth first, with the candidates by unit cost: each node adds the next candidate or skips it. Cuts a branch
// if its relaxation (the same problem with fractions of workers) costs at least as much as the best set.
class BranchAndBound {
 public:
  BranchAndBound(std::span<const Candidate> pool, double target, AllocationLimits limits,
                 const std::optional<Allocation>& known, std::uint64_t nodes_max)
      : pool_(pool), target_(target), nodes_left_(nodes_max), set_(pool, limits) {
    for (const std::size_t i : by_unit_cost(pool))
      if (!pool[i].keep) order_.push_back(i);
    if (known) {
      best_ = known->chosen;
      best_cost_ = known->usd_per_hour;
    }
    std::vector<std::size_t> count_by_machine;
    for (const Candidate& c : pool) {
      count_by_machine.resize(std::max<std::size_t>(count_by_machine.size(), c.machine + 1), 0);
      ++count_by_machine[c.machine];
    }
    const bool has_host_limit = limits.per_host_max < pool.size();
    for (const Candidate& c : pool) {
      const bool is_alone_on_machine = c.machine == 0 || count_by_machine[c.machine] == 1;
      excludes_none_.push_back(is_alone_on_machine && (c.host == 0 || !has_host_limit));
    }
  }

  ExactAllocation solve(AllocationLimits limits) {
    visit(0, set_.rate(), set_.cost());
    ExactAllocation result;
    result.is_proven_best = nodes_left_ > 0;
    if (!best_) return result;
    Selection set(pool_, limits);
    for (const std::size_t i : *best_)
      if (!set.contains(i)) set.add(i);
    result.best = set.allocation();
    return result;
  }

 private:
  // Returns the least cost of reaching the target with fractions of the candidates from `depth` on, given the rate and
  // cost so far. Absent if it cannot be reached.
  std::optional<double> relaxed_cost(std::size_t depth, double rate, double cost) const {
    for (std::size_t d = depth; d < order_.size(); ++d) {
      if (meets(rate, target_)) return cost;
      const Candidate& c = pool_[order_[d]];
      const double fraction = std::min(1.0, (target_ - rate) / c.rollouts_per_s);
      rate += fraction * c.rollouts_per_s;
      cost += fraction * c.usd_per_hour;
    }
    if (!meets(rate, target_)) return std::nullopt;
    return cost;
  }

  // Whether a skipped candidate would do at least as well in this one's place.
  bool is_dominated(const Candidate& c) const {
    return std::any_of(skipped_.begin(), skipped_.end(), [&](const Candidate* skipped) {
      return skipped->rollouts_per_s >= c.rollouts_per_s && skipped->usd_per_hour <= c.usd_per_hour;
    });
  }

  void visit(std::size_t depth, double rate, double cost) {
    if (nodes_left_ == 0) return;
    --nodes_left_;
    if (meets(rate, target_)) {
      if (!best_ || is_cheaper(cost, best_cost_)) {
        best_ = set_.sorted_members();
        best_cost_ = cost;
      }
      return;
    }
    if (depth == order_.size()) return;
    const std::optional<double> cost_min = relaxed_cost(depth, rate, cost);
    if (!cost_min || (best_ && !is_cheaper(*cost_min, best_cost_))) return;
    const std::size_t i = order_[depth];
    const Candidate& c = pool_[i];
    if (set_.allows(i) && !is_dominated(c)) {
      set_.add(i);
      visit(depth + 1, rate + c.rollouts_per_s, cost + c.usd_per_hour);
      set_.remove(i);
    }
    if (excludes_none_[i]) skipped_.push_back(&c);
    visit(depth + 1, rate, cost);
    if (excludes_none_[i]) skipped_.pop_back();
  }

  std::span<const Candidate> pool_;
  std::vector<std::size_t> order_;
  std::vector<bool> excludes_none_;  // by candidate: it shares no machine or limited host with another one
  double target_;
  std::uint64_t nodes_left_;
  Selection set_;
  std::vector<const Candidate*> skipped_;  // on the path to the current node; only those that exclude none
  std::optional<std::vector<std::size_t>> best_;
  double best_cost_ = 0;
};

// Adds the allowed candidates in this order until they reach the target, then tries exchanges. Absent if no set does.
std::optional<Selection> fill_in_order(std::span<const Candidate> pool, std::span<const std::size_t> order,
                                       double target, AllocationLimits limits) {
  Selection set(pool, limits);
  double rate = set.rate();
  for (const std::size_t i : order) {
    if (meets(rate, target) || set.count() >= limits.workers_max) break;
    if (set.contains(i) || !set.allows(i)) continue;
    set.add(i);
    rate += pool[i].rollouts_per_s;
  }
  if (!reach_by_exchange(pool, target, limits, set)) return std::nullopt;
  return set;
}

// Indices by throughput, fastest first.
std::vector<std::size_t> by_speed(std::span<const Candidate> pool) {
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return pool[a].rollouts_per_s > pool[b].rollouts_per_s; });
  return order;
}

// The set from which improvements start; absent if the target cannot be met.
std::optional<Selection> first_set(std::span<const Candidate> pool, std::span<const std::size_t> order, double target,
                                   AllocationLimits limits) {
  auto set = fill_in_order(pool, order, target, limits);
  // Cheap parts of a machine can exclude the whole machine and each other, so the fastest-first order is tried too.
  return set ? std::move(set) : fill_in_order(pool, by_speed(pool), target, limits);
}

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

std::optional<Allocation> allocate_prefix(std::span<const Candidate> pool, double target, AllocationLimits limits) {
  const auto set = first_set(pool, by_unit_cost(pool), target, limits);
  return set ? std::optional(set->allocation()) : std::nullopt;
}

std::optional<Allocation> allocate_greedy(std::span<const Candidate> pool, double target, AllocationLimits limits) {
  const std::vector<std::size_t> order = by_unit_cost(pool);
  auto set = first_set(pool, order, target, limits);
  if (!set) return std::nullopt;
  const std::vector<std::size_t> first_members = set->sorted_members();
  // Dropping can prevent exchanges and the reverse, so both orders are tried.
  Selection best = *set;
  for (const bool drop_first : {true, false}) {
    Selection improved = *set;
    Improver(pool, order, target, improved).run(drop_first);
    if (is_cheaper(improved.cost(), best.cost())) best = std::move(improved);
  }
  // Pairwise exchanges cannot, for example, replace all parts of a machine by the whole machine. An exact search
  // with a limit on its nodes, among the members and the cheapest outsiders, finds most such exchanges.
  std::vector<std::size_t> nearest;
  for (const std::size_t i : order)
    if (best.contains(i) || nearest.size() < first_members.size() + kExchangeOutsidersMax) nearest.push_back(i);
  std::vector<Candidate> nearest_pool;
  Allocation known{.chosen = {}, .dropped = {}, .rollouts_per_s = best.rate(), .usd_per_hour = best.cost()};
  for (std::size_t k = 0; k < nearest.size(); ++k) {
    nearest_pool.push_back(pool[nearest[k]]);
    if (best.contains(nearest[k])) known.chosen.push_back(k);
  }
  const auto exact = BranchAndBound(nearest_pool, target, limits, known, kNearestNodesMax).solve(limits);
  if (exact.best && is_cheaper(exact.best->usd_per_hour, best.cost())) {
    best = Selection(pool, limits);
    for (const std::size_t k : exact.best->chosen)
      if (!best.contains(nearest[k])) best.add(nearest[k]);
  }
  set = std::move(best);
  Allocation result = set->allocation();
  for (const std::size_t i : first_members)
    if (!set->contains(i)) result.dropped.push_back(i);
  return result;
}

ExactAllocation allocate_exact(std::span<const Candidate> pool, double target, AllocationLimits limits,
                               const std::optional<Allocation>& known, std::uint64_t nodes_max) {
  ECHO_CHECK(pool.size() <= kExactPoolMax, "{} candidates, at most {}", pool.size(), kExactPoolMax);
  return BranchAndBound(pool, target, limits, known, nodes_max).solve(limits);
}

std::optional<double> lp_bound(std::span<const Candidate> pool, double target) {
  double rate = 0;
  double cost = 0;
  for (const Candidate& c : pool) {
    if (!c.keep) continue;
    rate += c.rollouts_per_s;
    cost += c.usd_per_hour;
  }
  for (const std::size_t i : by_unit_cost(pool)) {
    if (pool[i].keep) continue;
    if (rate >= target) return cost;
    const double fraction = std::min(1.0, (target - rate) / pool[i].rollouts_per_s);
    rate += fraction * pool[i].rollouts_per_s;
    cost += fraction * pool[i].usd_per_hour;
  }
  if (!meets(rate, target)) return std::nullopt;
  return cost;
}

std::vector<std::size_t> shortlist(std::span<const Candidate> pool, AllocationLimits limits) {
  const std::size_t workers = std::min(limits.workers_max, pool.size());
  const std::size_t cheapest_count = 4 * workers + 256, fastest_count = 2 * workers + 64, low_price_count = 256;
  std::vector<bool> is_listed(pool.size(), pool.size() <= cheapest_count + fastest_count + low_price_count);
  const auto list_first = [&](const std::vector<std::size_t>& order, std::size_t count) {
    for (std::size_t i = 0; i < std::min(count, order.size()); ++i) is_listed[order[i]] = true;
  };
  const bool is_large = !pool.empty() && !is_listed[0];
  if (is_large) {
    list_first(by_unit_cost(pool), cheapest_count);
    const std::vector<std::size_t> fastest_first = by_speed(pool);
    list_first(fastest_first, fastest_count);
    Selection largest(pool, limits);  // the fastest that may be rented together
    for (const std::size_t i : fastest_first) {
      if (largest.count() >= workers) break;
      if (!largest.contains(i) && largest.allows(i)) largest.add(i);
    }
    list_first(largest.members(), largest.count());
    std::vector<std::size_t> by_price(pool.size());
    std::iota(by_price.begin(), by_price.end(), std::size_t{0});
    std::stable_sort(by_price.begin(), by_price.end(),
                     [&](auto a, auto b) { return pool[a].usd_per_hour < pool[b].usd_per_hour; });
    list_first(by_price, low_price_count);
  }
  std::vector<std::size_t> listed;
  for (std::size_t i = 0; i < pool.size(); ++i)
    if (is_listed[i] || pool[i].keep) listed.push_back(i);
  return listed;
}

}  // namespace echoline::provisioner
