// Makes a plan: ranks the offers, chooses a set, and repeats until set and topology are consistent. T_b is the time of
// a broadcast; provisioner/capacity.hpp explains it and the other letters: R, T, kappa and S.
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
constexpr int kRoundsMax = 64;      // of each of the two loops in find_consistent_solution()
constexpr double kUsualCopies = 1;  // outside a topology, a price assumes that a worker forwards each publication once
constexpr double kRounding = 1e-9;  // relative tolerance of comparisons
constexpr double kSecondsPerHour = 3600;

// The result of one search for an assumed T_b, with the T_b of its set and topology. Indices are those of eligible
// offers.
struct Solution {
  CapacityTarget target;
  Allocation set;
  std::vector<std::size_t> dropped;  // Allocation::dropped
  std::string method;                // Plan::method
  double greedy_usd_per_hour = 0, usd_per_hour_min = 0;
  std::vector<std::size_t> members;  // the set by rank; members[i] is worker i + 1
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
    Duration assumed_t_b{};  // the search begins with instant broadcasts
    ECHO_ASSIGN(const Solution solution, find_consistent_solution(assumed_t_b));
    Plan plan = plan_of(solution, assumed_t_b);
    ECHO_TRY(check_limits(plan));
    return plan;
  }

 private:
  Status check_request() const {
    const PlanRequest& r = request_;
    // Fails if there is no target even for instant transfers.
    ECHO_TRY(capacity_target(r.pace, r.publication_times({}), r.capacity_terms()));
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
    // Numbers the names from 1, each provider's names separately. Returns 0 if the name is not stated.
    const auto number_of = [](auto& numbers, std::string_view provider, std::string_view name) {
      if (name.empty()) return std::uint32_t{0};
      return numbers.emplace(std::pair(provider, name), static_cast<std::uint32_t>(numbers.size() + 1)).first->second;
    };
    const std::set<std::string_view> keep(request_.keep.begin(), request_.keep.end());
    std::size_t kept_count = 0;
    for (std::size_t i = 0; i < offers_.size(); ++i) {
      const Offer& o = offers_[i];
      if (auto reason = ineligibility_reason(request_, o)) {
        refused_.emplace_back(i, std::move(*reason));
        continue;
      }
      eligible_.push_back(i);
      Candidate candidate;
      candidate.rollouts_per_s = o.rollouts_per_s;
      candidate.usd_per_hour = cost_of(request_, o, kUsualCopies).usd_per_hour().value_or(0);
      candidate.machine = number_of(machines, o.provider, o.host);
      if (!o.gpu_ids.empty()) {
        // Candidate::gpus has 64 bits. An offer with a higher id counts as the whole machine.
        constexpr int kGpuBits = 64;
        constexpr std::uint64_t kAllGpus = ~0ull;
        candidate.gpus = 0;
        for (const int id : o.gpu_ids) candidate.gpus |= id < kGpuBits ? std::uint64_t{1} << id : kAllGpus;
      }
      candidate.host = number_of(hosts, o.provider, o.owner.empty() ? o.host : o.owner);  // for per_host_max
      candidate.keep = keep.contains(o.id);
      kept_count += candidate.keep ? 1 : 0;
      pool_.push_back(candidate);
    }
    if (kept_count != keep.size())
      return fail(Code::kInvalid, kOperation, "{} of the {} offers to keep are not available", keep.size() - kept_count,
                  keep.size());
    if (kept_count > request_.fleet.workers_max)
      return fail(Code::kInvalid, kOperation, "{} offers must be kept, workers_max is {}", kept_count,
                  request_.fleet.workers_max);
    order_ = by_unit_cost(pool_);
    return ok();
  }

  Result<CapacityTarget> target_for(Duration t_b) const {
    return capacity_target(request_.pace, request_.publication_times(t_b), request_.capacity_terms());
  }

  Result<Solution> solve(Duration assumed_t_b) const {
    Solution s;
    ECHO_ASSIGN(s.target, target_for(assumed_t_b));
    const double target = request_.capacity_share * s.target.provisioned_rollouts_per_s;
    AllocationSearch search = allocate(pool_, target, limits_);
    if (!search.best) return explain_shortfall(s.target, assumed_t_b);
    s.method = search.is_proven_best ? "exact" : "bounded";
    s.usd_per_hour_min = search.usd_per_hour_min;
    s.greedy_usd_per_hour = search.prefix_usd_per_hour.value_or(search.best->usd_per_hour);
    s.dropped = std::move(search.best->dropped);
    s.set = std::move(*search.best);
    ECHO_TRY(add_topology(s));
    return s;
  }

  // Computes the topology of the set, and its broadcast times.
  Status add_topology(Solution& s) const {
    for (const std::size_t i : order_)
      if (is_chosen(s, i)) s.members.push_back(i);
    const auto up = [&](std::size_t i) { return links_of(offer(i), request_.fleet, request_.paths).up; };
    BitRate slowest_up = up(s.members.front()), fastest_up = slowest_up;
    for (const std::size_t i : s.members) {
      slowest_up = std::min(slowest_up, up(i));
      fastest_up = std::max(fastest_up, up(i));
    }
    std::vector<chains::ChainWorker> workers;
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      const Offer& o = offer(s.members[m]);
      // Nothing is measured yet, so the stated links and reliability stand for measurements.
      constexpr std::uint32_t kAttempts = 1000;  // enough for three decimals of the reliability
      const auto [up_rate, down_rate] = links_of(o, request_.fleet, request_.paths);
      const double successes = reliability_of(request_, o).value_or(0) * kAttempts;
      const chains::PeerStats stated{.forwarding_rate = up_rate,
                                     .cap = request_.paths.worker_rate.value_or(fastest_up),
                                     .attempts = kAttempts,
                                     .successes = static_cast<std::uint32_t>(std::lround(successes)),
                                     .age = {}};
      const std::uint32_t region = request_.paths.regions.of(o.place);
      workers.push_back({.id = WorkerId{m + 1},
                         .up = up_rate,
                         .down = down_rate,
                         .score = chains::peer_score(stated),
                         .may_forward = true,
                         .may_seed = true,
                         .region = region});
      s.links.push_back({.id = WorkerId{m + 1},
                         .up = up_rate,
                         .down = down_rate,
                         .delay = request_.paths.delay_expected,
                         .region = region});
    }
    const BitRate chain_rate = request_.paths.worker_rate.value_or(slowest_up);
    const chains::Regions& regions = request_.paths.regions.graph;
    if (request_.topology == chains::TopologyPolicy::kAuto) {
      const chains::BroadcastGoal goal{
          .payload = request_.delta_bytes, .chunk = request_.chunk, .quorum = request_.quorum};
      ECHO_ASSIGN(chains::Choice choice,
                  chains::choose_topology(request_.learner_up, chain_rate, workers, s.links, goal, {}, regions));
      s.topology = std::move(choice.topology);
      s.times = std::move(choice.times);
      s.chunk = choice.chunk;
    } else {
      ECHO_ASSIGN(s.topology, chains::plan_chains(request_.learner_up, chain_rate, workers, request_.topology,
                                                  request_.quorum, regions));
      const Duration broadcast_time_min =
          chains::lower_bound(request_.delta_bytes, request_.learner_up, s.links, request_.quorum, regions);
      s.chunk = request_.chunk.count > 0 ? request_.chunk
                                         : chains::best_chunk(request_.delta_bytes, s.topology, broadcast_time_min);
      ECHO_ASSIGN(s.times, chains::broadcast_time(s.topology, request_.delta_bytes, s.chunk, request_.learner_up,
                                                  s.links, regions));
    }
    s.broadcast_time = s.times.quorum_time(request_.quorum) + request_.fleet.install_time_expected;
    return ok();
  }

  // A set chosen for an assumed T_b has its own T_b. Iterates until the two agree. If they alternate, raises the
  // assumed T_b until its set is no slower than assumed. This ends, because every raise is to the T_b of some set.
  // `assumed_t_b` receives the T_b for which the returned set was chosen.
  Result<Solution> find_consistent_solution(Duration& assumed_t_b) {
    std::vector<Duration> tried;
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed_t_b));
      if (s.broadcast_time == assumed_t_b) return s;
      // Often the set's own T_b gives the same target, and so the same set.
      if (const auto own = target_for(s.broadcast_time);
          own && own->required_rollouts_per_s == s.target.required_rollouts_per_s) {
        assumed_t_b = s.broadcast_time;
        return s;
      }
      tried.push_back(assumed_t_b);
      const bool repeats = std::find(tried.begin(), tried.end(), s.broadcast_time) != tried.end();
      assumed_t_b = s.broadcast_time;
      if (repeats) break;
    }
    has_converged_ = false;
    for (const Duration t_b : tried) assumed_t_b = std::max(assumed_t_b, t_b);
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed_t_b));
      if (s.broadcast_time <= assumed_t_b) return s;
      assumed_t_b = s.broadcast_time;
    }
    return fail(Code::kInfeasible, kOperation,
                "after {} rounds no fleet was found whose broadcast is fast enough for its own size (T_b = {}); "
                "publish less often or choose another topology",
                2 * kRoundsMax, to_text(assumed_t_b));
  }

  // Explains why the target is out of reach, with remedies that work for the largest possible fleet.
  Error explain_shortfall(const CapacityTarget& target, Duration assumed_t_b) const {
    std::vector<std::size_t> fastest(pool_.size());
    std::iota(fastest.begin(), fastest.end(), std::size_t{0});
    std::stable_sort(fastest.begin(), fastest.end(),
                     [&](auto a, auto b) { return pool_[a].rollouts_per_s > pool_[b].rollouts_per_s; });
    const std::size_t usable_count = std::min<std::size_t>(fastest.size(), request_.fleet.workers_max);
    const auto sum_of_rates = [&](std::size_t from, std::size_t to) {  // of `fastest`, by index
      double rate = 0;
      for (std::size_t i = from; i < to; ++i) rate += pool_[fastest[i]].rollouts_per_s;
      return rate;
    };
    const double usable_rate = sum_of_rates(0, usable_count);
    const double rate_of_all = usable_rate + sum_of_rates(usable_count, fastest.size());
    const double needed_rate = target.provisioned_rollouts_per_s;
    Duration t_b = assumed_t_b;
    if (usable_count > 0) {
      Solution largest;
      largest.set.chosen.assign(fastest.begin(), fastest.begin() + static_cast<std::ptrdiff_t>(usable_count));
      std::sort(largest.set.chosen.begin(), largest.set.chosen.end());
      if (const Status status = add_topology(largest); !status) return status.error();
      t_b = std::max(t_b, largest.broadcast_time);
    }

    // `needed_rate` is for the assumed T_b; a longer one needs more.
    std::string text = fmt::format(
        "{} {:.4g} rollouts/s are needed (R = {:.6g} per step, T = {}, kappa = {}, headroom {:.3g} %; T_b = {} for the "
        "largest fleet)",
        t_b > assumed_t_b ? "more than" : "at least", needed_rate, request_.pace.rollouts_per_step,
        to_text(request_.pace.step_time), request_.pace.publish_every, request_.fleet.headroom * 100, to_text(t_b));
    if (rate_of_all >= needed_rate) {
      text += fmt::format(" and the {} fastest offers give {:.4g}: raise workers_max, {} offers give {:.4g}",
                          usable_count, usable_rate, pool_.size(), rate_of_all);
    } else {
      text += fmt::format(" and all {} eligible offers together give {:.4g}", pool_.size(), rate_of_all);
      if (!refused_.empty()) text += fmt::format(" ({} more are refused: {})", refused_.size(), reasons_to_refuse());
      text += ": add offers or relax what is required of them";
    }
    text += remedies_for(usable_rate, t_b);
    return fail(Code::kInfeasible, kOperation, "{}, or allow a longer step", text);
  }

  // Finds the least kappa or S, and the greatest R, with which this throughput suffices.
  std::string remedies_for(double rollouts_per_s, Duration t_b) const {
    constexpr int kStepsMore = 1000;
    std::string text;
    const PublicationTimes times = request_.publication_times(t_b);
    const auto suffices = [&](const LearnerPace& pace, const CapacityTerms& terms) {
      const auto target = capacity_target(pace, times, terms);
      return target && target->provisioned_rollouts_per_s <= rollouts_per_s * (1 + kRounding);
    };
    LearnerPace pace = request_.pace;
    const CapacityTerms terms = request_.capacity_terms();
    const int kappa_max = std::min(request_.staleness_budget + 1,  // check_staleness_budget()
                                   pace.publish_every + kStepsMore);
    for (++pace.publish_every; pace.publish_every <= kappa_max; ++pace.publish_every) {
      if (!suffices(pace, terms)) continue;
      text += fmt::format(", or publish every {} steps (kappa)", pace.publish_every);
      break;
    }
    CapacityTerms older = terms;
    const bool target_depends_on_s = terms.rule == CapacityRule::kOverlap;
    for (int more = 1; more <= kStepsMore && target_depends_on_s; ++more) {
      older.staleness_budget = request_.staleness_budget + more;
      if (!suffices(request_.pace, older)) continue;
      text += fmt::format(", or allow S = {}", *older.staleness_budget);
      break;
    }
    if (const auto target = capacity_target(request_.pace, times, terms)) {  // the target is proportional to R
      const double r_max =
          std::floor(request_.pace.rollouts_per_step * rollouts_per_s / target->provisioned_rollouts_per_s);
      if (r_max >= 1) text += fmt::format(", or lower R to {:.0f} or less", r_max);
    }
    return text;
  }

  // The most frequent reasons against the refused offers, each with the number of its offers.
  std::string reasons_to_refuse() const {
    constexpr std::size_t kReasonsShown = 3;
    std::map<std::string_view, std::size_t> counts;
    for (const auto& [i, reason] : refused_) ++counts[reason];
    std::vector<std::pair<std::size_t, std::string_view>> by_count;
    for (const auto& [reason, count] : counts) by_count.emplace_back(count, reason);
    std::stable_sort(by_count.begin(), by_count.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::string text;
    for (std::size_t i = 0; i < std::min(kReasonsShown, by_count.size()); ++i)
      text += fmt::format("{}{} x {}", i > 0 ? "; " : "", by_count[i].first, by_count[i].second);
    return text + (by_count.size() > kReasonsShown ? "; and others" : "");
  }

  Plan plan_of(const Solution& s, Duration assumed_t_b) const {
    Plan plan;
    plan.request = request_;
    plan.target = s.target;
    plan.broadcast_time = assumed_t_b;
    plan.broadcast_time_last = s.times.last();
    plan.broadcast_lower_bound = chains::lower_bound(request_.delta_bytes, request_.learner_up, s.links,
                                                     request_.quorum, request_.paths.regions.graph);
    plan.converged = has_converged_;
    plan.topology = s.topology;
    plan.chunk = s.chunk;
    plan.rollouts_per_s = s.set.rollouts_per_s;
    plan.method = s.method;
    plan.chosen_usd_per_hour = s.set.usd_per_hour;
    plan.greedy_usd_per_hour = s.greedy_usd_per_hour;
    if (s.method == "exact") plan.exact_usd_per_hour = s.set.usd_per_hour;
    plan.lp_bound_usd_per_hour = s.usd_per_hour_min;
    plan.staleness_needed = needed_staleness(request_.pace, assumed_t_b, s.set.rollouts_per_s);
    double slowest_rate = pool_[s.members.front()].rollouts_per_s, fastest_rate = slowest_rate;
    for (const std::size_t i : s.members) {
      slowest_rate = std::min(slowest_rate, pool_[i].rollouts_per_s);
      fastest_rate = std::max(fastest_rate, pool_[i].rollouts_per_s);
    }
    constexpr double kGroupSecondsMax = 1e6;  // so that the Duration cannot overflow
    // How much longer the slowest worker needs for a group than the fastest one.
    const double extra_group_s = request_.group_size / slowest_rate - request_.group_size / fastest_rate;
    const int lag = staleness_lag(request_.pace.step_time, s.times.last() + request_.fleet.install_time_expected,
                                  from_seconds(std::min(kGroupSecondsMax, extra_group_s)));
    plan.staleness_worst = request_.staleness_worst ? request_.staleness_worst(lag) : request_.staleness_budget;
    if (request_.predict_idle) plan.idle_fraction = request_.predict_idle(request_, pace_of(s));
    add_rows(s, plan);
    add_totals(plan);
    add_notes(s, plan);
    return plan;
  }

  FleetPace pace_of(const Solution& s) const {
    FleetPace fleet;
    // The learner has sent everything once when the first worker has it.
    fleet.links_busy = s.times.last();
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      const Duration arrival = s.times.time_of(WorkerId{m + 1});
      fleet.workers.push_back({.rollouts_per_s = pool_[s.members[m]].rollouts_per_s, .policy_arrival = arrival});
      fleet.links_busy = std::min(fleet.links_busy, arrival);
    }
    return fleet;
  }

  void add_rows(const Solution& s, Plan& plan) const {
    std::vector<int> rank_of(order_.size());
    for (std::size_t i = 0; i < order_.size(); ++i) rank_of[order_[i]] = static_cast<int>(i) + 1;
    const auto row_of = [&](const Offer& o) {
      PlanRow row;
      row.offer = o;
      row.offer.bid_usd_per_hour = bid_for(request_, o);
      row.assumed = assumed_keys(request_, o);
      return row;
    };
    // Machines and hosts are numbered from 1; 0 stands for none. An occupant is a chosen offer or one for standby.
    std::uint32_t machine_count = 0, host_count = 0;
    for (const Candidate& c : pool_) {
      machine_count = std::max(machine_count, c.machine);
      host_count = std::max(host_count, c.host);
    }
    std::vector<std::vector<std::uint32_t>> occupants_by_machine(machine_count + 1);
    std::vector<std::size_t> occupants_by_host(host_count + 1);
    plan.rows.reserve(offers_.size());  // they may be many
    const auto occupy = [&](std::size_t i) {
      if (pool_[i].machine) occupants_by_machine[pool_[i].machine].push_back(static_cast<std::uint32_t>(i));
      if (pool_[i].host) ++occupants_by_host[pool_[i].host];
    };
    // Returns why offer i cannot be rented beside the occupants; absent if it can.
    const auto exclusion_of = [&](std::size_t i) -> std::optional<std::string> {
      const Candidate& candidate = pool_[i];
      if (candidate.machine)
        for (const std::uint32_t other : occupants_by_machine[candidate.machine])
          if (pool_[other].gpus & candidate.gpus) return fmt::format("the same machine as {}", offer(other).id);
      if (candidate.host && occupants_by_host[candidate.host] >= limits_.per_host_max)
        return fmt::format("{} offers of this host are the limit (fleet.per_host_max)", limits_.per_host_max);
      return std::nullopt;
    };
    for (const std::size_t i : s.members) occupy(i);
    std::vector<PlanRow> excluded_rows;  // their offers share a machine or host with an occupant
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
      if (!row.offer.engines_note.empty()) row.reason += "; " + row.offer.engines_note;
      plan.rows.push_back(std::move(row));
    }
    const Candidate& last_member = pool_[s.members.back()];
    for (const std::size_t i : order_) {
      if (is_chosen(s, i)) continue;
      PlanRow row = row_of(offer(i));
      row.rank = rank_of[i];
      row.cost = cost_of(request_, row.offer, kUsualCopies);
      if (auto reason = exclusion_of(i)) {
        row.reason = std::move(*reason);
        excluded_rows.push_back(std::move(row));
        continue;
      }
      occupy(i);
      row.reason = reason_against(i, s, last_member);
      if (!row.offer.engines_note.empty()) row.reason += "; " + row.offer.engines_note;
      plan.standby.push_back(row.offer.id);
      plan.rows.push_back(std::move(row));
    }
    for (PlanRow& row : excluded_rows) plan.rows.push_back(std::move(row));
    for (const auto& [i, reason] : refused_) {
      PlanRow row = row_of(offers_[i]);
      row.cost = cost_of(request_, row.offer, kUsualCopies);
      row.reason = reason;
      plan.rows.push_back(std::move(row));
    }
  }

  // Why eligible offer i, which no limit excludes, is not rented. `last_member`: the dearest member per rollout.
  std::string reason_against(std::size_t i, const Solution& s, const Candidate& last_member) const {
    const auto per_1k = [](const Candidate& c) { return 1000 * c.usd_per_hour / (kSecondsPerHour * c.rollouts_per_s); };
    if (std::find(s.dropped.begin(), s.dropped.end(), i) != s.dropped.end())
      return "dropped: the target is met without it";
    if (per_1k(pool_[i]) > per_1k(last_member))
      return fmt::format("dearer per rollout: above ${:.3g}/1k", per_1k(last_member));
    if (s.members.size() == request_.fleet.workers_max)
      return fmt::format("too slow for a fleet of at most {} workers", request_.fleet.workers_max);
    return "not needed: the rented offers cost less";
  }

  void add_totals(Plan& plan) const {
    for (const PlanRow* row : plan.chosen()) {
      // The run rents fewer workers if they are faster than predicted, and more if they are slower.
      const double usd = *row->cost.usd_per_hour(), uncertainty = row->offer.uncertainty();
      plan.usd_per_hour.expected += usd;
      plan.usd_per_hour.low += usd / (1 + uncertainty);
      double usd_max = usd;  // a bid may rise to the price on demand
      if (row->offer.bid_usd_per_hour && row->offer.gpu_usd_per_hour)
        usd_max += std::max(0.0, *row->offer.gpu_usd_per_hour - *row->offer.bid_usd_per_hour);
      plan.usd_per_hour.high += usd_max / (1 - uncertainty);
      plan.usd_joining += usd_to_join(request_, row->offer);
    }
    plan.replacing = expected_replacement_cost(request_, plan.rows);
  }

  void add_notes(const Solution& s, Plan& plan) const {
    if (!plan.converged)
      plan.notes.push_back(
          fmt::format("the set and its broadcast time did not converge: planned for T_b = {}, the fleet has {}",
                      to_text(plan.broadcast_time), to_text(s.broadcast_time)));
    std::map<std::string, std::string> offers_by_assumption;
    for (const PlanRow* row : plan.chosen())
      for (const std::string& key : row->assumed) {
        std::string& ids = offers_by_assumption[key];
        ids += (ids.empty() ? "" : ", ") + row->offer.id;
      }
    for (const auto& [key, ids] : offers_by_assumption)
      plan.notes.push_back(fmt::format("{} is assumed for {}", key, ids));
    add_note_on_throughput(plan);
    add_note_on_losses(plan);
    if (!request_.learner_usd_per_hour)
      plan.notes.push_back("the learner's own price is not stated (learner.usd_per_hour): it is not included");
    add_note_on_staleness(s, plan);
    if (request_.staleness_budget < request_.pace.publish_every)
      plan.notes.push_back(fmt::format(
          "S = {} is strictly on-policy: after each publication the learner waits at least {} for a batch",
          request_.staleness_budget,
          to_text(plan.broadcast_time + from_seconds(request_.pace.rollouts_per_step / s.set.rollouts_per_s))));
  }

  // Notes that S, not the learner's speed, sets the target.
  void add_note_on_staleness(const Solution& s, Plan& plan) const {
    CapacityTerms without_budget = request_.capacity_terms();
    without_budget.staleness_budget.reset();
    const PublicationTimes times = request_.publication_times(plan.broadcast_time);
    const auto any_age = capacity_target(request_.pace, times, without_budget);
    if (!any_age || any_age->required_rollouts_per_s >= s.target.required_rollouts_per_s * (1 - kRounding)) return;
    plan.notes.push_back(fmt::format(
        "S = {} leaves a broadcast of {} and the next batch {} of T = {}, so {:.4g} rollouts/s are required; S = {} "
        "would require {:.4g}",
        request_.staleness_budget, to_text(plan.broadcast_time),
        request_.staleness_budget - request_.pace.publish_every + 1, to_text(request_.pace.step_time),
        s.target.required_rollouts_per_s,
        needed_staleness(request_.pace, plan.broadcast_time, any_age->required_rollouts_per_s),
        any_age->required_rollouts_per_s));
  }

  // Notes the sources of the rented machines' throughput, least certain first.
  static void add_note_on_throughput(Plan& plan) {
    // Keys: the negative uncertainty, so that the least certain source is first, and the source in words.
    std::map<std::pair<double, std::string>, std::set<std::string>> gpus_by_source;
    for (const PlanRow* row : plan.chosen())
      if (!row->offer.rollouts_from.empty())
        gpus_by_source[{-row->offer.uncertainty(), row->offer.rollouts_from}].insert(row->offer.gpu);
    for (const auto& [key, gpus] : gpus_by_source) {
      const auto& [negative_uncertainty, source] = key;
      plan.notes.push_back(fmt::format("throughput of {}, perhaps {:.0f} % more or less: {}", fmt::join(gpus, ", "),
                                       -100 * negative_uncertainty, source));
    }
  }

  void add_note_on_losses(Plan& plan) const {
    std::string ids_without_losses;
    bool has_new_bids = false;
    for (const PlanRow* row : plan.chosen()) {
      if (!row->losses_per_hour) ids_without_losses += (ids_without_losses.empty() ? "" : ", ") + row->offer.id;
      has_new_bids = has_new_bids || (row->offer.bid_usd_per_hour && row->offer.seen_hours < kPriorHours);
    }
    if (!ids_without_losses.empty())
      plan.notes.push_back("it is unknown how often these are lost, so nothing is included for it: " +
                           ids_without_losses);
    if (has_new_bids) plan.notes.push_back("it is unknown how often bids are outbid: once a day is assumed");
  }

  // Checks the finished plan against the budgets.
  Status check_limits(const Plan& plan) const {
    // With S below kappa, training is strictly on-policy: the user wants the learner to wait for each policy's
    // rollouts.
    const bool is_on_policy = request_.staleness_budget < request_.pace.publish_every;
    const bool is_for_comparison = request_.capacity_share != 1;  // its fleet may be too small on purpose
    if (plan.staleness_needed > request_.staleness_budget && !is_on_policy && !is_for_comparison)
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
    if (const auto run_usd = plan.usd_run();
        request_.fleet.usd_max && run_usd && run_usd->expected > *request_.fleet.usd_max)
      return fail(Code::kInfeasible, kOperation,
                  "the run would cost ${:.2f} in {}, and the budget is ${:.2f}: raise the budget or run fewer steps",
                  run_usd->expected, to_text(*request_.run_time), *request_.fleet.usd_max);
    return ok();
  }

  const Offer& offer(std::size_t eligible_index) const { return offers_[eligible_[eligible_index]]; }

  static bool is_chosen(const Solution& s, std::size_t eligible_index) {  // `chosen` is ascending
    return std::binary_search(s.set.chosen.begin(), s.set.chosen.end(), eligible_index);
  }

  const PlanRequest& request_;
  std::span<const Offer> offers_;
  AllocationLimits limits_;
  std::vector<std::size_t> eligible_;                         // indices into offers_
  std::vector<Candidate> pool_;                               // of the eligible offers
  std::vector<std::size_t> order_;                            // eligible offers by unit cost
  std::vector<std::pair<std::size_t, std::string>> refused_;  // index into offers_, reason
  bool has_converged_ = true;
};

}  // namespace

std::string_view to_string(Pricing pricing) { return pricing == Pricing::kBid ? "bid" : "on_demand"; }

std::optional<double> PlanRow::usd_per_1k_rollouts() const {
  const auto usd = cost.usd_per_hour();
  return usd && offer.rollouts_per_s > 0 ? std::optional(1000 * *usd / (kSecondsPerHour * offer.rollouts_per_s))
                                         : std::nullopt;
}

std::vector<const PlanRow*> Plan::chosen() const {
  std::vector<const PlanRow*> chosen_rows;
  for (const PlanRow& row : rows)
    if (row.chosen) chosen_rows.push_back(&row);
  return chosen_rows;
}

Estimate Plan::rollouts_per_s_estimate() const {
  Estimate rate{.low = 0, .expected = rollouts_per_s, .high = 0};
  for (const PlanRow* row : chosen()) {
    rate.low += row->offer.rollouts_per_s * (1 - row->offer.uncertainty());
    rate.high += row->offer.rollouts_per_s * (1 + row->offer.uncertainty());
  }
  return rate;
}

const PlanRow* Plan::row_of(std::string_view offer) const {
  const auto it = std::find_if(rows.begin(), rows.end(), [&](const PlanRow& row) { return row.offer.id == offer; });
  return it == rows.end() ? nullptr : &*it;
}

std::optional<Estimate> Plan::usd_fleet() const {
  if (!request.run_time) return std::nullopt;
  const double hours = seconds(*request.run_time) / kSecondsPerHour;
  const Estimate once{.low = usd_joining + replacing.usd.low,
                      .expected = usd_joining + replacing.usd.expected,
                      .high = usd_joining + replacing.usd.high};
  return Estimate{.low = hours * usd_per_hour.low + once.low,
                  .expected = hours * usd_per_hour.expected + once.expected,
                  .high = hours * usd_per_hour.high + once.high};
}

std::optional<Estimate> Plan::usd_run() const {
  const std::optional<Estimate> fleet = usd_fleet();
  if (!fleet) return fleet;
  const double learner_usd = seconds(*request.run_time) / kSecondsPerHour * request.learner_usd_per_hour.value_or(0);
  return Estimate{
      .low = fleet->low + learner_usd, .expected = fleet->expected + learner_usd, .high = fleet->high + learner_usd};
}

std::optional<double> Plan::usd_run_with_waiting() const {
  if (!request.run_time || !idle_fraction || *idle_fraction >= 1) return std::nullopt;
  const double hours = seconds(*request.run_time) / (1 - *idle_fraction) / kSecondsPerHour;
  return hours * (usd_per_hour.expected + request.learner_usd_per_hour.value_or(0)) + usd_joining +
         replacing.usd.expected / (1 - *idle_fraction);
}

Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers) {
  return Planner(request, offers).run();
}

}  // namespace echoline::provisioner
