// Plans a simulated run before its first event, with the production planner.
#include "sim/run_plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "provisioner/fleet_rules.hpp"
#include "provisioner/offer_links.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;

constexpr std::string_view kOperation = "simulate a run";
constexpr int kMeanSamples = 20'000;              // responses drawn for the mean
constexpr double kRandomSpread = 1000;            // range of the random prices for OfferChoice::kRandom
constexpr std::size_t kPlannerWorkersMax = 1024;  // limit of provisioner/plan's search
constexpr int kRounds = 8;                        // until the assumed broadcast time suffices

Status check(const RunScenario& s) {
  const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
  if (s.offers.empty()) return invalid("there are no offers");
  if (s.pacing.steps_total.value_or(0) == 0 || s.pacing.group_size == 0 || s.pacing.groups_per_step() == 0)
    return invalid("steps, prompts and rollouts must be positive");
  if (s.request.full_bytes.count == 0) return invalid("the policy has no bytes");
  if (!s.token_histogram && !(s.tokens.median >= 1)) return invalid("a response needs at least one token");
  if (s.token_histogram && (s.token_histogram->values.empty() || !(s.token_histogram->cumulative_weights.back() > 0)))
    return invalid("the histogram of lengths is empty");
  if (s.groups_at_once == 0) return invalid("a worker must hold at least one group");
  if (s.regions.empty()) return invalid("there is no region");
  for (const RunOffer& o : s.offers)
    if (o.region >= s.regions.size() || !(o.rate_share > 0))
      return invalid("an offer has no valid region or no throughput");
  return ok();
}

Duration half_period(const RunScenario& s) { return s.request.pace.publish_every * s.request.pace.step_time / 2; }

// The offers with the least price per rollout until they suffice, up to the limit.
std::vector<std::size_t> cheapest_offers(const RunScenario& s, const std::vector<Offer>& offers,
                                         double rollouts_per_s_min) {
  std::vector<std::size_t> order(offers.size()), chosen;
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto usd_per_rollout = [&](std::size_t i) {
    return offers[i].usd_per_hour_known() / std::max(offers[i].rollouts_per_s, 1e-12);
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return usd_per_rollout(a) < usd_per_rollout(b); });
  double rate = 0, usd = 0;
  for (const std::size_t i : order) {
    const double price = s.offers[i].offer.usd_per_hour_known();
    if (chosen.size() == s.request.fleet.workers_max || rate >= rollouts_per_s_min) break;
    if (!(offers[i].rollouts_per_s > 0) || provisioner::ineligibility_reason(s.request, offers[i])) continue;
    if (s.request.fleet.usd_per_hour_max && usd + price > *s.request.fleet.usd_per_hour_max) continue;
    chosen.push_back(i);
    rate += offers[i].rollouts_per_s;
    usd += price;
  }
  return chosen;
}

// For fleets beyond the planner's limit: the same fixed point of target, set and broadcast, with a set by price alone.
Result<Plan> plan_by_price(const RunScenario& s, const std::vector<Offer>& offers, std::vector<std::size_t>& wanted) {
  Plan plan;
  plan.request = s.request;
  plan.method = "by price";
  Duration assumed_time{};
  for (int round = 0; round < kRounds; ++round) {
    ECHO_ASSIGN(plan.target, capacity_target(s.request.pace, assumed_time, s.request.fleet.headroom));
    wanted = cheapest_offers(s, offers, plan.target.provisioned_rollouts_per_s);
    RunBroadcast broadcast(s);
    plan.rollouts_per_s = 0;
    for (std::size_t k = 0; k < wanted.size(); ++k) {
      const RunOffer& o = s.offers[wanted[k]];
      broadcast.add(receiver_of(s, o, WorkerId{k + 1}));
      plan.rollouts_per_s += o.offer.rollouts_per_s;
    }
    ECHO_TRY(broadcast.prepare(s.request.delta_bytes));
    const Duration t_b = broadcast.quorum_time() + s.request.fleet.install_time_expected;
    if (t_b <= assumed_time) break;
    assumed_time = t_b;
  }
  plan.broadcast_time = assumed_time;
  plan.staleness_worst = s.request.staleness_worst ? s.request.staleness_worst(1) : s.request.staleness_budget;
  if (plan.rollouts_per_s >= plan.target.provisioned_rollouts_per_s * (1 - 1e-9)) return plan;
  return fail(Code::kInfeasible, "plan", "at least {:.4g} rollouts/s are needed, and {} machines give {:.4g}",
              plan.target.provisioned_rollouts_per_s, wanted.size(), plan.rollouts_per_s);
}

}  // namespace

Receiver receiver_of(const RunScenario& s, const RunOffer& o, WorkerId id) {
  const auto [up, down] = provisioner::links_of(o.offer, s.request.fleet, s.request.paths);
  return {id, up, down, s.request.paths.regions.of(o.offer.place), o.offer.reliability.value_or(1)};
}

double mean_tokens(const RunScenario& s) {
  Draws draws(1, 41);  // independent of the run's seed, because promised rates do not depend on it
  double sum = 0;
  const double tokens_max = s.lease.tokens_max;
  for (int i = 0; i < kMeanSamples; ++i)
    sum +=
        std::clamp(std::floor((s.token_histogram ? draws.sample(*s.token_histogram) : draws.lognormal(s.tokens)) + 0.5),
                   1.0, tokens_max);
  return sum / kMeanSamples;
}

Result<RunStart> plan_simulated_run(const RunScenario& s) {
  ECHO_TRY(check(s));
  RunStart start;
  std::vector<Offer> offers;
  std::unordered_map<std::string_view, std::size_t> index;
  Draws random_prices(s.seed, 23);
  for (const RunOffer& o : s.offers) {
    if (!index.emplace(o.offer.id, offers.size()).second)
      return fail(Code::kInvalid, kOperation, "offer '{}' occurs twice", o.offer.id);
    offers.push_back(o.offer);
    if (s.offer_choice == OfferChoice::kRandom) {  // chosen at random, at the real price
      offers.back().gpu_usd_per_hour = o.offer.rollouts_per_s * (1 + (kRandomSpread - 1) * random_prices.uniform());
      offers.back().storage_usd_per_hour = 0;
      offers.back().bid_usd_per_hour_min.reset();
    }
  }
  const bool exceeds_planner = s.request.fleet.workers_max > kPlannerWorkersMax;
  auto plan = exceeds_planner ? plan_by_price(s, offers, start.wanted) : make_plan(s.request, offers);
  if (plan) {
    start.plan = std::move(*plan);
    for (const PlanRow* row : start.plan.chosen()) start.wanted.push_back(index.at(row->offer.id));
  } else {
    if (plan.error().code != Code::kInfeasible) return std::move(plan).error();
    start.plan_error = plan.error().message();
    start.plan.request = s.request;
    ECHO_ASSIGN(start.plan.target, capacity_target(s.request.pace, half_period(s), s.request.fleet.headroom));
    start.wanted = cheapest_offers(s, offers, start.plan.target.provisioned_rollouts_per_s);
    start.plan.broadcast_time = half_period(s);  // the longest that the core plans for
    start.plan.staleness_worst = s.request.staleness_budget;
    start.plan.rollouts_per_s = 0;
    for (const std::size_t i : start.wanted) start.plan.rollouts_per_s += offers[i].rollouts_per_s;
  }
  if (!plan || s.offer_choice == OfferChoice::kRandom || exceeds_planner) {
    start.plan.usd_per_hour.expected = 0;
    for (const std::size_t i : start.wanted) start.plan.usd_per_hour.expected += s.offers[i].offer.usd_per_hour_known();
  }
  const FleetRules& rules = start.rules = provisioner::rules_of(start.plan);
  ECHO_ASSIGN(const CapacityTarget target, capacity_target(rules.pace, rules.broadcast_time, rules.fleet.headroom));
  start.rules_target = target.provisioned_rollouts_per_s;
  start.plan.rows.clear();  // not needed any more; they may be thousands
  start.plan.standby.clear();
  return start;
}

}  // namespace echoline::sim
