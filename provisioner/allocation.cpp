#include "provisioner/allocation.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kMembersLookedAt = 64;    // considered for exchanges of several
constexpr std::size_t kOutsidersLookedAt = 48;  // considered for exchanges of several
constexpr int kExchangesMax = 1000;
constexpr std::uint64_t kCoreNodes = 20'000;

// Tolerates rounding: a sum just below the target meets it.
bool meets(double rollouts_per_s, double target) { return rollouts_per_s >= target * (1 - 1e-12); }

using Members = std::span<const std::size_t>;

class Selection {
 public:
  Selection(std::span<const Candidate> pool, AllocationLimits limits)
      : pool_(pool), limits_(limits), in_(pool.size(), false) {
    std::uint32_t machines = 0, hosts = 0;
    for (const Candidate& c : pool) {
      machines = std::max(machines, c.machine);
      hosts = std::max(hosts, c.host);
    }
    used_.resize(machines + 1, 0);
    of_host_.resize(hosts + 1, 0);
    for (std::size_t i = 0; i < pool.size(); ++i)
      if (pool[i].keep) add(i);
  }

  void add(std::size_t i) {
    in_[i] = true;
    members_.push_back(i);
    const Candidate& c = pool_[i];
    if (c.machine) used_[c.machine] |= c.gpus;
    ++of_host_[c.host];
  }
  void remove(std::size_t i) {
    in_[i] = false;
    members_.erase(std::find(members_.begin(), members_.end(), i));
    const Candidate& c = pool_[i];
    if (c.machine) used_[c.machine] &= ~c.gpus;
    --of_host_[c.host];
  }
  void exchange(Members out, Members in) {
    for (const std::size_t i : out) remove(i);
    for (const std::size_t i : in) add(i);
  }
  bool has(std::size_t i) const { return in_[i]; }
  std::size_t count() const { return members_.size(); }
  const std::vector<std::size_t>& members() const { return members_; }
  // Whether `in` may join after `out` have left.
  bool allows(Members in, Members out = {}) const {
    if (count() - out.size() + in.size() > limits_.workers_max) return false;
    for (std::size_t k = 0; k < in.size(); ++k) {
      const Candidate& c = pool_[in[k]];
      if (c.machine) {
        std::uint64_t used = used_[c.machine];
        for (const std::size_t o : out)
          if (pool_[o].machine == c.machine) used &= ~pool_[o].gpus;
        for (std::size_t l = 0; l < k; ++l)
          if (pool_[in[l]].machine == c.machine) used |= pool_[in[l]].gpus;
        if (used & c.gpus) return false;
      }
      if (c.host) {
        std::size_t after = of_host_[c.host];
        for (const std::size_t o : out) after -= pool_[o].host == c.host;
        for (const std::size_t other : in) after += pool_[other].host == c.host;
        if (after > limits_.per_host_max) return false;
      }
    }
    return true;
  }
  bool allows(std::size_t i) const { return allows(Members(&i, 1)); }
  // The members that exclude candidate `i` by machine or host, cheapest eviction first if there is a choice. Absent if
  // one of them must stay.
  std::optional<std::vector<std::size_t>> in_the_way_of(std::size_t i) const {
    const Candidate& c = pool_[i];
    std::vector<std::size_t> out;
    std::size_t of_host = c.host ? of_host_[c.host] : 0;
    std::optional<std::size_t> slowest;
    for (const std::size_t m : members_) {
      const Candidate& other = pool_[m];
      const bool shares = c.machine && other.machine == c.machine && (other.gpus & c.gpus) != 0;
      if (shares) {
        if (other.keep) return std::nullopt;
        out.push_back(m);
        of_host -= c.host && other.host == c.host;
      } else if (c.host && other.host == c.host && !other.keep &&
                 (!slowest || other.rollouts_per_s < pool_[*slowest].rollouts_per_s)) {
        slowest = m;
      }
    }
    if (c.host && of_host >= limits_.per_host_max) {
      if (!slowest) return std::nullopt;
      out.push_back(*slowest);
    }
    return out;
  }
  // Computed from scratch, because repeated additions and subtractions would drift.
  double rate() const { return sum(&Candidate::rollouts_per_s); }
  double cost() const { return sum(&Candidate::usd_per_hour); }
  std::vector<std::size_t> indices() const {
    std::vector<std::size_t> out = members_;
    std::sort(out.begin(), out.end());
    return out;
  }
  Allocation allocation() const { return {indices(), {}, rate(), cost()}; }

 private:
  double sum(double Candidate::*field) const {
    double total = 0;
    for (const std::size_t i : members_) total += pool_[i].*field;
    return total;
  }
  std::span<const Candidate> pool_;
  AllocationLimits limits_;
  std::vector<bool> in_;
  std::vector<std::size_t> members_;
  std::vector<std::uint64_t> used_;  // by machine: the GPUs in use
  std::vector<std::size_t> of_host_;
};

// Replaces slow members, and members in the way, by faster outsiders until the target is met. Each step has the least
// extra cost per rollout gained.
bool reach_by_exchange(std::span<const Candidate> pool, double target, AllocationLimits limits, Selection& set) {
  while (!meets(set.rate(), target)) {
    std::optional<std::tuple<double, double, std::size_t>> best;  // cost per gain, -gain, in
    std::vector<std::size_t> best_out;
    for (std::size_t in = 0; in < pool.size(); ++in) {
      if (set.has(in)) continue;
      auto out = set.in_the_way_of(in);
      if (!out) continue;
      double gain = pool[in].rollouts_per_s, cost = pool[in].usd_per_hour;
      for (const std::size_t o : *out) gain -= pool[o].rollouts_per_s, cost -= pool[o].usd_per_hour;
      const auto consider = [&](double extra_gain, double extra_cost, std::optional<std::size_t> more) {
        if (extra_gain <= 0) return;
        const std::tuple move(extra_cost / extra_gain, -extra_gain, in);
        if (best && move >= *best) return;
        best = move;
        best_out = *out;
        if (more) best_out.push_back(*more);
      };
      if (set.count() - out->size() + 1 <= limits.workers_max) {
        consider(gain, cost, std::nullopt);
        continue;
      }
      for (const std::size_t o : set.members())
        if (!pool[o].keep) consider(gain - pool[o].rollouts_per_s, cost - pool[o].usd_per_hour, o);
    }
    if (!best) return false;
    const std::size_t in = std::get<2>(*best);
    set.exchange(best_out, Members(&in, 1));
  }
  return true;
}

// Drops members that the target does not need, dearest first.
void drop_unneeded(std::span<const Candidate> pool, double target, Selection& set) {
  std::vector<std::size_t> dearest = set.indices();
  std::stable_sort(dearest.begin(), dearest.end(),
                   [&](auto a, auto b) { return pool[a].usd_per_hour > pool[b].usd_per_hour; });
  for (const std::size_t i : dearest) {
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

  void run(bool drop_first) {
    for (int i = 0; i < kExchangesMax; ++i) {
      if (drop_first || i > 0) drop_unneeded(pool_, target_, set_);
      rate_ = set_.rate();
      saving_ = 1e-12 * std::max(1.0, set_.cost());
      found_ = false;
      singles();
      if (!found_) pairs();
      if (!found_ && (drop_first || i > 0)) return;
      if (found_) set_.exchange(Members(out_.data(), outs_), Members(in_.data(), ins_));
    }
  }

 private:
  struct Part {
    std::array<std::size_t, 2> who{};
    std::size_t count = 0;
    double rate = 0, cost = 0;
  };

  void consider(const Part& out, const Part& in) {
    const double saving = out.cost - in.cost;
    if (saving <= saving_ || !meets(rate_ - out.rate + in.rate, target_)) return;
    if (!set_.allows(Members(in.who.data(), in.count), Members(out.who.data(), out.count))) return;
    saving_ = saving;
    found_ = true;
    out_ = out.who, outs_ = out.count;
    in_ = in.who, ins_ = in.count;
  }
  Part single(std::size_t i) const { return {{i, 0}, 1, pool_[i].rollouts_per_s, pool_[i].usd_per_hour}; }
  std::vector<Part> up_to_two(const std::vector<std::size_t>& from) const {
    std::vector<Part> parts;
    for (std::size_t a = 0; a < from.size(); ++a) {
      parts.push_back(single(from[a]));
      for (std::size_t b = 0; b < a; ++b)
        parts.push_back({{from[a], from[b]},
                         2,
                         pool_[from[a]].rollouts_per_s + pool_[from[b]].rollouts_per_s,
                         pool_[from[a]].usd_per_hour + pool_[from[b]].usd_per_hour});
    }
    return parts;
  }
  // Dearest per rollout first: exchanging them saves most.
  std::vector<std::size_t> members() const {
    std::vector<std::size_t> out;
    for (auto it = order_.rbegin(); it != order_.rend() && out.size() < kMembersLookedAt; ++it)
      if (set_.has(*it) && !pool_[*it].keep) out.push_back(*it);
    return out;
  }

  void singles() {
    for (const std::size_t m : members()) {
      const Part out = single(m);
      for (const std::size_t i : order_)
        if (!set_.has(i)) consider(out, single(i));
    }
  }

  void pairs() {
    std::vector<std::size_t> outsiders;
    for (const std::size_t i : order_) {
      if (outsiders.size() == kOutsidersLookedAt) break;
      if (!set_.has(i)) outsiders.push_back(i);
    }
    std::vector<Part> in = up_to_two(outsiders);
    std::sort(in.begin(), in.end(), [](const Part& a, const Part& b) { return a.cost < b.cost; });
    for (const Part& out : up_to_two(members()))
      for (const Part& part : in) {
        if (part.cost >= out.cost - saving_) break;
        consider(out, part);
      }
    // Two members for any single outsider, because it may be far back in the order.
    for (const Part& out : up_to_two(members()))
      if (out.count == 2)
        for (const std::size_t i : order_)
          if (!set_.has(i)) consider(out, single(i));
  }

  std::span<const Candidate> pool_;
  std::span<const std::size_t> order_;
  double target_;
  Selection& set_;
  double rate_ = 0, saving_ = 0;  // the best exchange so far
  bool found_ = false;
  std::array<std::size_t, 2> out_{}, in_{};
  std::size_t outs_ = 0, ins_ = 0;
};

// Depth-first search in unit-cost order. Cuts a branch whose relaxation costs at least as much as the best set.
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
    std::vector<std::size_t> on_machine;
    for (const Candidate& c : pool) {
      on_machine.resize(std::max<std::size_t>(on_machine.size(), c.machine + 1), 0);
      ++on_machine[c.machine];
    }
    const bool hosts_matter = limits.per_host_max < pool.size();
    for (const Candidate& c : pool)
      free_.push_back((c.machine == 0 || on_machine[c.machine] == 1) && (c.host == 0 || !hosts_matter));
  }

  ExactAllocation solve(AllocationLimits limits) {
    visit(0, set_.rate(), set_.cost());
    ExactAllocation result;
    result.proven = nodes_left_ > 0;
    if (!best_) return result;
    Selection set(pool_, limits);
    for (const std::size_t i : *best_)
      if (!set.has(i)) set.add(i);
    result.best = set.allocation();
    return result;
  }

 private:
  // Least cost of reaching the target from (depth, rate) with fractions of workers; absent if impossible.
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

  // Whether a skipped candidate would do at least as well in this one's place.
  bool dominated(const Candidate& c) const {
    return std::any_of(passed_.begin(), passed_.end(), [&](const Candidate* p) {
      return p->rollouts_per_s >= c.rollouts_per_s && p->usd_per_hour <= c.usd_per_hour;
    });
  }

  void visit(std::size_t depth, double rate, double cost) {
    if (nodes_left_ == 0) return;
    --nodes_left_;
    if (meets(rate, target_)) {
      if (!best_ || cost < best_cost_ * (1 - 1e-12)) {
        best_ = set_.indices();
        best_cost_ = cost;
      }
      return;
    }
    if (depth == order_.size()) return;
    const std::optional<double> bound = relaxed(depth, rate, cost);
    if (!bound || (best_ && *bound >= best_cost_ * (1 - 1e-12))) return;
    const std::size_t i = order_[depth];
    const Candidate& c = pool_[i];
    if (set_.allows(i) && !dominated(c)) {
      set_.add(i);
      visit(depth + 1, rate + c.rollouts_per_s, cost + c.usd_per_hour);
      set_.remove(i);
    }
    if (free_[i]) passed_.push_back(&c);
    visit(depth + 1, rate, cost);
    if (free_[i]) passed_.pop_back();
  }

  std::span<const Candidate> pool_;
  std::vector<std::size_t> order_;
  std::vector<bool> free_;  // excludes no other candidate
  double target_;
  std::uint64_t nodes_left_;
  Selection set_;
  std::vector<const Candidate*> passed_;
  std::optional<std::vector<std::size_t>> best_;
  double best_cost_ = 0;
};

// Takes the allowed candidates in this order until they reach the target.
std::optional<Selection> fill(std::span<const Candidate> pool, std::span<const std::size_t> order, double target,
                              AllocationLimits limits) {
  Selection set(pool, limits);
  double rate = set.rate();
  for (const std::size_t i : order) {
    if (meets(rate, target) || set.count() >= limits.workers_max) break;
    if (set.has(i) || !set.allows(i)) continue;
    set.add(i);
    rate += pool[i].rollouts_per_s;
  }
  if (!reach_by_exchange(pool, target, limits, set)) return std::nullopt;
  return set;
}

std::vector<std::size_t> by_speed(std::span<const Candidate> pool) {
  std::vector<std::size_t> order(pool.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return pool[a].rollouts_per_s > pool[b].rollouts_per_s; });
  return order;
}

std::optional<Selection> first_set(std::span<const Candidate> pool, std::span<const std::size_t> order, double target,
                                   AllocationLimits limits) {
  auto set = fill(pool, order, target, limits);
  // Cheap parts of a machine can exclude the whole machine and each other, so the fastest-first order is tried too.
  return set ? std::move(set) : fill(pool, by_speed(pool), target, limits);
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
  const std::vector<std::size_t> first = set->indices();
  // Dropping can prevent exchanges and the reverse, so both orders are tried.
  Selection best = *set;
  for (const bool drop_first : {true, false}) {
    Selection improved = *set;
    Improver(pool, order, target, improved).run(drop_first);
    if (improved.cost() < best.cost() * (1 - 1e-12)) best = std::move(improved);
  }
  // Pairwise exchanges cannot, for example, replace all parts of a machine by the whole machine. A node-limited exact
  // search among the nearest candidates finds most such exchanges.
  std::vector<std::size_t> core;
  for (const std::size_t i : order)
    if (best.has(i) || core.size() < first.size() + kOutsidersLookedAt) core.push_back(i);
  std::vector<Candidate> core_pool;
  Allocation known{{}, {}, best.rate(), best.cost()};
  for (std::size_t k = 0; k < core.size(); ++k) {
    core_pool.push_back(pool[core[k]]);
    if (best.has(core[k])) known.chosen.push_back(k);
  }
  const auto searched = BranchAndBound(core_pool, target, limits, known, kCoreNodes).solve(limits);
  if (searched.best && searched.best->usd_per_hour < best.cost() * (1 - 1e-12)) {
    best = Selection(pool, limits);
    for (const std::size_t k : searched.best->chosen)
      if (!best.has(core[k])) best.add(core[k]);
  }
  set = std::move(best);
  Allocation result = set->allocation();
  for (const std::size_t i : first)
    if (!set->has(i)) result.dropped.push_back(i);
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
    const double share = std::min(1.0, (target - rate) / pool[i].rollouts_per_s);
    rate += share * pool[i].rollouts_per_s;
    cost += share * pool[i].usd_per_hour;
  }
  if (!meets(rate, target)) return std::nullopt;
  return cost;
}

std::vector<std::size_t> shortlist(std::span<const Candidate> pool, AllocationLimits limits) {
  const std::size_t workers = std::min(limits.workers_max, pool.size());
  const std::size_t cheapest = 4 * workers + 256, fastest = 2 * workers + 64, small = 256;
  std::vector<bool> in(pool.size(), pool.size() <= cheapest + fastest + small);
  const auto take = [&](const std::vector<std::size_t>& order, std::size_t count) {
    for (std::size_t i = 0; i < std::min(count, order.size()); ++i) in[order[i]] = true;
  };
  if (!pool.empty() && !in[0]) {
    take(by_unit_cost(pool), cheapest);
    const std::vector<std::size_t> speed = by_speed(pool);
    take(speed, fastest);
    Selection largest(pool, limits);  // the fastest that may be rented together
    for (const std::size_t i : speed) {
      if (largest.count() >= workers) break;
      if (!largest.has(i) && largest.allows(i)) largest.add(i);
    }
    take(largest.members(), largest.count());
    std::vector<std::size_t> dear(pool.size());
    std::iota(dear.begin(), dear.end(), std::size_t{0});
    std::stable_sort(dear.begin(), dear.end(),
                     [&](auto a, auto b) { return pool[a].usd_per_hour < pool[b].usd_per_hour; });
    take(dear, small);
  }
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < pool.size(); ++i)
    if (in[i] || pool[i].keep) out.push_back(i);
  return out;
}

}  // namespace echoline::provisioner
