// Makes a plan: ranks the offers, chooses a set, and repeats until set and topology are consistent.
#include "provisioner/plan.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "chains/broadcast_model.hpp"
#include "chains/choice.hpp"
#include "chains/planner.hpp"
#include "chains/score.hpp"
#include "provisioner/allocation.hpp"
#include "provisioner/eligibility.hpp"
#include "provisioner/offer_links.hpp"
#include "provisioner/replacement.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "plan";
constexpr int kRoundsMax = 64;

// The result of one search for an assumed T_b, with the T_b of its set and topology.
struct Solution {
  CapacityTarget target;
  Allocation set;  // indices into the eligible offers
  std::vector<std::size_t> dropped;
  std::string method;
  double greedy_usd_per_hour = 0;
  std::optional<double> exact_usd_per_hour;
  std::vector<std::size_t> members;  // by rank; members[i] is worker i + 1
  chains::Topology topology;
  std::vector<chains::WorkerLink> links;
  chains::BroadcastTimes times;
  Bytes chunk;
  Duration broadcast_time{};
};

class Planner {
 public:
  Planner(const PlanRequest& request, std::span<const Offer> offers) : request_(request), offers_(offers) {
    limits_.workers_max = request.fleet.workers_max;
    if (request.fleet.per_host_max) limits_.per_host_max = *request.fleet.per_host_max;
  }

  Result<Plan> run() {
    ECHO_TRY(check_request());
    ECHO_TRY(split_offers());
    Duration assumed{};
    ECHO_ASSIGN(const Solution solution, find_consistent_solution(assumed));
    Plan plan = plan_of(solution, assumed);
    ECHO_TRY(check_limits(plan));
    return plan;
  }

 private:
  Status check_request() const {
    const PlanRequest& r = request_;
    ECHO_TRY(capacity_target(r.pace, Duration{}, r.fleet.headroom));
    ECHO_TRY(check_staleness_budget(r.staleness_budget, r.pace.publish_every));
    const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
    if (r.delta_bytes.count == 0) return invalid("the size of one publication must be positive");
    if (!(r.learner_up.bits_per_s > 0)) return invalid("the learner's uplink must be positive");
    if (r.paths.worker_rate && !(r.paths.worker_rate->bits_per_s > 0))
      return invalid("the cap on a worker's uplink must be positive");
    if (r.paths.delay_expected < Duration{} || r.fleet.install_time_expected < Duration{})
      return invalid("delay and install time must not be negative");
    if (!(r.quorum > 0 && r.quorum <= 1)) return invalid("q must be above 0 and at most 1");
    if (r.fleet.workers_max < 1 || r.fleet.workers_max > chains::kChainWorkersMax)
      return fail(Code::kInvalid, kOperation, "workers_max must be 1 to {}, found {}", chains::kChainWorkersMax,
                  r.fleet.workers_max);
    if (offers_.empty()) return invalid("there are no offers");
    return ok();
  }

  // Splits the offers into eligible ones, with price and rank, and others, with the reason.
  Status split_offers() {
    std::map<std::pair<std::string_view, std::string_view>, std::uint32_t> machines, hosts;
    const auto number = [](auto& numbers, std::string_view provider, std::string_view name) {
      if (name.empty()) return std::uint32_t{0};
      return numbers.emplace(std::pair(provider, name), static_cast<std::uint32_t>(numbers.size() + 1)).first->second;
    };
    const std::set<std::string_view> keep(request_.keep.begin(), request_.keep.end());
    std::size_t kept = 0;
    for (std::size_t i = 0; i < offers_.size(); ++i) {
      const Offer& o = offers_[i];
      if (auto defect = ineligibility_reason(request_, o)) {
        refused_.emplace_back(i, std::move(*defect));
        continue;
      }
      eligible_.push_back(i);
      Candidate c;
      c.rollouts_per_s = o.rollouts_per_s;
      c.usd_per_hour = cost_of(request_, o, 1).usd_per_hour().value_or(0);
      c.machine = number(machines, o.provider, o.host);
      if (!o.gpu_ids.empty()) {
        c.gpus = 0;
        for (const int id : o.gpu_ids) c.gpus |= id < 64 ? std::uint64_t{1} << id : ~0ull;
      }
      c.host = number(hosts, o.provider, o.owner.empty() ? o.host : o.owner);
      c.keep = keep.contains(o.id);
      kept += c.keep;
      pool_.push_back(c);
    }
    if (kept != keep.size())
      return fail(Code::kInvalid, kOperation, "{} of the {} offers to keep are not available", keep.size() - kept,
                  keep.size());
    if (kept > request_.fleet.workers_max)
      return fail(Code::kInvalid, kOperation, "{} offers must be kept, workers_max is {}", kept,
                  request_.fleet.workers_max);
    order_ = by_unit_cost(pool_);
    shortlist_ = shortlist(pool_, limits_);
    for (const std::size_t i : shortlist_) shortlist_pool_.push_back(pool_[i]);
    return ok();
  }

  Result<Solution> solve(Duration assumed) const {
    Solution s;
    ECHO_ASSIGN(s.target, capacity_target(request_.pace, assumed, request_.fleet.headroom));
    const double target = s.target.provisioned_rollouts_per_s;
    auto set = allocate_greedy(shortlist_pool_, target, limits_);
    const bool greedy = set.has_value();
    if (greedy) s.greedy_usd_per_hour = allocate_prefix(shortlist_pool_, target, limits_)->usd_per_hour;
    if (pool_.size() <= kExactPoolMax) {
      auto exact = allocate_exact(shortlist_pool_, target, limits_, set);
      if (exact.best && exact.proven) s.exact_usd_per_hour = exact.best->usd_per_hour;
      if (exact.best && (!set || exact.best->usd_per_hour < set->usd_per_hour * (1 - 1e-9))) {
        exact.best->dropped = set ? set->dropped : std::vector<std::size_t>{};
        set = std::move(exact.best);
        s.method = "exact";
      }
    }
    if (!set) return explain_shortfall(s.target, assumed);
    if (s.method.empty()) s.method = "greedy";
    if (!greedy) s.greedy_usd_per_hour = set->usd_per_hour;
    for (std::vector<std::size_t>* indices : {&set->chosen, &set->dropped})
      for (std::size_t& i : *indices) i = shortlist_[i];
    s.dropped = std::move(set->dropped);
    s.set = std::move(*set);
    ECHO_TRY(add_topology(s));
    return s;
  }

  // Computes topology and broadcast times of the set.
  Status add_topology(Solution& s) const {
    for (const std::size_t i : order_)
      if (std::binary_search(s.set.chosen.begin(), s.set.chosen.end(), i)) s.members.push_back(i);
    const auto up = [&](std::size_t i) { return links_of(offer(i), request_.fleet, request_.paths).up; };
    BitRate slowest_up = up(s.members.front()), fastest_up = slowest_up;
    for (const std::size_t i : s.members) {
      slowest_up = std::min(slowest_up, up(i));
      fastest_up = std::max(fastest_up, up(i));
    }
    std::vector<chains::ChainWorker> workers;
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      const Offer& o = offer(s.members[m]);
      // Nothing is measured yet, so the stated links stand for measurements.
      constexpr std::uint32_t kStated = 1000;
      const auto [o_up, o_down] = links_of(o, request_.fleet, request_.paths);
      const chains::PeerStats stated{
          o_up, request_.paths.worker_rate.value_or(fastest_up), kStated,
          static_cast<std::uint32_t>(std::lround(reliability_of(request_, o).value_or(0) * kStated)), Duration{}};
      const std::uint32_t region = request_.paths.regions.of(o.place);
      workers.push_back({WorkerId{m + 1}, o_up, o_down, chains::peer_score(stated), true, true, region});
      s.links.push_back({WorkerId{m + 1}, o_up, o_down, request_.paths.delay_expected, region});
    }
    const BitRate chain_rate = request_.paths.worker_rate.value_or(slowest_up);
    const chains::Regions& ways = request_.paths.regions.ways;
    if (request_.topology == chains::TopologyPolicy::kAuto) {
      const chains::BroadcastGoal goal{request_.delta_bytes, request_.chunk, request_.quorum};
      ECHO_ASSIGN(chains::Choice choice,
                  chains::choose_topology(request_.learner_up, chain_rate, workers, s.links, goal, {}, ways));
      s.topology = std::move(choice.topology);
      s.times = std::move(choice.times);
      s.chunk = choice.chunk;
    } else {
      ECHO_ASSIGN(s.topology, chains::plan_chains(request_.learner_up, chain_rate, workers, request_.topology,
                                                  request_.quorum, ways));
      const Duration bound =
          chains::lower_bound(request_.delta_bytes, request_.learner_up, s.links, request_.quorum, ways);
      s.chunk = request_.chunk.count > 0 ? request_.chunk : chains::best_chunk(request_.delta_bytes, s.topology, bound);
      ECHO_ASSIGN(s.times, chains::broadcast_time(s.topology, request_.delta_bytes, s.chunk, request_.learner_up,
                                                  s.links, ways));
    }
    s.broadcast_time = s.times.fraction(request_.quorum) + request_.fleet.install_time_expected;
    return ok();
  }

  // A set chosen for an assumed T_b has its own T_b. Iterates until the two agree. If they alternate, raises the
  // assumed T_b until its set is no slower than assumed. This ends, because every raise is to the T_b of some set.
  Result<Solution> find_consistent_solution(Duration& assumed) {
    std::vector<Duration> seen;
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed));
      if (s.broadcast_time == assumed) return s;
      seen.push_back(assumed);
      const bool repeats = std::find(seen.begin(), seen.end(), s.broadcast_time) != seen.end();
      assumed = s.broadcast_time;
      if (repeats) break;
    }
    has_converged_ = false;
    for (const Duration d : seen) assumed = std::max(assumed, d);
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed));
      if (s.broadcast_time <= assumed) return s;
      assumed = s.broadcast_time;
    }
    return fail(Code::kInfeasible, kOperation,
                "after {} rounds no fleet was found whose broadcast is fast enough for its own size (T_b = {}); "
                "publish less often or choose another topology",
                2 * kRoundsMax, to_text(assumed));
  }

  // Explains why the target is out of reach, with remedies that work for the largest possible fleet.
  Error explain_shortfall(const CapacityTarget& target, Duration assumed) const {
    std::vector<std::size_t> fastest(pool_.size());
    std::iota(fastest.begin(), fastest.end(), std::size_t{0});
    std::stable_sort(fastest.begin(), fastest.end(),
                     [&](auto a, auto b) { return pool_[a].rollouts_per_s > pool_[b].rollouts_per_s; });
    const std::size_t usable = std::min<std::size_t>(fastest.size(), request_.fleet.workers_max);
    const auto sum = [&](std::size_t from, std::size_t to) {
      double total = 0;
      for (std::size_t i = from; i < to; ++i) total += pool_[fastest[i]].rollouts_per_s;
      return total;
    };
    const double within = sum(0, usable);
    const double all = within + sum(usable, fastest.size());
    const double needed = target.provisioned_rollouts_per_s;
    Duration t_b = assumed;
    if (usable > 0) {
      Solution largest;
      largest.set.chosen.assign(fastest.begin(), fastest.begin() + static_cast<std::ptrdiff_t>(usable));
      std::sort(largest.set.chosen.begin(), largest.set.chosen.end());
      if (const Status status = add_topology(largest); !status) return status.error();
      t_b = std::max(t_b, largest.broadcast_time);
    }

    std::string text = fmt::format(
        "{} {:.4g} rollouts/s are needed (R = {:.6g} per step, T = {}, kappa = {}, headroom {:.3g} %; T_b = {} for the "
        "largest fleet)",
        t_b > assumed ? "more than" : "at least", needed, request_.pace.rollouts_per_step,
        to_text(request_.pace.step_time), request_.pace.publish_every, request_.fleet.headroom * 100, to_text(t_b));
    if (all >= needed) {
      text += fmt::format(" and the {} fastest offers give {:.4g}: raise workers_max, {} offers give {:.4g}", usable,
                          within, pool_.size(), all);
    } else {
      text += fmt::format(" and all {} eligible offers together give {:.4g}", pool_.size(), all);
      if (!refused_.empty()) text += fmt::format(" ({} more are refused: {})", refused_.size(), reasons_to_refuse());
      text += ": add offers or relax what is required of them";
    }
    // (1 + headroom) kappa R / (kappa T - T_b) <= M, solved for kappa.
    const double step_s = seconds(request_.pace.step_time);
    const double slack = within * step_s - (1 + request_.fleet.headroom) * request_.pace.rollouts_per_step;
    if (slack > 0) {
      const int kappa = static_cast<int>(std::ceil(within * seconds(t_b) / slack - 1e-9));
      if (kappa > request_.pace.publish_every) text += fmt::format(", or publish every {} steps (kappa)", kappa);
    }
    const double generating_s = request_.pace.publish_every * step_s - seconds(t_b);
    const double r_max =
        std::floor(within * generating_s / ((1 + request_.fleet.headroom) * request_.pace.publish_every));
    if (r_max >= 1) text += fmt::format(", or lower R to {:.0f} or less", r_max);
    return fail(Code::kInfeasible, kOperation, "{}, or allow a longer step", text);
  }

  // Reasons against offers, most frequent first.
  std::string reasons_to_refuse() const {
    constexpr std::size_t kShown = 3;
    std::map<std::string_view, std::size_t> counts;
    for (const auto& [i, reason] : refused_) ++counts[reason];
    std::vector<std::pair<std::size_t, std::string_view>> most;
    for (const auto& [reason, count] : counts) most.emplace_back(count, reason);
    std::stable_sort(most.begin(), most.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string text;
    for (std::size_t k = 0; k < std::min(kShown, most.size()); ++k)
      text += fmt::format("{}{} x {}", k > 0 ? "; " : "", most[k].first, most[k].second);
    return text + (most.size() > kShown ? "; and others" : "");
  }

  Plan plan_of(const Solution& s, Duration assumed) const {
    Plan plan;
    plan.request = request_;
    plan.target = s.target;
    plan.broadcast_time = assumed;
    plan.broadcast_time_last = s.times.last();
    plan.broadcast_lower_bound = chains::lower_bound(request_.delta_bytes, request_.learner_up, s.links,
                                                     request_.quorum, request_.paths.regions.ways);
    plan.converged = has_converged_;
    plan.topology = s.topology;
    plan.chunk = s.chunk;
    plan.rollouts_per_s = s.set.rollouts_per_s;
    plan.method = s.method;
    plan.chosen_usd_per_hour = s.set.usd_per_hour;
    plan.greedy_usd_per_hour = s.greedy_usd_per_hour;
    plan.exact_usd_per_hour = s.exact_usd_per_hour;
    plan.lp_bound_usd_per_hour = lp_bound(pool_, s.target.provisioned_rollouts_per_s).value_or(0);
    plan.staleness_needed = needed_staleness(request_.pace, assumed, s.set.rollouts_per_s);
    double slowest = pool_[s.members.front()].rollouts_per_s, fastest = slowest;
    for (const std::size_t i : s.members) {
      slowest = std::min(slowest, pool_[i].rollouts_per_s);
      fastest = std::max(fastest, pool_[i].rollouts_per_s);
    }
    const int lag =
        staleness_lag(request_.pace.step_time, s.times.last() + request_.fleet.install_time_expected,
                      from_seconds(std::min(1e6, request_.group_size / slowest - request_.group_size / fastest)));
    plan.staleness_worst = request_.staleness_worst ? request_.staleness_worst(lag) : request_.staleness_budget;
    add_rows(s, plan);
    add_totals(plan);
    add_notes(s, plan);
    return plan;
  }

  void add_rows(const Solution& s, Plan& plan) const {
    std::vector<int> rank_of(order_.size());
    for (std::size_t r = 0; r < order_.size(); ++r) rank_of[order_[r]] = static_cast<int>(r) + 1;
    const auto row_of = [&](const Offer& o) {
      PlanRow row;
      row.offer = o;
      row.offer.bid_usd_per_hour = bid_for(request_, o);
      row.assumed = assumed_of(request_, o);
      return row;
    };
    std::map<std::uint32_t, std::vector<std::size_t>> of_machine, of_host;
    const auto occupy = [&](std::size_t i) {
      if (pool_[i].machine) of_machine[pool_[i].machine].push_back(i);
      if (pool_[i].host) of_host[pool_[i].host].push_back(i);
    };
    // The limits with the chosen offers in place.
    const auto exclusion_of = [&](std::size_t i) -> std::optional<std::string> {
      const Candidate& c = pool_[i];
      if (c.machine)
        for (const std::size_t other : of_machine[c.machine])
          if (pool_[other].gpus & c.gpus) return fmt::format("the same machine as {}", offer(other).id);
      if (c.host && of_host[c.host].size() >= limits_.per_host_max)
        return fmt::format("{} offers of this host are the limit (fleet.per_host_max)", limits_.per_host_max);
      return std::nullopt;
    };
    for (const std::size_t i : s.members) occupy(i);
    std::vector<PlanRow> excluded_rows;  // of offers that share a machine or host with a chosen one
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      PlanRow row = row_of(offer(s.members[m]));
      row.rank = rank_of[s.members[m]];
      row.chosen = true;
      row.worker = WorkerId{m + 1};
      row.cost = cost_of(request_, row.offer, s.topology.copies_sent_by(*row.worker));
      row.losses_per_hour = losses_per_hour(request_, row.offer);
      row.cumulative_rollouts_per_s =
          row.offer.rollouts_per_s + (plan.rows.empty() ? 0 : plan.rows.back().cumulative_rollouts_per_s);
      row.reason = pool_[s.members[m]].keep                         ? "rented: kept from the earlier plan"
                   : row.rank <= static_cast<int>(s.members.size()) ? "rented: among the cheapest per rollout"
                                                                    : "rented: completes the target at the least cost";
      plan.rows.push_back(std::move(row));
    }
    const Candidate& last = pool_[s.members.back()];
    for (const std::size_t i : order_) {
      if (std::binary_search(s.set.chosen.begin(), s.set.chosen.end(), i)) continue;
      PlanRow row = row_of(offer(i));
      row.rank = rank_of[i];
      row.cost = cost_of(request_, row.offer, 1);
      if (auto reason = exclusion_of(i)) {
        row.reason = std::move(*reason);
        excluded_rows.push_back(std::move(row));
        continue;
      }
      occupy(i);
      row.reason = reason_against(i, s, last);
      plan.standby.push_back(row.offer.id);
      plan.rows.push_back(std::move(row));
    }
    for (PlanRow& row : excluded_rows) plan.rows.push_back(std::move(row));
    for (const auto& [i, reason] : refused_) {
      PlanRow row = row_of(offers_[i]);
      row.cost = cost_of(request_, row.offer, 1);
      row.reason = reason;
      plan.rows.push_back(std::move(row));
    }
  }

  std::string reason_against(std::size_t i, const Solution& s, const Candidate& last) const {
    const auto per_1k = [](const Candidate& c) { return 1000 * c.usd_per_hour / (3600 * c.rollouts_per_s); };
    if (std::find(s.dropped.begin(), s.dropped.end(), i) != s.dropped.end())
      return "dropped: the target is met without it";
    if (per_1k(pool_[i]) > per_1k(last)) return fmt::format("dearer per rollout: above ${:.3g}/1k", per_1k(last));
    if (s.members.size() == request_.fleet.workers_max)
      return fmt::format("too slow for a fleet of at most {} workers", request_.fleet.workers_max);
    return "not needed: the rented offers cost less";
  }

  void add_totals(Plan& plan) const {
    for (const PlanRow* row : plan.chosen()) {
      const double usd = *row->cost.usd_per_hour(), wrong = row->offer.uncertainty();
      plan.usd_per_hour.expected += usd;
      plan.usd_per_hour.low += usd / (1 + wrong);
      double dearest = usd;
      if (row->offer.bid_usd_per_hour && row->offer.gpu_usd_per_hour)
        dearest += std::max(0.0, *row->offer.gpu_usd_per_hour - *row->offer.bid_usd_per_hour);
      plan.usd_per_hour.high += dearest / (1 - wrong);
      plan.usd_joining += usd_to_join(request_, row->offer);
    }
    plan.replacing = expected_replacement_cost(request_, plan.rows);
  }

  void add_notes(const Solution& s, Plan& plan) const {
    if (!plan.converged)
      plan.notes.push_back(
          fmt::format("the set and its broadcast time did not converge: planned for T_b = {}, the fleet has {}",
                      to_text(plan.broadcast_time), to_text(s.broadcast_time)));
    std::map<std::string, std::string> assumed;
    for (const PlanRow* row : plan.chosen())
      for (const std::string& key : row->assumed) {
        std::string& list = assumed[key];
        list += (list.empty() ? "" : ", ") + row->offer.id;
      }
    for (const auto& [key, list] : assumed) plan.notes.push_back(fmt::format("{} is assumed for {}", key, list));
    add_note_on_throughput(plan);
    add_note_on_losses(plan);
    if (!request_.learner_usd_per_hour)
      plan.notes.push_back("the learner's own price is not stated (learner.usd_per_hour): it is not included");
    if (request_.staleness_budget < request_.pace.publish_every)
      plan.notes.push_back(fmt::format(
          "S = {} is strictly on-policy: after each publication the learner waits at least {} for a batch",
          request_.staleness_budget,
          to_text(plan.broadcast_time + from_seconds(request_.pace.rollouts_per_step / s.set.rollouts_per_s))));
  }

  // Notes the sources of the rented machines' throughput, least certain first.
  static void add_note_on_throughput(Plan& plan) {
    std::map<std::pair<double, std::string>, std::set<std::string>> gpus;
    for (const PlanRow* row : plan.chosen())
      if (!row->offer.rollouts_from.empty())
        gpus[{-row->offer.uncertainty(), row->offer.rollouts_from}].insert(row->offer.gpu);
    for (const auto& [by, names] : gpus)
      plan.notes.push_back(fmt::format("throughput of {}, perhaps {:.0f} % more or less: {}", fmt::join(names, ", "),
                                       -100 * by.first, by.second));
  }

  void add_note_on_losses(Plan& plan) const {
    std::string unknown;
    bool bids = false;
    for (const PlanRow* row : plan.chosen()) {
      if (!row->losses_per_hour) unknown += (unknown.empty() ? "" : ", ") + row->offer.id;
      bids = bids || (row->offer.bid_usd_per_hour && row->offer.seen_hours < kPriorHours);
    }
    if (!unknown.empty())
      plan.notes.push_back("it is unknown how often these are lost, so nothing is included for it: " + unknown);
    if (bids) plan.notes.push_back("it is unknown how often bids are outbid: once a day is assumed");
  }

  // Checks the finished plan against the budgets.
  Status check_limits(const Plan& plan) const {
    const bool on_policy = request_.staleness_budget < request_.pace.publish_every;  // intended, so the learner waits
    if (plan.staleness_needed > request_.staleness_budget && !on_policy)
      return fail(
          Code::kInfeasible, kOperation,
          "rollouts get {} steps old before newer ones arrive (kappa = {}, T_b = {}, T = {}) and the budget is S = {}: "
          "allow S = {}, publish more often, or shorten the broadcast",
          plan.staleness_needed, request_.pace.publish_every, to_text(plan.broadcast_time),
          to_text(request_.pace.step_time), request_.staleness_budget, plan.staleness_needed);
    if (request_.fleet.usd_per_hour_max && plan.usd_per_hour.expected > *request_.fleet.usd_per_hour_max)
      return fail(Code::kInfeasible, kOperation,
                  "the cheapest fleet found costs ${:.4f}/h and the budget is ${:.4f}/h: raise it to that, lower R, or "
                  "allow a longer step",
                  plan.usd_per_hour.expected, *request_.fleet.usd_per_hour_max);
    if (const auto run = plan.usd_run(); request_.fleet.usd_max && run && run->expected > *request_.fleet.usd_max)
      return fail(Code::kInfeasible, kOperation,
                  "the run would cost ${:.2f} in {}, and the budget is ${:.2f}: raise the budget or run fewer steps",
                  run->expected, to_text(*request_.run_time), *request_.fleet.usd_max);
    return ok();
  }

  const Offer& offer(std::size_t eligible) const { return offers_[eligible_[eligible]]; }

  const PlanRequest& request_;
  std::span<const Offer> offers_;
  AllocationLimits limits_;
  std::vector<std::size_t> eligible_;                         // indices into offers_
  std::vector<Candidate> pool_;                               // of the eligible offers
  std::vector<std::size_t> order_;                            // eligible offers by unit cost
  std::vector<std::size_t> shortlist_;                        // eligible offers that the search considers
  std::vector<Candidate> shortlist_pool_;                     // of shortlist_
  std::vector<std::pair<std::size_t, std::string>> refused_;  // index into offers_, reason
  bool has_converged_ = true;
};

}  // namespace

std::string_view to_string(Pricing pricing) { return pricing == Pricing::kBid ? "bid" : "on_demand"; }

std::optional<double> PlanRow::usd_per_1k_rollouts() const {
  const auto usd = cost.usd_per_hour();
  return usd && offer.rollouts_per_s > 0 ? std::optional(1000 * *usd / (3600 * offer.rollouts_per_s)) : std::nullopt;
}

std::vector<const PlanRow*> Plan::chosen() const {
  std::vector<const PlanRow*> out;
  for (const PlanRow& row : rows)
    if (row.chosen) out.push_back(&row);
  return out;
}

Spend Plan::rollouts_range() const {
  Spend range{0, rollouts_per_s, 0};
  for (const PlanRow* row : chosen()) {
    range.low += row->offer.rollouts_per_s * (1 - row->offer.uncertainty());
    range.high += row->offer.rollouts_per_s * (1 + row->offer.uncertainty());
  }
  return range;
}

const PlanRow* Plan::row_of(std::string_view offer) const {
  const auto it = std::find_if(rows.begin(), rows.end(), [&](const PlanRow& row) { return row.offer.id == offer; });
  return it == rows.end() ? nullptr : &*it;
}

std::optional<Spend> Plan::usd_fleet() const {
  if (!request.run_time) return std::nullopt;
  const double hours = seconds(*request.run_time) / 3600;
  const Spend once{usd_joining + replacing.usd.low, usd_joining + replacing.usd.expected,
                   usd_joining + replacing.usd.high};
  return Spend{hours * usd_per_hour.low + once.low, hours * usd_per_hour.expected + once.expected,
               hours * usd_per_hour.high + once.high};
}

std::optional<Spend> Plan::usd_run() const {
  std::optional<Spend> spend = usd_fleet();
  if (!spend) return spend;
  const double learner = seconds(*request.run_time) / 3600 * request.learner_usd_per_hour.value_or(0);
  return Spend{spend->low + learner, spend->expected + learner, spend->high + learner};
}

Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers) {
  return Planner(request, offers).run();
}

}  // namespace echoline::provisioner
