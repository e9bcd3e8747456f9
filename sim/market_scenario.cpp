// Draws a simulated market: its offers and hosts, the plan, and the rules of the run.
#include <algorithm>
#include <map>

#include "provisioner/allocation.hpp"
#include "sim/market_parts.hpp"

namespace echoline::sim {

using namespace provisioner;
using std::chrono::seconds;  // echoline::seconds() is the number of seconds of a duration

MarketScenario draw_scenario(MarketDraws& draws, MarketDraws& queue_draws) {
  MarketScenario scenario;
  FleetRules& rules = scenario.rules;
  std::vector<MarketHost>& hosts = scenario.hosts;
  const bool without_trouble = draws.below(8) == 0;  // one seed in eight
  scenario.without_trouble = without_trouble;
  rules.pace = {.rollouts_per_step = 100,
                .publish_every = static_cast<int>(draws.between(1, 3)),
                .step_time = seconds(draws.between(2, 12) * 5)};  // whole ticks
  rules.times.broadcast =
      from_seconds(draws.real_between(0, 0.4) * rules.pace.publish_every * echoline::seconds(rules.pace.step_time));
  rules.times.install = rules.times.broadcast / draws.between(1, 8);
  rules.fleet.capacity_rule = draws.chance(0.3) ? CapacityRule::kEcho2 : CapacityRule::kOverlap;
  if (draws.chance(0.5)) rules.staleness_budget = rules.pace.publish_every + static_cast<int>(draws.between(1, 4));
  rules.fleet.headroom = draws.chance(0.2) ? 0 : draws.real_between(0.02, 0.3);
  rules.group_size = 4;
  rules.fleet.join_timeout = rules.fleet.queue_timeout = kBootMax;
  // In half of the markets, the provider takes only a few start requests at a time.
  if (queue_draws.below(2)) rules.starts_at_once["cloud"] = 2 + queue_draws.below(6);
  rules.fleet.away_max = kAwayMax;
  rules.fleet.workers_max = static_cast<std::size_t>(draws.between(8, 48));
  const double target = capacity_target(rules.pace, rules.times, rules.capacity_terms())->provisioned_rollouts_per_s;
  const std::uint64_t planned_machines = draws.between(1, 12);
  const auto offer_count =
      static_cast<std::size_t>(draws.between(4, 40) + 2 * static_cast<std::int64_t>(planned_machines));
  for (std::size_t i = 0; i < offer_count; ++i) {
    MarketHost host;
    // One offer in five is for host i - 1, which may have offer i - 1 too.
    host.offer = {.id = fmt::format("o{}", i),
                  .provider = "cloud",
                  .host = draws.chance(0.2) && i > 0 ? fmt::format("h{}", i - 1) : fmt::format("h{}", i),
                  .rollouts_per_s = draws.real_between(0.6, 1.8) * target / static_cast<double>(planned_machines),
                  .usd_per_hour = draws.real_between(0.05, 1),
                  .traffic_usd_per_hour = draws.real_between(0, 0.05)};
    host.honesty =
        !without_trouble && draws.chance(0.2) ? draws.real_between(0.05, 0.9) : draws.real_between(0.99, 1.01);
    host.refusal_probability = without_trouble ? 0 : draws.chance(0.2) ? draws.real_between(0.3, 1) : 0.05;
    host.never_joins = !without_trouble && draws.chance(0.1);
    hosts.push_back(host);
  }
  // The plan takes at most one offer of each host.
  std::map<std::string, std::size_t> first_offers;  // by host
  std::vector<Candidate> pool;
  std::vector<std::size_t> pool_offers;  // of each candidate in `pool`, its index in hosts
  for (std::size_t i = 0; i < offer_count; ++i)
    if (first_offers.emplace(hosts[i].offer.host, i).second) {
      pool_offers.push_back(i);
      pool.push_back({hosts[i].offer.rollouts_per_s, hosts[i].offer.all_usd_per_hour()});
    }
  const auto plan = allocate(pool, target, {.workers_max = rules.fleet.workers_max}).best;
  double cost = 0;
  // If no set reaches the target, all offers of the pool are wanted.
  for (std::size_t i = 0; i < pool_offers.size(); ++i)
    if (!plan || std::count(plan->chosen.begin(), plan->chosen.end(), i) > 0) {
      scenario.wanted_offers.push_back(hosts[pool_offers[i]].offer.id);
      cost += pool[i].usd_per_hour;
    }
  if (draws.chance(0.5)) rules.fleet.usd_per_hour_max = cost * draws.real_between(1, 3);
  if (draws.chance(0.3)) rules.fleet.usd_max = cost * draws.real_between(0.3, 2);
  scenario.true_step_time = rules.pace.step_time;
  if (!without_trouble) {
    const Duration drawn = from_seconds(echoline::seconds(rules.pace.step_time) * draws.real_between(0.8, 1.5));
    scenario.true_step_time = std::max<Duration>(kTickInterval, drawn / kTickInterval * kTickInterval);  // whole ticks
  }
  scenario.crash_probability = without_trouble ? 0 : draws.real_between(0, 0.05);
  scenario.text = fmt::format(
      "{} offers, {} planned for {:.4g} rollouts/s, T {}, T_b {}, headroom {:.2f}, at most {} machines, ${} an hour, "
      "${} in all{}",
      offer_count, scenario.wanted_offers.size(), target, to_text(rules.pace.step_time), to_text(rules.times.broadcast),
      rules.fleet.headroom, rules.fleet.workers_max,
      rules.fleet.usd_per_hour_max ? fmt::format("{:.3f}", *rules.fleet.usd_per_hour_max) : "any",
      rules.fleet.usd_max ? fmt::format("{:.3f}", *rules.fleet.usd_max) : "any", without_trouble ? ", no trouble" : "");
  return scenario;
}

}  // namespace echoline::sim
