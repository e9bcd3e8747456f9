// Plans a simulated run before its first event, with the real planner (provisioner/plan).
#include "sim/run_plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "provisioner/fleet_rules.hpp"
#include "provisioner/offer_links.hpp"
#include "sim/run_broadcast.hpp"

namespace echoline::sim {
namespace {

using namespace provisioner;

constexpr std::string_view kOperation = "simulate a run";
constexpr int kMeanSamples = 20'000;              // responses drawn for the mean length
constexpr std::size_t kPlannerWorkersMax = 1024;  // limit of provisioner/plan's search
constexpr std::uint64_t kPriceStream = 23;        // random stream of the seed
constexpr int kRoundsMax = 8;                     // of plan_by_price(); each assumes a longer broadcast time

Status check(const RunScenario& scenario) {
  const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
  if (scenario.offers.empty()) return invalid("there are no offers");
  if (scenario.pacing.steps_total.value_or(0) == 0 || scenario.pacing.group_size == 0 ||
      scenario.pacing.groups_per_step() == 0)
    return invalid("steps, prompts and rollouts must be positive");
  if (scenario.request.full_bytes.count == 0) return invalid("the policy has no bytes");
  if (!scenario.token_histogram && !(scenario.tokens.median >= 1))
    return invalid("a response needs at least one token");
  if (scenario.token_histogram &&
      (scenario.token_histogram->values.empty() || !(scenario.token_histogram->cumulative_weights.back() > 0)))
    return invalid("the histogram of lengths is empty");
  if (scenario.groups_at_once == 0) return invalid("a worker must hold at least one group");
  if (scenario.regions.empty()) return invalid("there is no region");
  for (const RunOffer& run_offer : scenario.offers)
    if (run_offer.region >= scenario.regions.size() || !(run_offer.rate_share > 0))
      return invalid("an offer has no valid region or no throughput");
  return ok();
}

// Returns the cheapest offers per rollout that together give rollouts_per_s_min. They are fewer if the limit on workers
// or on dollars an hour is met first. `offers` has the planner's prices, which may be random; scenario.offers has the
// real ones.
std::vector<std::size_t> cheapest_offers(const RunScenario& scenario, const std::vector<Offer>& offers,
                                         double rollouts_per_s_min) {
  std::vector<std::size_t> order(offers.size()), chosen;
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto usd_per_rollout = [&](std::size_t i) {
    return offers[i].usd_per_hour_known() / std::max(offers[i].rollouts_per_s, 1e-12);
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return usd_per_rollout(a) < usd_per_rollout(b); });
  double rate = 0, usd = 0;
  for (const std::size_t i : order) {
    const double price = scenario.offers[i].offer.usd_per_hour_known();
    if (chosen.size() == scenario.request.fleet.workers_max || rate >= rollouts_per_s_min) break;
    if (!(offers[i].rollouts_per_s > 0) || provisioner::ineligibility_reason(scenario.request, offers[i])) continue;
    if (scenario.request.fleet.usd_per_hour_max && usd + price > *scenario.request.fleet.usd_per_hour_max) continue;
    chosen.push_back(i);
    rate += offers[i].rollouts_per_s;
    usd += price;
  }
  return chosen;
}

// Plans a fleet beyond the planner's limit. As in the planner, the target depends on the broadcast time, the machines
// on the target, and the broadcast time on the machines, so all three are computed in rounds. Here the machines are
// chosen by price alone.
Result<Plan> plan_by_price(const RunScenario& scenario, const std::vector<Offer>& offers,
                           std::vector<std::size_t>& wanted) {
  Plan plan;
  plan.request = scenario.request;
  plan.method = "by price";
  Duration assumed_time{};  // of a broadcast
  for (int round = 0; round < kRoundsMax; ++round) {
    const PlanRequest& request = scenario.request;
    ECHO_ASSIGN(plan.target,
                capacity_target(request.pace, request.publication_times(assumed_time), request.capacity_terms()));
    wanted = cheapest_offers(scenario, offers, plan.target.provisioned_rollouts_per_s);
    RunBroadcast broadcast(scenario);
    plan.rollouts_per_s = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const RunOffer& offer = scenario.offers[wanted[i]];
      broadcast.add(receiver_of(scenario, offer, WorkerId{i + 1}));
      plan.rollouts_per_s += offer.offer.rollouts_per_s;
    }
    ECHO_TRY(broadcast.prepare(scenario.request.delta_bytes));
    const Duration t_b = broadcast.quorum_time() + scenario.request.fleet.install_time_expected;
    if (t_b <= assumed_time) break;
    assumed_time = t_b;
  }
  plan.broadcast_time = assumed_time;
  // The lag of so large a fleet is not computed; one step is assumed.
  plan.staleness_worst = scenario.request.staleness_worst ? scenario.request.staleness_worst(/*lag=*/1)
                                                          : scenario.request.staleness_budget;
  constexpr double kRounding = 1e-9;
  if (plan.rollouts_per_s >= plan.target.provisioned_rollouts_per_s * (1 - kRounding)) return plan;
  return fail(Code::kInfeasible, "plan", "at least {:.4g} rollouts/s are needed, and {} machines give {:.4g}",
              plan.target.provisioned_rollouts_per_s, wanted.size(), plan.rollouts_per_s);
}

// Predicts the share of time that the learner is idle with the offers `wanted`, with the scenario's true speeds and
// times instead of the plan's.
Result<std::optional<double>> predict_idle(const RunScenario& scenario, const std::vector<std::size_t>& wanted) {
  if (!scenario.request.predict_idle || wanted.empty() || wanted.size() > kPlannerWorkersMax)
    return std::optional<double>();
  PlanRequest request = scenario.request;
  request.pace.step_time = scenario.step_time;
  if (!scenario.step_seconds.empty())
    request.pace.step_time =
        from_seconds(std::accumulate(scenario.step_seconds.begin(), scenario.step_seconds.end(), 0.0) /
                     static_cast<double>(scenario.step_seconds.size()));
  request.pace.step_time +=
      from_seconds(scenario.step_s_per_token * mean_tokens(scenario) * request.pace.rollouts_per_step);
  request.fleet.install_time_expected = scenario.install_time.value_or(request.fleet.install_time_expected);
  const bool sends_snapshots = scenario.publication_form == PublicationForm::kSnapshot;
  Bytes payload = scenario.snapshot_bytes.value_or(request.full_bytes);
  if (!sends_snapshots && !scenario.delta_bytes.empty()) {  // their median size
    std::vector<Bytes> deltas = scenario.delta_bytes;
    const auto middle = deltas.begin() + static_cast<std::ptrdiff_t>(deltas.size() / 2);
    std::nth_element(deltas.begin(), middle, deltas.end());
    payload = *middle;
  }
  RunBroadcast broadcast(scenario);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    broadcast.add(receiver_of(scenario, scenario.offers[wanted[i]], WorkerId{i + 1}));
  ECHO_TRY(broadcast.prepare(payload));
  FleetPace fleet{.workers = {},
                  .links_busy = broadcast.first_completion(),  // then the learner has sent everything once
                  .groups_at_once = scenario.groups_at_once,
                  .work_ahead = scenario.work_ahead};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const RunOffer& offer = scenario.offers[wanted[i]];
    fleet.workers.push_back({.rollouts_per_s = offer.offer.rollouts_per_s * offer.rate_share,
                             .policy_arrival = scenario.encode_time + broadcast.time_of(WorkerId{i + 1})});
  }
  return std::optional(request.predict_idle(request, fleet));
}

}  // namespace

Receiver receiver_of(const RunScenario& scenario, const RunOffer& run_offer, WorkerId id) {
  const auto [up, down] = provisioner::links_of(run_offer.offer, scenario.request.fleet, scenario.request.paths);
  return {.id = id,
          .up = up,
          .down = down,
          .region = scenario.request.paths.regions.of(run_offer.offer.place),
          .reliability = run_offer.offer.reliability.value_or(1)};
}

double mean_tokens(const RunScenario& scenario) {
  // A fixed seed instead of the run's: the mean converts a worker's promised rollouts/s to tokens/s, and its speed must
  // not depend on the run's seed.
  Draws draws(/*seed=*/1, /*stream=*/41);
  double sum = 0;
  const double tokens_max = scenario.lease.tokens_max;
  for (int i = 0; i < kMeanSamples; ++i) {
    const double drawn =
        scenario.token_histogram ? draws.sample(*scenario.token_histogram) : draws.lognormal(scenario.tokens);
    sum += std::clamp(std::floor(drawn + 0.5), 1.0, tokens_max);
  }
  return sum / kMeanSamples;
}

Result<RunStart> plan_simulated_run(const RunScenario& scenario) {
  ECHO_TRY(check(scenario));
  RunStart start;
  std::vector<Offer> offers;
  std::unordered_map<std::string_view, std::size_t> index_by_id;  // of offers
  Draws random_prices(scenario.seed, kPriceStream);
  for (const RunOffer& run_offer : scenario.offers) {
    if (!index_by_id.emplace(run_offer.offer.id, offers.size()).second)
      return fail(Code::kInvalid, kOperation, "offer '{}' occurs twice", run_offer.offer.id);
    offers.push_back(run_offer.offer);
    if (scenario.offer_choice == OfferChoice::kRandom) {
      // Only the planner sees this price; the result has the real one. It is in proportion to the throughput, so that
      // the price per rollout, by which offers are chosen, is random.
      offers.back().gpu_usd_per_hour =
          run_offer.offer.rollouts_per_s * (1 + (kRandomPriceSpread - 1) * random_prices.uniform());
      offers.back().storage_usd_per_hour = 0;
      offers.back().bid_usd_per_hour_min.reset();
    }
  }
  const bool exceeds_planner = scenario.request.fleet.workers_max > kPlannerWorkersMax;
  auto plan = exceeds_planner ? plan_by_price(scenario, offers, start.wanted) : make_plan(scenario.request, offers);
  if (plan) {
    start.plan = std::move(*plan);
    // The offers chosen by make_plan(). A plan of plan_by_price() has no rows: `wanted` already has its offers.
    for (const PlanRow* row : start.plan.chosen()) start.wanted.push_back(index_by_id.at(row->offer.id));
  } else {
    if (plan.error().code != Code::kInfeasible) return std::move(plan).error();
    start.plan_error = plan.error().message();
    start.plan.request = scenario.request;
    // Without a plan, no broadcast time is known. These are the longest times that the fleet core plans for, because
    // with longer ones more workers hardly help.
    const CapacityTerms terms = scenario.request.capacity_terms();
    const PublicationTimes planned_times = half_of_longest_publication_times(scenario.request.pace, terms);
    ECHO_ASSIGN(start.plan.target, capacity_target(scenario.request.pace, planned_times, terms));
    start.wanted = cheapest_offers(scenario, offers, start.plan.target.provisioned_rollouts_per_s);
    start.plan.broadcast_time = planned_times.broadcast;
    Duration& install_time = start.plan.request.fleet.install_time_expected;
    install_time = std::min(install_time, planned_times.install);
    start.plan.staleness_worst = scenario.request.staleness_budget;
    start.plan.rollouts_per_s = 0;
    for (const std::size_t i : start.wanted) start.plan.rollouts_per_s += offers[i].rollouts_per_s;
  }
  if (!plan || scenario.offer_choice == OfferChoice::kRandom || exceeds_planner) {
    start.plan.usd_per_hour.expected = 0;
    for (const std::size_t i : start.wanted)
      start.plan.usd_per_hour.expected += scenario.offers[i].offer.usd_per_hour_known();
  }
  ECHO_ASSIGN(start.idle_predicted, predict_idle(scenario, start.wanted));
  // The fleet core will aim at the target by its rules, which may differ from the plan's.
  start.rules = provisioner::fleet_rules_of(start.plan);
  const FleetRules& rules = start.rules;
  ECHO_ASSIGN(const CapacityTarget target, capacity_target(rules.pace, rules.times, rules.capacity_terms()));
  start.rules_target = target.provisioned_rollouts_per_s;
  start.plan.rows.clear();  // not needed any more; they may be thousands
  start.plan.standby.clear();
  return start;
}

}  // namespace echoline::sim
