// The quality of plans on a market of 400 offers, against the optimum, the plain greedy set and random activation.
// Prints the table of docs/provisioning.md.
#include "market.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "provisioner/allocation.hpp"
#include "provisioner/eligibility.hpp"
#include "provisioner/plan_study.hpp"
#include "provisioner/renewal.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

// An 8B model: a delta of 250 MB every ten minutes, R = 512.
PlanRequest request() {
  PlanRequest r;
  r.fleet.provider = "none";  // of any
  r.pace = {512, 1, seconds(600)};
  r.staleness_budget = 3;
  r.delta_bytes = {250'000'000};
  r.full_bytes = {16'400'000'000};
  r.learner_up = BitRate::from_mbit_per_s(1000);
  r.chunk = {1 << 20};
  r.paths.delay_expected = std::chrono::milliseconds(40);
  r.run_time = std::chrono::hours(24);
  return r;
}

std::vector<Candidate> candidates_of(const PlanRequest& r, const std::vector<Offer>& offers) {
  std::vector<Candidate> pool;
  std::map<std::string, std::uint32_t> machines;
  for (const Offer& o : offers) {
    Candidate c{o.rollouts_per_s, *cost_of(r, o, 1).usd_per_hour()};
    c.machine = machines.emplace(o.host, static_cast<std::uint32_t>(machines.size() + 1)).first->second;
    c.gpus = 0;
    for (const int id : o.gpu_ids) c.gpus |= std::uint64_t{1} << id;
    pool.push_back(c);
  }
  return pool;
}

// The fewest first candidates of `order` that reach the target, without those that share a GPU with an earlier one.
std::vector<std::size_t> first_in_order(const std::vector<Candidate>& pool, const std::vector<std::size_t>& order,
                                        double target) {
  std::vector<std::size_t> chosen;
  std::map<std::uint32_t, std::uint64_t> used_gpus;  // by machine
  double rate = 0;
  for (const std::size_t i : order) {
    if (rate >= target) break;
    if (used_gpus[pool[i].machine] & pool[i].gpus) continue;
    used_gpus[pool[i].machine] |= pool[i].gpus;
    rate += pool[i].rollouts_per_s;
    chosen.push_back(i);
  }
  return chosen;
}

TEST(Market, WithinAHundredthOfTheOptimumAndNeverAboveThePlainGreedySet) {
  const std::vector<Offer> market = seeded_market(400, 400);
  const std::vector<Candidate> pool = candidates_of(request(), market);
  Random random(200);
  double worst = 0, sum = 0, prefix_worst = 0, prefix_sum = 0, drawn_sum = 0;
  int below_prefix = 0, optimal = 0, unproven = 0;
  constexpr int kPools = 200;
  for (int round = 0; round < kPools; ++round) {
    std::vector<Candidate> sub;
    double all = 0;
    for (int i = 0; i < 40; ++i) sub.push_back(pool[random.below(pool.size())]);
    std::map<std::uint32_t, std::uint32_t> renumbered;  // an offer that was drawn twice is on one machine twice
    for (Candidate& c : sub) {
      c.machine = renumbered.emplace(c.machine, static_cast<std::uint32_t>(renumbered.size() + 1)).first->second;
      all += c.rollouts_per_s;
    }
    const double target = all * (0.1 + 0.4 * random.uniform());
    const auto exact = allocate(sub, target);
    const auto& greedy = exact.best;
    const auto& prefix_usd_per_hour = exact.prefix_usd_per_hour;
    ASSERT_TRUE(greedy && prefix_usd_per_hour) << round;
    unproven += !exact.is_proven_best;
    const double above = greedy->usd_per_hour / exact.usd_per_hour_min - 1;
    EXPECT_LE(above, 0.01) << "pool " << round;
    EXPECT_LE(greedy->usd_per_hour, *prefix_usd_per_hour * (1 + 1e-12)) << "pool " << round;
    worst = std::max(worst, above), sum += above;
    const double prefix_above = *prefix_usd_per_hour / exact.best->usd_per_hour - 1;
    prefix_worst = std::max(prefix_worst, prefix_above), prefix_sum += prefix_above;
    below_prefix += greedy->usd_per_hour < *prefix_usd_per_hour * (1 - 1e-9);
    optimal += above < 1e-9;
    // For comparison, offers in random order until the target is reached: the mean cost of ten draws.
    double drawn = 0;
    for (int draw = 0; draw < 10; ++draw) {
      std::vector<std::size_t> order(sub.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
      for (const std::size_t i : first_in_order(sub, order, target)) drawn += sub[i].usd_per_hour / 10;
    }
    drawn_sum += drawn / exact.best->usd_per_hour - 1;
  }
  EXPECT_EQ(unproven, 0);
  EXPECT_GT(below_prefix, 50);
  EXPECT_GT(drawn_sum / kPools, prefix_sum / kPools);
  fmt::print("| set | above the optimum, mean | worst | optimal |\n|---|---|---|---|\n");
  fmt::print("| search with a bound | {:.2f} % | {:.2f} % | {} of {} |\n", 100 * sum / kPools, 100 * worst, optimal,
             kPools);
  fmt::print("| plain greedy prefix | {:.1f} % | {:.1f} % | |\n", 100 * prefix_sum / kPools, 100 * prefix_worst);
  fmt::print("| at random | {:.0f} % | | |\n", 100 * drawn_sum / kPools);
}

// With fleet.workers_max, the cheapest per rollout may be too slow together.
TEST(Market, WithALimitOnWorkersTheGapToTheBoundIsSmall) {
  fmt::print("| offers | at most | above the bound, mean | worst | proven | prefix above, mean | worst |\n");
  fmt::print("|---|---|---|---|---|---|---|\n");
  Random random(64);
  for (const auto& [offers, workers_max, pools] :
       {std::tuple<std::size_t, std::size_t, int>{40, 4, 200}, {40, 8, 200}, {1000, 16, 20}, {10'000, 64, 3}}) {
    const std::vector<Candidate> market = candidates_of(request(), seeded_market(offers, 4 * offers));
    double sum = 0, worst = 0, prefix_sum = 0, prefix_worst = 0;
    int proven = 0;
    for (int round = 0; round < pools; ++round) {
      std::vector<Candidate> pool;
      std::vector<double> rates;
      for (std::size_t i = 0; i < offers; ++i) {
        pool.push_back(market[random.below(market.size())]);
        pool.back().machine = 0;  // drawn offers may repeat
        rates.push_back(pool.back().rollouts_per_s);
      }
      std::sort(rates.rbegin(), rates.rend());
      const double most = std::accumulate(rates.begin(), rates.begin() + static_cast<long>(workers_max), 0.0);
      const double target = most * (0.3 + 0.5 * random.uniform());
      const auto search = allocate(pool, target, {.workers_max = workers_max});
      ASSERT_TRUE(search.best && search.prefix_usd_per_hour);
      const double above = search.best->usd_per_hour / search.usd_per_hour_min - 1;
      const double prefix_above = *search.prefix_usd_per_hour / search.usd_per_hour_min - 1;
      EXPECT_LE(above, 0.03);
      proven += search.is_proven_best;
      sum += above, worst = std::max(worst, above);
      prefix_sum += prefix_above, prefix_worst = std::max(prefix_worst, prefix_above);
    }
    EXPECT_TRUE(offers > 40 || proven == pools) << proven;
    fmt::print("| {} | {} | {:.2f} % | {:.2f} % | {} of {} | {:.1f} % | {:.1f} % |\n", offers, workers_max,
               100 * sum / pools, 100 * worst, proven, pools, 100 * prefix_sum / pools, 100 * prefix_worst);
  }
}

TEST(Market, ThePlanIsCheaperThanRandomActivationAtTheSameTarget) {
  const std::vector<Offer> market = seeded_market(400, 400);
  fmt::print("| step | target, rollouts/s | workers | plan, $/h | random, $/h | saved |\n|---|---|---|---|---|---|\n");
  for (const int step_s : {1200, 600, 300, 150}) {
    PlanRequest r = request();
    r.pace.step_time = seconds(step_s);
    const auto plan = make_plan(r, market);
    ASSERT_TRUE(plan) << plan.error().message();
    // The same target and topology policy, with offers drawn at random.
    Random random(static_cast<std::uint64_t>(step_s));
    double drawn = 0;
    constexpr int kDraws = 50;
    for (int draw = 0; draw < kDraws; ++draw) {
      std::vector<Candidate> pool = candidates_of(r, market);
      for (Candidate& c : pool) c.usd_per_hour = c.rollouts_per_s * random.uniform();  // an order that says nothing
      const double target = plan->target.provisioned_rollouts_per_s;
      const auto set = first_in_order(pool, by_unit_cost(pool), target);
      double rate = 0;
      for (const std::size_t i : set) rate += pool[i].rollouts_per_s;
      ASSERT_GE(rate, target);
      for (const std::size_t i : set) drawn += *cost_of(r, market[i], 1).usd_per_hour() / kDraws;
    }
    EXPECT_LT(plan->chosen_usd_per_hour, 0.8 * drawn) << step_s;
    EXPECT_LE(plan->chosen_usd_per_hour, plan->greedy_usd_per_hour * (1 + 1e-12));
    EXPECT_LE(plan->chosen_usd_per_hour, plan->lp_bound_usd_per_hour * 1.05);
    fmt::print("| {} s | {:.3g} | {} | {:.2f} | {:.2f} | {:.0f} % |\n", step_s, plan->target.provisioned_rollouts_per_s,
               plan->topology.size(), plan->chosen_usd_per_hour, drawn, 100 * (1 - plan->chosen_usd_per_hour / drawn));
  }
}

TEST(Market, ThousandsOfOffersArePlannedLikeFew) {
  // A hundred times the market, in which the first offers are the cheapest: the plan is the same.
  std::vector<Offer> market = seeded_market(400, 400);
  const auto few = make_plan(request(), market);
  ASSERT_TRUE(few);
  const std::vector<Offer> dear = seeded_market(401, 4000);
  for (Offer o : dear) {
    o.id += "x";
    o.host += "x";
    *o.gpu_usd_per_hour *= 40;
    market.push_back(o);
  }
  const auto many = make_plan(request(), market);
  ASSERT_TRUE(many);
  EXPECT_NEAR(many->usd_per_hour.expected, few->usd_per_hour.expected, 1e-9);
  EXPECT_EQ(many->rows.size(), 4400u);
  const auto json = many->to_json();
  EXPECT_EQ(json["offers"].size() + json["offers_left_out"].get<std::size_t>(), 4400u);
  const auto again = Plan::from_json(json);
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->to_json(), json);
}

TEST(Explain, NamesThePriceAtWhichAnOfferIsRented) {
  std::vector<Offer> market = seeded_market(7, 120);
  const auto plan = make_plan(request(), market);
  ASSERT_TRUE(plan);
  int asked = 0;
  for (std::size_t i = 0; i < market.size() && asked < 6; i += 7) {
    const auto e = explain_offer(*plan, market, market[i].id);
    ASSERT_TRUE(e);
    EXPECT_THAT(e->to_text(), HasSubstr(market[i].gpu));
    if (!e->rented_up_to_usd_per_hour) continue;
    ++asked;
    std::vector<Offer> other = market;
    other[i].gpu_usd_per_hour = *e->rented_up_to_usd_per_hour;
    EXPECT_TRUE(make_plan(request(), other)->row_of(market[i].id)->chosen) << e->to_text();
    if (e->row.chosen) {
      EXPECT_GE(*e->rented_up_to_usd_per_hour, *market[i].gpu_usd_per_hour * 0.999);
    } else {
      EXPECT_LT(*e->rented_up_to_usd_per_hour, *market[i].gpu_usd_per_hour);
    }
  }
  EXPECT_GT(asked, 2);
  const auto unknown = explain_offer(*plan, market, "a1x");
  EXPECT_EQ(unknown.error().code, Code::kNotFound);
  EXPECT_THAT(unknown.error().detail, HasSubstr("did you mean"));
}

TEST(Variations, NameChangesThatMakeAPlanFeasibleOrCheaper) {
  PlanRequest r = request();
  r.learner_up = BitRate::from_mbit_per_s(3);  // 250 MB take longer than a step of 600 s
  EXPECT_TRUE(make_plan(r, seeded_market(7, 120))) << "workers generate meanwhile";
  r.fleet.capacity_rule = CapacityRule::kEcho2;
  const auto rows = vary_plan(r, seeded_market(7, 120));
  EXPECT_FALSE(rows.front().plan);
  const auto is_feasible = [&](const std::string& change) {
    const auto it = std::find_if(rows.begin(), rows.end(), [&](const auto& v) { return v.change == change; });
    EXPECT_NE(it, rows.end()) << change;
    return it->plan.has_value();
  };
  EXPECT_FALSE(is_feasible("uplink 1.5 Mbit/s"));
  EXPECT_TRUE(is_feasible("uplink 6 Mbit/s"));
  EXPECT_TRUE(is_feasible("kappa 2, S 3"));
  EXPECT_FALSE(is_feasible("rents 25 % lower"));
  const std::string table = variations_table(rows);
  EXPECT_THAT(table, HasSubstr("no plan: "));
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  EXPECT_EQ(variations_json(rows).size(), rows.size());

  // The price falls with the capacity, and the predicted idle time rises.
  PlanRequest predicting = request();
  predicting.predict_idle = [](const PlanRequest& asked, const FleetPace& fleet) {
    double rate = 0;
    for (const FleetPace::Worker& worker : fleet.workers) rate += worker.rollouts_per_s;
    const double needed = asked.pace.rollouts_per_step / echoline::seconds(asked.pace.step_time);
    return std::max(0.0, 1 - rate / needed);
  };
  const auto curve = idle_curve(predicting, seeded_market(7, 120));
  ASSERT_GT(curve.size(), 5u);
  EXPECT_EQ(std::count_if(curve.begin(), curve.end(), [](const IdlePoint& p) { return p.share == 1; }), 1);
  for (std::size_t i = 1; i < curve.size(); ++i) {
    EXPECT_GE(curve[i].usd_per_hour, curve[i - 1].usd_per_hour);
    EXPECT_LE(*curve[i].idle_fraction, *curve[i - 1].idle_fraction + 1e-9);
  }
  EXPECT_GT(*curve.front().idle_fraction, 0.4);
  EXPECT_EQ(*curve.back().idle_fraction, 0);
  EXPECT_GT(*curve.front().usd_run, 0);
  EXPECT_EQ(idle_curve_json(curve).size(), curve.size());
  EXPECT_THAT(idle_curve_table(curve), HasSubstr("the plan"));
  std::istringstream curve_lines(idle_curve_table(curve));
  for (std::string line; std::getline(curve_lines, line);) EXPECT_LE(line.size(), 80u) << line;
  const auto predicted = make_plan(predicting, seeded_market(7, 120));
  ASSERT_TRUE(predicted);
  EXPECT_THAT(predicted->to_table(), HasSubstr("learner: waits 0.0 % of its time"));
  const auto reread = Plan::from_json(predicted->to_json());
  ASSERT_TRUE(reread) << reread.error().message();
  EXPECT_EQ(reread->idle_fraction, predicted->idle_fraction);

  const auto cheaper = vary_plan(request(), seeded_market(7, 120));
  ASSERT_TRUE(cheaper.front().plan);
  for (const Variation& v : cheaper)
    if (v.change == "bids" || v.change == "rents 25 % lower") {
      EXPECT_LT(v.plan->usd_per_hour.expected, cheaper.front().plan->usd_per_hour.expected);
    }
}

TEST(Renew, KeepsRemainingOffersAndReplacesGoneOrDearOnes) {
  std::vector<Offer> market = seeded_market(7, 200);
  const auto plan = make_plan(request(), market);
  ASSERT_TRUE(plan);
  ASSERT_GE(plan->topology.size(), 5u);
  const auto same = renew_plan(*plan, market, 0);
  ASSERT_TRUE(same) << same.error().message();
  EXPECT_TRUE(same->changes.empty());
  EXPECT_NEAR(same->plan.usd_per_hour.expected, plan->usd_per_hour.expected, 1e-9);

  const std::string gone = plan->chosen()[0]->offer.id, dear = plan->chosen()[1]->offer.id,
                    dearer = plan->chosen()[2]->offer.id;
  std::erase_if(market, [&](const Offer& o) { return o.id == gone; });
  for (Offer& o : market) {
    if (o.id == dear) *o.gpu_usd_per_hour *= 3;
    if (o.id == dearer) *o.gpu_usd_per_hour *= 1.02;
  }
  const auto renewed = renew_plan(*plan, market, 0.2);
  ASSERT_TRUE(renewed) << renewed.error().message();
  for (const std::string& id : {gone, dear}) {
    const PlanRow* row = renewed->plan.row_of(id);
    EXPECT_TRUE(!row || !row->chosen) << id;
    EXPECT_THAT(renewed->changes, testing::Contains(testing::StartsWith(id + " ")));
  }
  EXPECT_THAT(renewed->changes, testing::Contains(HasSubstr("is rented instead")));
  for (const PlanRow* row : plan->chosen())
    if (row->offer.id != gone && row->offer.id != dear) {
      EXPECT_TRUE(renewed->plan.row_of(row->offer.id)->chosen) << row->offer.id;
    }
  EXPECT_GE(renewed->plan.rollouts_per_s, renewed->plan.target.provisioned_rollouts_per_s * (1 - 1e-9));
  for (Offer& o : market) *o.gpu_usd_per_hour *= 2;
  const auto doubled = renew_plan(*plan, market, 0.2);
  ASSERT_FALSE(doubled);
  EXPECT_EQ(doubled.error().code, Code::kInfeasible);
  EXPECT_THAT(doubled.error().detail, testing::HasSubstr("; " + gone + " is not offered any more; "));
}

}  // namespace
}  // namespace echoline::provisioner
