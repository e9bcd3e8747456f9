#include "provisioner/plan.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>

#include "chains/broadcast_model.hpp"
#include "chains/planner.hpp"
#include "chains/score.hpp"
#include "provisioner/allocation.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "plan";
constexpr int kRoundsMax = 64;
constexpr double kBytesPerGb = 1e9;

// The dearest price any offer states, for those that do not state theirs; absent where none does.
struct DearestKnown {
  std::optional<double> storage_usd_per_hour;
  std::optional<double> upload_usd_per_gb;
  std::optional<double> download_usd_per_gb;
};

DearestKnown dearest_of(std::span<const Offer> offers) {
  DearestKnown d;
  for (const Offer& o : offers) {  // an absent price compares less than any
    d.storage_usd_per_hour = std::max(d.storage_usd_per_hour, o.storage_usd_per_hour);
    d.upload_usd_per_gb = std::max(d.upload_usd_per_gb, o.upload_usd_per_gb);
    d.download_usd_per_gb = std::max(d.download_usd_per_gb, o.download_usd_per_gb);
  }
  return d;
}

// A sum of which some parts may be unknown.
struct Sum {
  double known = 0;
  bool complete = true;
  void add(const std::optional<double>& part, double factor = 1) {
    if (part) known += factor * *part;
    if (!part && factor != 0) complete = false;
  }
  std::optional<double> total() const { return complete ? std::optional(known) : std::nullopt; }
};

template <class T>
std::optional<T> either(const std::optional<T>& first, const std::optional<T>& second) {
  return first ? first : second;
}

// Of several offers of one machine, only one may be rented: the cheapest per rollout or, where the others do not
// suffice then, the fastest.
enum class MachinePick { kCheapest, kFastest };

// One run of the search for an assumed T_b, and the T_b its own set and topology have.
struct Solution {
  CapacityTarget target;
  Allocation set;  // indices into the eligible offers
  std::vector<std::size_t> dropped;
  std::string method;
  double greedy_usd_per_hour = 0;
  std::optional<double> exact_usd_per_hour;
  std::vector<std::size_t> members;  // the set by rank; members[i] is worker i + 1
  chains::Topology topology;
  std::vector<chains::WorkerLink> links;
  chains::BroadcastTimes times;
  Duration broadcast_time{};
};

class Planner {
 public:
  Planner(const PlanRequest& request, std::span<const Offer> offers, MachinePick pick)
      : request_(request), offers_(offers), pick_(pick), dearest_(dearest_of(offers)) {}

  Result<Plan> run() {
    ECHO_TRY(check_request());
    sort_out();
    Duration assumed{};
    ECHO_ASSIGN(const Solution solution, settle(assumed));
    Plan plan = describe(solution, assumed);
    ECHO_TRY(check_limits(plan));
    return plan;
  }

 private:
  Status check_request() const {
    const PlanRequest& r = request_;
    ECHO_TRY(capacity_target(r.pace, Duration{}, r.headroom));
    ECHO_TRY(check_staleness_budget(r.staleness_budget, r.pace.publish_every));
    const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
    if (r.delta_bytes.count == 0) return invalid("the size of one publication must be positive");
    if (!(r.learner_up.bits_per_s > 0)) return invalid("the learner's uplink must be positive");
    if (r.worker_cap && !(r.worker_cap->bits_per_s > 0))
      return invalid("the cap on a worker's uplink must be positive");
    if (r.chunk.count == 0) return invalid("the chunk size must be positive");
    if (r.delay < Duration{} || r.install_time < Duration{})
      return invalid("delay and install time must not be negative");
    if (!(r.active_fraction > 0 && r.active_fraction <= 1)) return invalid("q must be above 0 and at most 1");
    if (r.workers_max < 1 || r.workers_max > chains::kChainWorkersMax)
      return fail(Code::kInvalid, kOperation, "workers_max must be 1 to {}, found {}", chains::kChainWorkersMax,
                  r.workers_max);
    if (offers_.empty()) return invalid("there are no offers");
    return ok();
  }

  // Splits the offers into eligible ones, with their price and rank, and others with the reason.
  void sort_out() {
    std::vector<std::optional<std::string>> defects(offers_.size());
    for (std::size_t i = 0; i < offers_.size(); ++i) defects[i] = defect_of(offers_[i]);
    keep_one_per_machine(defects);
    for (std::size_t i = 0; i < offers_.size(); ++i) {
      if (defects[i]) {
        refused_.emplace_back(i, std::move(*defects[i]));
        continue;
      }
      eligible_.push_back(i);
      pool_.push_back({offers_[i].rollouts_per_s, cost_of(offers_[i], 1).usd_per_hour_compared});
    }
    order_ = by_unit_cost(pool_);
  }

  void keep_one_per_machine(std::vector<std::optional<std::string>>& defects) const {
    const auto better = [&](std::size_t a, std::size_t b) {
      const Offer &x = offers_[a], &y = offers_[b];
      if (pick_ == MachinePick::kFastest && x.rollouts_per_s != y.rollouts_per_s)
        return x.rollouts_per_s > y.rollouts_per_s;
      return cost_of(x, 1).usd_per_1k_rollouts < cost_of(y, 1).usd_per_1k_rollouts;
    };
    using Machine = std::pair<std::string_view, std::string_view>;  // who starts it, and its name there
    std::map<Machine, std::size_t> kept;
    for (std::size_t i = 0; i < offers_.size(); ++i) {
      if (defects[i] || offers_[i].host.empty()) continue;
      const auto [it, is_new] = kept.emplace(Machine(offers_[i].provider, offers_[i].host), i);
      if (is_new) continue;
      std::size_t loser = i;
      if (better(i, it->second)) std::swap(loser, it->second);
      defects[loser] = fmt::format("the same machine as {}", offers_[it->second].id);
    }
  }

  std::optional<std::string> defect_of(const Offer& o) const {
    const PlanRequest& r = request_;
    if (!r.provider.empty() && o.provider != r.provider)
      return fmt::format("of provider {}, this run rents from {}", o.provider, r.provider);
    if (r.gpu_memory_min && o.vram_gb && *o.vram_gb * kBytesPerGb < static_cast<double>(r.gpu_memory_min->count))
      return fmt::format("{:.3g} GB per GPU, {:.3g} needed", *o.vram_gb,
                         static_cast<double>(r.gpu_memory_min->count) / kBytesPerGb);
    if (r.reliability_min) {
      if (!o.reliability) return fmt::format("reliability not stated, {:.3f} required", *r.reliability_min);
      if (*o.reliability < *r.reliability_min)
        return fmt::format("reliability {:.3f} below {:.3f}", *o.reliability, *r.reliability_min);
    }
    const auto days = [](Duration d) { return seconds(d) / 86400; };
    if (r.duration_min) {
      if (!o.duration_max) return fmt::format("rental time not stated, {:.2g} days required", days(*r.duration_min));
      if (*o.duration_max < *r.duration_min)
        return fmt::format("rentable for {:.2g} days, {:.2g} required", days(*o.duration_max), days(*r.duration_min));
    }
    if (r.run_time && o.duration_max && *o.duration_max < *r.run_time)
      return fmt::format("rentable for {:.2g} days, the run takes {:.2g}", days(*o.duration_max), days(*r.run_time));
    if (r.up_min && o.up < *r.up_min)
      return fmt::format("uplink {:.3g} Mbit/s below {:.3g}", o.up.mbit_per_s(), r.up_min->mbit_per_s());
    return std::nullopt;
  }

  // $/h of an offer that receives every publication and sends `copies` of it.
  OfferCost cost_of(const Offer& o, double copies) const {
    const double period_s = request_.pace.publish_every * seconds(request_.pace.step_time);
    const double gb_per_hour = static_cast<double>(request_.delta_bytes.count) / kBytesPerGb * 3600 / period_s;
    const double up_gb_per_hour = gb_per_hour * copies;
    OfferCost c;
    c.gpu = o.gpu_usd_per_hour;
    c.storage = o.storage_usd_per_hour;
    const auto bandwidth = [&](const std::optional<double>& up, const std::optional<double>& down) {
      Sum sum;
      sum.add(down, gb_per_hour);
      sum.add(up, up_gb_per_hour);
      return sum;
    };
    const Sum stated = bandwidth(o.upload_usd_per_gb, o.download_usd_per_gb);
    c.bandwidth = stated.total();
    c.usd_per_hour_low = c.gpu + c.storage.value_or(0) + stated.known;
    const Sum traffic = bandwidth(either(o.upload_usd_per_gb, dearest_.upload_usd_per_gb),
                                  either(o.download_usd_per_gb, dearest_.download_usd_per_gb));
    Sum high;
    high.add(c.gpu);
    high.add(either(c.storage, dearest_.storage_usd_per_hour));
    high.known += traffic.known;
    high.complete = high.complete && traffic.complete;
    c.usd_per_hour_high = high.total();
    c.usd_per_hour_compared = high.known;
    c.usd_per_1k_rollouts = 1000 * high.known / (3600 * o.rollouts_per_s);
    return c;
  }

  BitRate capped(BitRate rate) const { return request_.worker_cap ? std::min(rate, *request_.worker_cap) : rate; }
  BitRate up_of(const Offer& o) const { return capped(o.up); }

  Result<Solution> solve(Duration assumed) const {
    Solution s;
    ECHO_ASSIGN(s.target, capacity_target(request_.pace, assumed, request_.headroom));
    const double target = s.target.provisioned_rollouts_per_s;
    auto greedy = allocate_greedy(pool_, target, request_.workers_max);
    if (!greedy) return too_little(s.target, assumed);
    s.greedy_usd_per_hour = greedy->usd_per_hour;
    s.dropped = greedy->dropped;
    s.set = std::move(*greedy);
    s.method = "greedy";
    if (pool_.size() <= kExactPoolMax) {
      auto exact = allocate_exact(pool_, target, request_.workers_max);
      ECHO_CHECK(exact.has_value());
      s.exact_usd_per_hour = exact->usd_per_hour;
      if (exact->usd_per_hour < s.set.usd_per_hour * (1 - 1e-9)) {
        s.set = std::move(*exact);
        s.method = "exact";
      }
    }
    ECHO_TRY(connect(s));
    return s;
  }

  // Topology and broadcast times of the set.
  Status connect(Solution& s) const {
    for (const std::size_t i : order_)
      if (std::binary_search(s.set.chosen.begin(), s.set.chosen.end(), i)) s.members.push_back(i);
    BitRate slowest_up = up_of(offer(s.members.front())), fastest_up = slowest_up;
    for (const std::size_t i : s.members) {
      slowest_up = std::min(slowest_up, up_of(offer(i)));
      fastest_up = std::max(fastest_up, up_of(offer(i)));
    }
    std::vector<chains::ChainWorker> workers;
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      const Offer& o = offer(s.members[m]);
      // Nothing is measured yet: what the offer states stands for it.
      constexpr std::uint32_t kStated = 1000;
      const chains::PeerStats stated{up_of(o), request_.worker_cap.value_or(fastest_up), kStated,
                                     static_cast<std::uint32_t>(std::lround(o.reliability.value_or(0) * kStated)),
                                     Duration{}};
      workers.push_back({WorkerId{m + 1}, up_of(o), capped(o.down), chains::peer_score(stated), true, true});
      s.links.push_back({WorkerId{m + 1}, up_of(o), capped(o.down), request_.delay});
    }
    ECHO_ASSIGN(s.topology, chains::plan_chains(request_.learner_up, request_.worker_cap.value_or(slowest_up), workers,
                                                request_.topology, request_.active_fraction));
    ECHO_ASSIGN(s.times,
                chains::broadcast_time(s.topology, request_.delta_bytes, request_.chunk, request_.learner_up, s.links));
    s.broadcast_time = s.times.fraction(request_.active_fraction) + request_.install_time;
    return ok();
  }

  // A set chosen for T_b has a T_b of its own. Iterates until the two agree; where they alternate, raises the assumed
  // T_b until its set is no slower than assumed, which ends because every raise is to the T_b of some set.
  Result<Solution> settle(Duration& assumed) {
    std::vector<Duration> seen;
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed));
      if (s.broadcast_time == assumed) return s;
      seen.push_back(assumed);
      const bool repeats = std::find(seen.begin(), seen.end(), s.broadcast_time) != seen.end();
      assumed = s.broadcast_time;
      if (repeats) break;
    }
    settled_ = false;
    for (const Duration d : seen) assumed = std::max(assumed, d);
    for (int round = 0; round < kRoundsMax; ++round) {
      ECHO_ASSIGN(Solution s, solve(assumed));
      if (s.broadcast_time <= assumed) return s;
      assumed = s.broadcast_time;
    }
    return fail(Code::kInfeasible, kOperation,
                "no fleet was found whose broadcast keeps up with its size after {} rounds (T_b = {}); publish less "
                "often or choose another topology",
                2 * kRoundsMax, to_text(assumed));
  }

  // Why the target is out of reach, with ways out that hold for the largest fleet there can be.
  Error too_little(const CapacityTarget& target, Duration assumed) const {
    std::vector<std::size_t> fastest(pool_.size());
    std::iota(fastest.begin(), fastest.end(), std::size_t{0});
    std::stable_sort(fastest.begin(), fastest.end(),
                     [&](auto a, auto b) { return pool_[a].rollouts_per_s > pool_[b].rollouts_per_s; });
    const std::size_t usable = std::min(fastest.size(), request_.workers_max);
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
      if (const Status status = connect(largest); !status) return status.error();
      t_b = std::max(t_b, largest.broadcast_time);
    }

    std::string text = fmt::format(
        "{} {:.4g} rollouts/s are needed (R = {:.6g} per step, T = {}, kappa = {}, headroom {:.3g} %; T_b = {} for the "
        "largest fleet)",
        t_b > assumed ? "more than" : "at least", needed, request_.pace.rollouts_per_step,
        to_text(request_.pace.step_time), request_.pace.publish_every, request_.headroom * 100, to_text(t_b));
    if (all >= needed) {
      text += fmt::format(" and the {} fastest offers give {:.4g}: raise workers_max, {} offers give {:.4g}", usable,
                          within, pool_.size(), all);
    } else {
      text += fmt::format(" and all {} eligible offers together give {:.4g}", pool_.size(), all);
      if (!refused_.empty())
        text += fmt::format(" ({} more are refused, the first, {}: {})", refused_.size(),
                            offers_[refused_.front().first].id, refused_.front().second);
      text += ": add offers or relax what is required of them";
    }
    // (1 + headroom) kappa R / (kappa T - T_b) <= M, solved for kappa.
    const double step_s = seconds(request_.pace.step_time);
    const double slack = within * step_s - (1 + request_.headroom) * request_.pace.rollouts_per_step;
    if (slack > 0) {
      const int kappa = static_cast<int>(std::ceil(within * seconds(t_b) / slack - 1e-9));
      if (kappa > request_.pace.publish_every) text += fmt::format(", or publish every {} steps (kappa)", kappa);
    }
    const double generating_s = request_.pace.publish_every * step_s - seconds(t_b);
    const double r_max = std::floor(within * generating_s / ((1 + request_.headroom) * request_.pace.publish_every));
    if (r_max >= 1) text += fmt::format(", or lower R to {:.0f} or less", r_max);
    return fail(Code::kInfeasible, kOperation, "{}, or allow a longer step", text);
  }

  Plan describe(const Solution& s, Duration assumed) const {
    Plan plan;
    plan.request = request_;
    plan.target = s.target;
    plan.broadcast_time = assumed;
    plan.broadcast_time_last = s.times.last();
    plan.broadcast_lower_bound =
        chains::lower_bound(request_.delta_bytes, request_.learner_up, s.links, request_.active_fraction);
    plan.settled = settled_;
    plan.topology = s.topology;
    plan.rollouts_per_s = s.set.rollouts_per_s;
    plan.method = s.method;
    plan.set_usd_per_hour = s.set.usd_per_hour;
    plan.greedy_usd_per_hour = s.greedy_usd_per_hour;
    plan.exact_usd_per_hour = s.exact_usd_per_hour;
    plan.lp_bound_usd_per_hour = lp_bound(pool_, s.target.provisioned_rollouts_per_s).value_or(0);
    plan.staleness_needed = needed_staleness(request_.pace, assumed, s.set.rollouts_per_s);
    double slowest = pool_[s.members.front()].rollouts_per_s, fastest = slowest;
    for (const std::size_t i : s.members) {
      slowest = std::min(slowest, pool_[i].rollouts_per_s);
      fastest = std::max(fastest, pool_[i].rollouts_per_s);
    }
    const int lag = staleness_lag(
        request_.pace.step_time, s.times.last() + request_.install_time,
        from_seconds(std::min(1e6, request_.group_size / slowest - request_.group_size / fastest)));
    plan.staleness_worst = request_.staleness_worst ? request_.staleness_worst(lag) : request_.staleness_budget;
    add_rows(s, plan);
    add_totals(plan);
    add_notes(s, plan);
    return plan;
  }

  void add_rows(const Solution& s, Plan& plan) const {
    std::map<std::size_t, int> rank_of;
    for (std::size_t r = 0; r < order_.size(); ++r) rank_of[order_[r]] = static_cast<int>(r) + 1;
    for (std::size_t m = 0; m < s.members.size(); ++m) {
      PlanRow row;
      row.offer = offer(s.members[m]);
      row.rank = rank_of[s.members[m]];
      row.chosen = true;
      row.worker = WorkerId{m + 1};
      row.cost = cost_of(row.offer, s.topology.copies_sent_by(*row.worker));
      row.cumulative_rollouts_per_s =
          row.offer.rollouts_per_s + (plan.rows.empty() ? 0 : plan.rows.back().cumulative_rollouts_per_s);
      row.reason = row.rank <= static_cast<int>(s.members.size()) ? "rented: among the cheapest per rollout"
                                                                  : "rented: completes the target for the least money";
      plan.rows.push_back(std::move(row));
    }
    const Candidate& last = pool_[s.members.back()];
    for (const std::size_t i : order_) {
      if (std::binary_search(s.set.chosen.begin(), s.set.chosen.end(), i)) continue;
      PlanRow row;
      row.offer = offer(i);
      row.rank = rank_of[i];
      row.cost = cost_of(row.offer, 1);
      row.reason = reason_against(i, s, last);
      plan.standby.push_back(row.offer.id);
      plan.rows.push_back(std::move(row));
    }
    for (const auto& [i, reason] : refused_) {
      PlanRow row;
      row.offer = offers_[i];
      row.cost = cost_of(row.offer, 1);
      row.reason = reason;
      plan.rows.push_back(std::move(row));
    }
  }

  std::string reason_against(std::size_t i, const Solution& s, const Candidate& last) const {
    const auto per_1k = [](const Candidate& c) { return 1000 * c.usd_per_hour / (3600 * c.rollouts_per_s); };
    if (std::find(s.dropped.begin(), s.dropped.end(), i) != s.dropped.end())
      return "dropped: the target holds without it";
    if (per_1k(pool_[i]) > per_1k(last))
      return fmt::format("dearer per rollout: above ${:.3g}/1k", per_1k(last));
    if (s.members.size() == request_.workers_max)
      return fmt::format("too slow for a fleet of at most {} workers", request_.workers_max);
    return "not needed: the rented cost less";
  }

  void add_totals(Plan& plan) const {
    const double gb = static_cast<double>(request_.full_bytes.count) / kBytesPerGb;
    Sum per_hour, joining;
    for (const PlanRow* row : plan.chosen()) {
      plan.usd_per_hour_low += row->cost.usd_per_hour_low;
      per_hour.add(row->cost.usd_per_hour_high);
      plan.usd_joining_low += gb * row->offer.download_usd_per_gb.value_or(0);
      joining.add(either(row->offer.download_usd_per_gb, dearest_.download_usd_per_gb), gb);
    }
    plan.usd_per_hour_high = per_hour.total();
    plan.usd_joining_high = joining.total();
  }

  void add_notes(const Solution& s, Plan& plan) const {
    if (!plan.settled)
      plan.notes.push_back(
          fmt::format("set and broadcast time did not settle on one another: planned for T_b = {}, the "
                      "fleet has {}",
                      to_text(plan.broadcast_time), to_text(s.broadcast_time)));
    std::string unknown, unknowable;
    for (const PlanRow* row : plan.chosen()) {
      if (row->cost.storage && row->cost.bandwidth) continue;
      std::string& list = row->cost.usd_per_hour_high ? unknown : unknowable;
      list += (list.empty() ? "" : ", ") + row->offer.id;
    }
    if (!unknown.empty())
      plan.notes.push_back(
          fmt::format("prices not stated by {}: counted at the dearest that any offer states", unknown));
    if (!unknowable.empty())
      plan.notes.push_back(
          fmt::format("prices not stated by {}, nor by any other offer: they come on top, as much as they are",
                      unknowable));
    if (!request_.learner_usd_per_hour)
      plan.notes.push_back("the learner's own price is not stated (learner.usd_per_hour): it comes on top");
    if (request_.staleness_budget < request_.pace.publish_every)
      plan.notes.push_back(
          fmt::format("S = {} is strictly on-policy: after each publication the learner waits at least {} for a batch",
                      request_.staleness_budget,
                      to_text(plan.broadcast_time +
                              from_seconds(request_.pace.rollouts_per_step / s.set.rollouts_per_s))));
  }

  // Limits on the finished plan.
  Status check_limits(const Plan& plan) const {
    const bool on_policy = request_.staleness_budget < request_.pace.publish_every;  // as asked for: the learner waits
    if (plan.staleness_needed > request_.staleness_budget && !on_policy)
      return fail(
          Code::kInfeasible, kOperation,
          "rollouts get {} steps old before newer ones are there (kappa = {}, T_b = {}, T = {}) and the budget is S = {}: "
          "allow S = {}, publish more often, or shorten the broadcast",
          plan.staleness_needed, request_.pace.publish_every, to_text(plan.broadcast_time),
          to_text(request_.pace.step_time), request_.staleness_budget, plan.staleness_needed);
    double compared = 0;
    for (const PlanRow* row : plan.chosen()) compared += row->cost.usd_per_hour_compared;
    if (request_.budget_usd_per_hour && compared > *request_.budget_usd_per_hour)
      return fail(Code::kInfeasible, kOperation,
                  "the cheapest fleet found costs ${:.4f}/h and the budget is ${:.4f}/h: raise it to that, lower R, or "
                  "allow a longer step",
                  compared, *request_.budget_usd_per_hour);
    return ok();
  }

  const Offer& offer(std::size_t eligible) const { return offers_[eligible_[eligible]]; }

  const PlanRequest& request_;
  std::span<const Offer> offers_;
  MachinePick pick_;
  DearestKnown dearest_;
  std::vector<std::size_t> eligible_;                         // indices into offers_
  std::vector<Candidate> pool_;                               // of the eligible
  std::vector<std::size_t> order_;                            // eligible by unit cost
  std::vector<std::pair<std::size_t, std::string>> refused_;  // index into offers_, reason
  bool settled_ = true;
};

}  // namespace

std::vector<const PlanRow*> Plan::chosen() const {
  std::vector<const PlanRow*> out;
  for (const PlanRow& row : rows)
    if (row.chosen) out.push_back(&row);
  return out;
}

namespace {

std::optional<double> usd_run(const Plan& plan, const std::optional<double>& fleet_usd_per_hour,
                              const std::optional<double>& joining) {
  if (!plan.request.run_time || !plan.request.learner_usd_per_hour || !fleet_usd_per_hour || !joining)
    return std::nullopt;
  return seconds(*plan.request.run_time) / 3600 * (*plan.request.learner_usd_per_hour + *fleet_usd_per_hour) + *joining;
}

}  // namespace

std::optional<double> Plan::usd_run_low() const { return usd_run(*this, usd_per_hour_low, usd_joining_low); }
std::optional<double> Plan::usd_run_high() const { return usd_run(*this, usd_per_hour_high, usd_joining_high); }

Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers) {
  auto plan = Planner(request, offers, MachinePick::kCheapest).run();
  if (plan || plan.error().code != Code::kInfeasible) return plan;
  auto faster = Planner(request, offers, MachinePick::kFastest).run();
  return faster ? std::move(faster) : std::move(plan);
}

}  // namespace echoline::provisioner
