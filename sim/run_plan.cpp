#include "sim/run_plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace echoline::sim {
namespace {

using namespace provisioner;

constexpr std::string_view kOperation = "simulate a run";
constexpr int kDrawn = 20'000;  // responses from which the mean is taken
constexpr double kRandomSpread = 1000;

Status check(const RunScenario& s) {
  const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
  if (s.offers.empty()) return invalid("there is nothing to rent");
  if (s.steps == 0 || s.prompts_per_step == 0 || s.group_size == 0) return invalid("steps, prompts and rollouts must be positive");
  if (s.full_bytes.count == 0) return invalid("the policy has no bytes");
  if (!s.token_histogram && !(s.tokens.median >= 1)) return invalid("a response has at least one token");
  if (s.token_histogram && (s.token_histogram->values.empty() || !(s.token_histogram->until.back() > 0)))
    return invalid("the histogram of lengths is empty");
  if (s.groups_at_once == 0) return invalid("a worker holds at least one group");
  if (s.regions.empty() || (!s.delays.empty() && s.delays.size() != s.regions.size())) return invalid("delays are not by region");
  for (const RunOffer& o : s.offers)
    if (o.region >= s.regions.size() || !(o.rate_share > 0)) return invalid("an offer is of no region, or does nothing");
  return ok();
}

}  // namespace

double mean_tokens(const RunScenario& s) {
  Draws draws(1, 41);  // the same for every seed: what machines promise does not depend on it
  double sum = 0;
  const double most = s.lease.tokens_max;
  for (int i = 0; i < kDrawn; ++i)
    sum += std::clamp(std::floor((s.token_histogram ? draws.of(*s.token_histogram) : draws.lognormal(s.tokens)) + 0.5), 1.0, most);
  return sum / kDrawn;
}

Result<RunStart> plan_simulated_run(const RunScenario& s) {
  ECHO_TRY(check(s));
  RunStart start;
  std::vector<Offer> offers;
  std::unordered_map<std::string_view, std::size_t> index;
  Draws shuffled(s.seed, 23);
  for (const RunOffer& o : s.offers) {
    if (!index.emplace(o.offer.id, offers.size()).second)
      return fail(Code::kInvalid, kOperation, "offer '{}' is there twice", o.offer.id);
    offers.push_back(o.offer);
    if (s.activation == Activation::kRandom) {  // chosen by chance, paid for as it is
      offers.back().gpu_usd_per_hour = o.offer.rollouts_per_s * (1 + (kRandomSpread - 1) * shuffled.uniform());
      offers.back().storage_usd_per_hour = 0;
      offers.back().bid_usd_per_hour_min.reset();
    }
  }
  auto plan = make_plan(s.request, offers);
  FleetRules& rules = start.rules;
  rules.pace = s.request.pace;
  rules.payload = s.request.delta_bytes;
  rules.headroom = s.request.headroom;
  rules.group_size = s.request.group_size;
  rules.machines_max = s.request.workers_max;
  rules.per_host_max = s.request.per_host_max;
  rules.usd_per_hour_max = s.request.budget_usd_per_hour;
  rules.usd_max = s.request.budget_usd;
  rules.boot_max = s.request.boot_max;
  rules.stalled_after = s.stalled_after;
  rules.replace_lost = s.replace_lost;
  const Duration period = s.request.pace.publish_every * s.request.pace.step_time;
  if (plan) {
    start.plan = std::move(*plan);
    rules.broadcast_time = start.plan.broadcast_time;
    for (const PlanRow* row : start.plan.chosen()) start.wanted.push_back(index.at(row->offer.id));
    if (s.activation == Activation::kRandom) {
      start.plan.usd_per_hour.expected = 0;
      for (const std::size_t i : start.wanted) start.plan.usd_per_hour.expected += s.offers[i].offer.usd_per_hour_known();
    }
  } else {
    if (plan.error().code != Code::kInfeasible) return std::move(plan).error();
    start.trouble = plan.error().message();
    start.plan.request = s.request;
    std::vector<std::size_t> order(offers.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto unit = [&](std::size_t i) { return offers[i].usd_per_hour_known() / std::max(offers[i].rollouts_per_s, 1e-12); };
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return unit(a) < unit(b); });
    double rate = 0, usd = 0;
    ECHO_ASSIGN(start.plan.target, capacity_target(s.request.pace, period / 2, s.request.headroom));
    for (const std::size_t i : order) {
      const double price = s.offers[i].offer.usd_per_hour_known();
      if (start.wanted.size() == s.request.workers_max || rate >= start.plan.target.provisioned_rollouts_per_s) break;
      if (!(offers[i].rollouts_per_s > 0) || (s.request.budget_usd_per_hour && usd + price > *s.request.budget_usd_per_hour)) continue;
      start.wanted.push_back(i);
      rate += offers[i].rollouts_per_s;
      usd += price;
    }
    start.plan.rollouts_per_s = rate;
    start.plan.usd_per_hour.expected = usd;
    start.plan.broadcast_time = rules.broadcast_time = period / 2;  // the most that the core plans for
    start.plan.staleness_worst = s.request.staleness_budget;
  }
  ECHO_ASSIGN(const CapacityTarget target, capacity_target(rules.pace, rules.broadcast_time, rules.headroom));
  start.rules_target = target.provisioned_rollouts_per_s;
  start.plan.rows.clear();  // of thousands of offers, and nobody asks any more
  start.plan.standby.clear();
  return start;
}

}  // namespace echoline::sim
