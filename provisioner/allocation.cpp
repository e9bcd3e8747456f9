// Searches for the cheapest set of offers. Candidates are numbered by their index in the pool. The unit cost of a
// candidate is its price per rollout.
#include "provisioner/allocation.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

#include "base/result.hpp"
#include "provisioner/cost_bound.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kRounding = 1e-12;  // relative tolerance of sums of rates and costs
// Limits of the nodes that SplitSearch visits: in all, and in one part before it splits the part. Pools of at most
// kSmallPoolMax candidates have their own limits.
constexpr std::size_t kSmallPoolMax = 64;
constexpr std::uint64_t kSmallPoolNodesMax = 1'000'000, kSmallPoolNodesPerPart = 10'000;
constexpr std::uint64_t kNodesMax = 300'000, kNodesPerPart = 100'000;
constexpr std::size_t kCoreMax = 3000;   // most candidates of the branch and bound
constexpr double kUnlimitedGap = 1e300;  // gap of allocate() if no set is known: every candidate may be in one

// Tolerates rounding: a sum just below the target meets it.
bool meets(double rollouts_per_s, double target) { return rollouts_per_s >= target * (1 - kRounding); }

bool is_cheaper(double cost, double other_cost) { return cost < other_cost * (1 - kRounding); }

using Members = std::span<const std::size_t>;  // indices of candidates

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
    host_count_.resize(hosts + 1, 0);  // [0]: candidates to which no limit per host applies
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
    // The search removes the newest member, so this looks from the end.
    members_.erase(std::prev(std::find(members_.rbegin(), members_.rend(), i).base()));
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
  // Whether the limits hold after the members `leaving` are removed and the candidates `joining` are added.
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
  // Returns the members that must leave before candidate `i` can join: those that share a GPU with it and, if its host
  // still has the maximum without them, the slowest member of that host. Absent if one of them must be kept.
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
  std::vector<std::uint64_t> gpus_in_use_;  // by machine: GPUs of its members
  std::vector<std::size_t> host_count_;     // by host: number of its members
};

// Replaces slow members, and members that exclude an outsider, by faster outsiders until the target is met. Each step
// has the least extra cost per rollout gained. Returns false if the target cannot be met.
bool reach_by_exchange(std::span<const Candidate> pool, double target, AllocationLimits limits, Selection& set) {
  while (!meets(set.rate(), target)) {
    // An exchange: its extra cost per rollout gained, the negative gain (of equal ones the greatest gain is best), and
    // the joining candidate.
    std::optional<std::tuple<double, double, std::size_t>> best;
    std::vector<std::size_t> best_leaving;
    for (std::size_t joining = 0; joining < pool.size(); ++joining) {
      if (set.contains(joining)) continue;
      auto leaving = set.members_excluding(joining);
      if (!leaving) continue;
      double gain = pool[joining].rollouts_per_s, extra_usd = pool[joining].usd_per_hour;
      for (const std::size_t leaver : *leaving) {
        gain -= pool[leaver].rollouts_per_s;
        extra_usd -= pool[leaver].usd_per_hour;
      }
      const auto consider = [&](double total_gain, double total_extra_usd, std::optional<std::size_t> also_leaving) {
        if (total_gain <= 0) return;
        const std::tuple exchange(total_extra_usd / total_gain, -total_gain, joining);
        if (best && exchange >= *best) return;
        best = exchange;
        best_leaving = *leaving;
        if (also_leaving) best_leaving.push_back(*also_leaving);
      };
      if (set.count() - leaving->size() + 1 <= limits.workers_max) {
        consider(gain, extra_usd, std::nullopt);
        continue;
      }
      // The set is full, so one more member must leave.
      for (const std::size_t leaver : set.members())
        if (!pool[leaver].keep)
          consider(gain - pool[leaver].rollouts_per_s, extra_usd - pool[leaver].usd_per_hour, leaver);
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

struct SearchResult {
  std::optional<Allocation> best;  // absent if no set is cheaper than the one to beat
  bool is_complete = true;         // all sets were searched or cut, so no cheaper one exists
  std::uint64_t nodes_left = 0;
};

// Searches depth first. Each node decides about the next candidate: it adds it and it skips it, first what the sign of
// its reduced cost suggests. Cuts a branch whose bound (CostBound) is not below the cost of the best set. The bound
// sums the reduced costs of the added candidates and the least sum that a set of the undecided ones can have.
// Candidates whose reduced costs are far from 0 come first, because the wrong decision about one of them is mostly cut
// at once.
class BranchAndBound {
 public:
  BranchAndBound(std::span<const Candidate> pool, double target, AllocationLimits limits,
                 std::optional<double> cost_to_beat, std::uint64_t nodes_max, const CostBound& prices)
      : pool_(pool),
        target_(target),
        workers_max_(std::min(limits.workers_max, pool.size())),
        prices_(prices),
        nodes_left_(nodes_max),
        set_(pool, limits),
        cost_to_beat_(cost_to_beat) {
    constant_ = prices_.constant(target_);
    make_order(limits);
    if (pool.size() > kSmallPoolMax) return;  // relaxed_cost() and is_dominated() would take too long
    for (const std::size_t i : by_unit_cost(pool))
      if (!pool[i].keep) by_unit_cost_.push_back(i);
    is_decided_.resize(pool.size());
  }

  SearchResult solve(AllocationLimits limits) {
    visit(0, set_.rate(), set_.cost());
    SearchResult result;
    result.is_complete = nodes_left_ > 0;
    result.nodes_left = nodes_left_;
    if (!best_) return result;
    Selection set(pool_, limits);  // has the kept candidates
    for (const std::size_t i : *best_)
      if (!set.contains(i)) set.add(i);
    result.best = set.allocation();
    return result;
  }

 private:
  // Orders the candidates so that those that exclude one another are adjacent, in a group. Then computes, for each
  // depth, the sums over the candidates that are undecided there.
  void make_order(AllocationLimits limits) {
    // By (true, host) or (false, machine): the candidates that exclude one another.
    std::map<std::pair<bool, std::uint32_t>, std::vector<std::size_t>> group_by_sharing;
    std::map<std::uint32_t, std::size_t> machine_sizes, host_sizes;
    for (const Candidate& c : pool_) ++machine_sizes[c.machine], ++host_sizes[c.host];
    std::vector<std::vector<std::size_t>> groups;
    excludes_none_.resize(pool_.size(), false);
    for (std::size_t i = 0; i < pool_.size(); ++i) {
      const Candidate& c = pool_[i];
      const bool shares_host = c.host && host_sizes[c.host] > limits.per_host_max;
      const bool shares_machine = c.machine && machine_sizes[c.machine] > 1;
      excludes_none_[i] = !shares_host && !shares_machine;
      if (c.keep) continue;
      if (excludes_none_[i])
        groups.push_back({i});
      else
        group_by_sharing[{shares_host, shares_host ? c.host : c.machine}].push_back(i);
    }
    for (auto& [key, group] : group_by_sharing) groups.push_back(std::move(group));
    // How far the reduced cost is from 0.
    const auto distance = [&](std::size_t i) { return std::abs(prices_.reduced_cost(pool_[i])); };
    std::vector<std::pair<double, std::size_t>> farthest_first;  // negative distance, index into `groups`
    for (std::size_t g = 0; g < groups.size(); ++g) {
      std::stable_sort(groups[g].begin(), groups[g].end(), [&](auto x, auto y) { return distance(x) > distance(y); });
      farthest_first.emplace_back(-distance(groups[g].front()), g);
    }
    std::sort(farthest_first.begin(), farthest_first.end());
    // By depth: the least sum of reduced costs of a group, at the depth of its first candidate; 0 at the others.
    std::vector<double> least_of_group;
    std::vector<std::size_t> group_begin;  // by depth: the depth at which the candidate's group begins
    for (const auto& [negative_distance, g] : farthest_first) {
      std::vector<Candidate> group;
      for (const std::size_t i : groups[g]) {
        group_begin.push_back(order_.size() - group.size());
        least_of_group.push_back(0);
        order_.push_back(i);
        group.push_back(pool_[i]);
      }
      least_of_group[order_.size() - group.size()] =
          group.size() == 1
              ? std::min(0.0, prices_.reduced_cost(group.front()))
              : least_reduced_cost(group, {.workers_max = group.size(), .per_host_max = limits.per_host_max}, prices_);
    }
    least_left_.assign(order_.size() + 1, 0);
    rate_left_.assign(order_.size() + 1, 0);
    rate_max_left_.assign(order_.size() + 1, 0);
    std::size_t group_end = order_.size();
    double rest_of_group = 0;  // sum of the negative reduced costs of the group's candidates from depth d on
    for (std::size_t d = order_.size(); d-- > 0;) {
      const Candidate& c = pool_[order_[d]];
      rest_of_group += std::min(0.0, prices_.reduced_cost(c));
      rate_left_[d] = rate_left_[d + 1] + c.rollouts_per_s;
      rate_max_left_[d] = std::max(rate_max_left_[d + 1], c.rollouts_per_s);
      if (group_begin[d] == d) {
        // Both are lower bounds for the whole group, so the greater one counts.
        least_left_[d] = least_left_[group_end] + std::max(rest_of_group, least_of_group[d]);
        group_end = d;
        rest_of_group = 0;
      } else {
        least_left_[d] = least_left_[group_end] + rest_of_group;
      }
    }
  }

  // Returns the least cost of reaching the target with fractions of the undecided candidates, given the rate and cost
  // so far, without the limits. Absent if it cannot be reached.
  std::optional<double> relaxed_cost(double rate, double cost) const {
    for (const std::size_t i : by_unit_cost_) {
      if (is_decided_[i]) continue;
      if (meets(rate, target_)) return cost;
      const Candidate& c = pool_[i];
      const double fraction = std::min(1.0, (target_ - rate) / c.rollouts_per_s);
      rate += fraction * c.rollouts_per_s;
      cost += fraction * c.usd_per_hour;
    }
    if (!meets(rate, target_)) return std::nullopt;
    return cost;
  }

  // Whether no set below this node is cheaper than the best one.
  bool is_cut(std::size_t depth, double rate, double cost) const {
    const std::size_t free = set_.count() < workers_max_ ? workers_max_ - set_.count() : 0;
    const double added_rate_max = std::min(rate_left_[depth], static_cast<double>(free) * rate_max_left_[depth]);
    if (!meets(rate + added_rate_max, target_)) return true;
    if (!cost_to_beat_) return false;
    // The bound's constant, the members' reduced costs, and the least sum of those of candidates to be added.
    const double bound = constant_ + cost - prices_.usd_per_rollout_s * rate +
                         prices_.usd_per_worker * static_cast<double>(set_.count()) + least_left_[depth];
    if (!is_cheaper(bound, *cost_to_beat_)) return true;
    if (!is_small()) return false;
    const std::optional<double> cost_min = relaxed_cost(rate, cost);
    return !cost_min || !is_cheaper(*cost_min, *cost_to_beat_);
  }

  // The pool has at most kSmallPoolMax candidates, so is_cut() and is_dominated() do more work per node.
  bool is_small() const { return !is_decided_.empty(); }

  // Whether a skipped candidate would do at least as well in this one's place.
  bool is_dominated(const Candidate& c) const {
    return std::any_of(skipped_.begin(), skipped_.end(), [&](const Candidate* skipped) {
      return skipped->rollouts_per_s >= c.rollouts_per_s && skipped->usd_per_hour <= c.usd_per_hour;
    });
  }

  // Searches the sets that consist of `set_`, whose rate and cost are given, and candidates from `depth` on.
  void visit(std::size_t depth, double rate, double cost) {
    if (nodes_left_ == 0) return;
    --nodes_left_;
    if (meets(rate, target_)) {
      if (!cost_to_beat_ || is_cheaper(cost, *cost_to_beat_)) {
        best_ = set_.sorted_members();
        cost_to_beat_ = cost;
      }
      return;
    }
    if (depth == order_.size() || is_cut(depth, rate, cost)) return;
    const std::size_t i = order_[depth];
    if (is_small()) is_decided_[i] = true;
    const bool adds_first = prices_.reduced_cost(pool_[i]) < 0;
    if (adds_first) add_and_visit(i, depth, rate, cost);
    // Only a candidate that excludes no other one could take the place of any later one.
    const bool can_dominate = excludes_none_[i] && is_small();
    if (can_dominate) skipped_.push_back(&pool_[i]);
    visit(depth + 1, rate, cost);
    if (can_dominate) skipped_.pop_back();
    if (!adds_first) add_and_visit(i, depth, rate, cost);
    if (is_small()) is_decided_[i] = false;
  }
  void add_and_visit(std::size_t i, std::size_t depth, double rate, double cost) {
    const Candidate& c = pool_[i];
    if (!set_.allows(i) || is_dominated(c)) return;
    set_.add(i);
    visit(depth + 1, rate + c.rollouts_per_s, cost + c.usd_per_hour);
    set_.remove(i);
  }

  std::span<const Candidate> pool_;
  double target_;
  std::size_t workers_max_;
  CostBound prices_;
  double constant_ = 0;             // CostBound::constant()
  std::vector<std::size_t> order_;  // by depth: the candidate to decide, none of which is kept
  // By depth, over the undecided candidates: least sum of reduced costs, sum of rates, greatest rate.
  std::vector<double> least_left_, rate_left_, rate_max_left_;
  // For relaxed_cost(); both are empty if the pool is not small.
  std::vector<std::size_t> by_unit_cost_;  // candidates that are not kept
  std::vector<bool> is_decided_;           // by candidate
  std::vector<bool> excludes_none_;        // by candidate: it shares no machine or limited host with another one
  std::uint64_t nodes_left_;
  Selection set_;
  std::vector<const Candidate*> skipped_;  // for is_dominated(): skipped on the path to the current node
  std::optional<std::vector<std::size_t>> best_;
  std::optional<double> cost_to_beat_;  // the cost of best_, or of a set known before; absent: any set is better
};

// Searches by BranchAndBound. If that takes too many nodes, splits the problem by the fastest candidate, which is kept
// in one part and left out of the other, and searches each part with its own prices. Before the split, the bound can be
// weak, because the cost of one large offer can be far from its worth at the pool's prices.
class SplitSearch {
 public:
  SplitSearch(double target, AllocationLimits limits, std::optional<double> cost_to_beat)
      : target_(target), limits_(limits), cost_to_beat_(cost_to_beat) {}

  void run(const std::vector<Candidate>& pool) {
    const bool is_small = pool.size() <= kSmallPoolMax;
    // The first path to a set that reaches the target can have pool.size() nodes, which must not use up the limit.
    nodes_left_ = is_small ? kSmallPoolNodesMax : kNodesMax + pool.size();
    nodes_per_part_ = is_small ? kSmallPoolNodesPerPart : kNodesPerPart + pool.size();
    Part all{.pool = pool, .indices = std::vector<std::size_t>(pool.size())};
    std::iota(all.indices.begin(), all.indices.end(), std::size_t{0});
    visit(all);
  }
  // With indices into run()'s pool. Absent if no set is cheaper than the one to beat.
  const std::optional<Allocation>& best() const { return best_; }
  bool is_complete() const { return is_complete_; }

 private:
  struct Part {
    std::vector<Candidate> pool;
    std::vector<std::size_t> indices;  // the index in the whole pool of each candidate in `pool`
  };

  void visit(const Part& part) {
    if (nodes_left_ == 0) {
      is_complete_ = false;
      return;
    }
    std::vector<std::size_t> all(part.pool.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    const std::optional<CostBound> prices = best_bound(part.pool, all, target_, limits_);
    if (!prices || (cost_to_beat_ && !is_cheaper(prices->usd_per_hour, *cost_to_beat_))) return;
    const std::uint64_t nodes_max = std::min(nodes_left_, nodes_per_part_);
    const SearchResult result =
        BranchAndBound(part.pool, target_, limits_, cost_to_beat_, nodes_max, *prices).solve(limits_);
    nodes_left_ -= nodes_max - result.nodes_left;
    if (result.best) {
      best_ = result.best;
      for (std::size_t& i : best_->chosen) i = part.indices[i];
      cost_to_beat_ = best_->usd_per_hour;
    }
    if (result.is_complete) return;
    std::optional<std::size_t> fastest;
    for (std::size_t i = 0; i < part.pool.size(); ++i)
      if (!part.pool[i].keep && (!fastest || part.pool[i].rollouts_per_s > part.pool[*fastest].rollouts_per_s))
        fastest = i;
    if (!fastest) return;
    if (Selection(part.pool, limits_).allows(*fastest)) {
      Part with = part;
      with.pool[*fastest].keep = true;
      visit(with);
    }
    Part without = part;
    without.pool.erase(without.pool.begin() + static_cast<std::ptrdiff_t>(*fastest));
    without.indices.erase(without.indices.begin() + static_cast<std::ptrdiff_t>(*fastest));
    visit(without);
  }

  double target_;
  AllocationLimits limits_;
  std::optional<double> cost_to_beat_;
  std::optional<Allocation> best_;
  std::uint64_t nodes_left_ = 0, nodes_per_part_ = 0;
  bool is_complete_ = true;
};

// Adds the allowed candidates in this order until they reach the target. If all do not, exchanges some. Absent if the
// target is not reached.
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

// Indices by reduced cost, least first.
std::vector<std::size_t> by_reduced_cost(std::span<const Candidate> pool, const CostBound& prices) {
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return prices.reduced_cost(pool[a]) < prices.reduced_cost(pool[b]); });
  return order;
}

// The prefix of AllocationSearch.
std::optional<Selection> prefix_set(std::span<const Candidate> pool, std::span<const std::size_t> order, double target,
                                    AllocationLimits limits) {
  auto set = fill_in_order(pool, order, target, limits);
  // Cheap parts of a machine can exclude the offer of the whole machine, which the target may need. So the
  // fastest-first order is tried, too.
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

// In this function, `i` is an index into `pool`, and `k` one into `listed` and `list_pool`.
AllocationSearch allocate(std::span<const Candidate> pool, double target, AllocationLimits limits) {
  AllocationSearch search;
  std::vector<std::size_t> listed = shortlist(pool, limits);  // cost_bound() appends others
  const std::optional<CostBound> bound = cost_bound(pool, listed, target, limits);
  if (!bound) return search;
  search.usd_per_hour_min = bound->usd_per_hour;
  std::sort(listed.begin(), listed.end());
  std::vector<Candidate> list_pool;
  for (const std::size_t i : listed) list_pool.push_back(pool[i]);
  const auto prefix = prefix_set(list_pool, by_unit_cost(list_pool), target, limits);
  std::optional<Allocation> best;
  const auto consider = [&](std::optional<Selection> set) {  // a copy, which loses its unneeded members
    if (!set) return;
    drop_unneeded(list_pool, target, *set);
    if (!best || is_cheaper(set->cost(), best->usd_per_hour)) best = set->allocation();
  };
  consider(prefix);
  if (prefix) search.prefix_usd_per_hour = prefix->cost();
  consider(fill_in_order(list_pool, by_reduced_cost(list_pool, *bound), target, limits));
  // Only candidates whose reduced cost is below the gap can be in a cheaper set. The search leaves out the others.
  std::vector<std::size_t> core;  // indices k
  bool has_all_useful = true;     // no useful candidate is left out
  const double gap = best ? best->usd_per_hour - bound->usd_per_hour : kUnlimitedGap;
  const auto is_useful = [&](const Candidate& c) { return c.keep || bound->reduced_cost(c) <= gap; };
  for (std::size_t k = 0; k < listed.size(); ++k)
    if (is_useful(list_pool[k])) core.push_back(k);
  if (listed.size() < pool.size()) {
    std::vector<bool> is_listed(pool.size());
    for (const std::size_t i : listed) is_listed[i] = true;
    for (std::size_t i = 0; i < pool.size() && has_all_useful; ++i)
      has_all_useful = is_listed[i] || !is_useful(pool[i]);
  }
  if (core.size() > kCoreMax) {
    std::stable_sort(core.begin(), core.end(), [&](auto a, auto b) {
      const auto key = [&](std::size_t k) { return std::pair(!list_pool[k].keep, bound->reduced_cost(list_pool[k])); };
      return key(a) < key(b);
    });
    core.resize(kCoreMax);
    std::sort(core.begin(), core.end());
    has_all_useful = false;
  }
  std::vector<Candidate> core_pool;
  for (const std::size_t k : core) core_pool.push_back(list_pool[k]);
  SplitSearch split(target, limits, best ? std::optional(best->usd_per_hour) : std::nullopt);
  split.run(core_pool);
  search.is_proven_best = has_all_useful && split.is_complete();
  if (split.best()) {
    best = split.best();
    for (std::size_t& index : best->chosen) index = core[index];  // from core_pool to list_pool
  }
  if (!best) return search;
  for (std::size_t& index : best->chosen) index = listed[index];  // from list_pool to pool
  std::sort(best->chosen.begin(), best->chosen.end());
  if (prefix)
    for (const std::size_t k : prefix->sorted_members())
      if (!std::binary_search(best->chosen.begin(), best->chosen.end(), listed[k])) best->dropped.push_back(listed[k]);
  if (search.is_proven_best) search.usd_per_hour_min = best->usd_per_hour;
  search.best = std::move(best);
  return search;
}

std::vector<std::size_t> shortlist(std::span<const Candidate> pool, AllocationLimits limits) {
  const std::size_t workers = std::min(limits.workers_max, pool.size());
  // Several times as many candidates as a set may have, and a margin for small fleets.
  const std::size_t unit_cost_count = 4 * workers + 256, fastest_count = 2 * workers + 64, price_count = 256;
  const bool is_small = pool.size() <= unit_cost_count + fastest_count + price_count;
  std::vector<bool> is_listed(pool.size(), is_small);
  const auto list_first = [&](const std::vector<std::size_t>& order, std::size_t count) {
    for (std::size_t i = 0; i < std::min(count, order.size()); ++i) is_listed[order[i]] = true;
  };
  if (!is_small) {
    list_first(by_unit_cost(pool), unit_cost_count);
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
    list_first(by_price, price_count);
  }
  std::vector<std::size_t> listed;
  for (std::size_t i = 0; i < pool.size(); ++i)
    if (is_listed[i] || pool[i].keep) listed.push_back(i);
  return listed;
}

}  // namespace echoline::provisioner
