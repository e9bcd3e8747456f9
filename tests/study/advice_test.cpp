// The search for better settings of a simulated run.
#include "study/advice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.hpp"
#include "study/sim_run_config.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::study {
namespace {

using testing::HasSubstr;
using testing::Pair;

// A fleet that is too large, under a topology and a publication period that cost too much.
constexpr const char* kWasteful = R"(run: {name: w, steps: 80}
rollout: {prompts_per_step: 16, group_size: 4, response_tokens_max: 1000}
staleness: {budget: 4, lookahead: 2}
learner: {usd_per_hour: 0.5}
network: {uplink: 50 Mbit/s, delay_expected: 5 ms, topology: star}
fleet: {step_time_expected: 20 s, headroom: 0.6}
simulation:
  parameters: 1e8
  density: 0.05
  boot: 60 s
  tokens: {median: 100, p95: 400}
  market:
    - {region: near, count: 12, usd_per_hour: 0.2, usd_per_hour_p95: 0.3, tokens_per_s: 100, tokens_per_s_p95: 200,
       up: 50 Mbit/s, down: 50 Mbit/s, upload_usd_per_gb: 0.01, download_usd_per_gb: 0.01}
    - {region: far, count: 12, usd_per_hour: 0.1, usd_per_hour_p95: 0.3, tokens_per_s: 100, up: 50 Mbit/s,
       down: 50 Mbit/s, upload_usd_per_gb: 0.02, download_usd_per_gb: 0.02}
  churn: {per_hour: 0.5}
)";

class AdviceTest : public testing::Test {
 protected:
  AdviceTest() {
    arguments.scenario = (folder.path() / "w.yaml").string();
    EXPECT_TRUE(write_file_atomic(arguments.scenario, kWasteful));
    arguments.threads = 2;
  }
  Advice advice_for(const AdviceArguments& wanted) {
    const auto advice = advise(wanted);
    if (!advice) ADD_FAILURE() << advice.error().message();
    return advice ? *advice : Advice{};
  }
  // The advice for the file as it is, which several tests need.
  const Advice& cheapest() {
    static const Advice advice = advice_for(arguments);
    return advice;
  }
  static std::uint64_t number(const AdvisedRun& run, const std::string& key) {
    for (const auto& [name, value] : run.settings)
      if (name == key) return std::stoull(value);
    ADD_FAILURE() << key;
    return 0;
  }

  overlay::TemporaryFolder folder;
  AdviceArguments arguments;
};

TEST_F(AdviceTest, IsCheaperThanAWastefulRunFileAndSaysWhatDecides) {
  const Advice& advice = cheapest();
  ASSERT_EQ(advice.best.size(), kAdvisedMax);
  EXPECT_TRUE(advice.within_limits);
  EXPECT_LT(advice.best.front().figures.usd, 0.85 * advice.given.figures.usd);
  for (std::size_t i = 0; i < advice.best.size(); ++i) {
    const AdviceFigures& figures = advice.best[i].figures;
    EXPECT_TRUE(figures.possible);
    EXPECT_LE(number(advice.best[i], "staleness.budget"), 4u);
    EXPECT_LE(figures.usd_min, figures.usd);
    EXPECT_GE(figures.usd_max, figures.usd);
    if (i == 0) continue;
    EXPECT_GT(figures.usd, advice.best[i - 1].figures.usd) << "or the two are the same run";
  }
  const KeyValues changes = advised_changes(advice, advice.best.front());
  ASSERT_EQ(advice.effects.size(), changes.size());
  EXPECT_GT(advice.effects.front().with_given.usd, 1.05 * advice.best.front().figures.usd);
  for (const AdviceEffect& effect : advice.effects)
    EXPECT_THAT(changes, testing::Contains(Pair(effect.key, effect.advised)));
}

TEST_F(AdviceTest, FiguresAreThoseOfTheAdvisedRunFile) {
  const Advice& advice = cheapest();
  const auto yaml = advised_run_file(arguments, advised_changes(advice, advice.best.front()));
  ASSERT_TRUE(yaml.has_value()) << yaml.error().message();
  std::vector<double> usd;
  for (std::size_t i = 0; i < kAdviceSeeds; ++i) {
    const auto run =
        load_sim_run(ConfigFile::parse(*yaml, "a.yaml"), {{"simulation.seed", std::to_string(advice.seed + i)}});
    ASSERT_TRUE(run.has_value()) << run.error().message();
    const auto result = sim::simulate_run(run->scenario);
    ASSERT_TRUE(result.has_value());
    usd.push_back(result->usd_fleet + result->usd_learner);
  }
  const AdviceFigures& figures = advice.best.front().figures;
  EXPECT_DOUBLE_EQ(figures.usd_min, std::ranges::min(usd));
  EXPECT_DOUBLE_EQ(figures.usd_max, std::ranges::max(usd));
  EXPECT_NEAR(figures.usd, (usd[0] + usd[1] + usd[2]) / 3, 1e-9);
}

TEST_F(AdviceTest, DoesNotDependOnTheNumberOfThreads) {
  const std::string with_two = advice_json(cheapest()).dump();
  arguments.threads = 1;
  EXPECT_EQ(advice_json(advice_for(arguments)).dump(), with_two);
}

TEST_F(AdviceTest, IsNeverWorseThanTheRunFile) {
  arguments.overrides = advised_changes(cheapest(), cheapest().best.front());  // which are hard to improve
  for (const AdviceAim aim : {AdviceAim::kUsd, AdviceAim::kHours}) {
    arguments.aim = aim;
    const Advice advice = advice_for(arguments);
    const AdviceFigures &best = advice.best.front().figures, &given = advice.given.figures;
    EXPECT_LE(aim == AdviceAim::kUsd ? best.usd : best.hours, aim == AdviceAim::kUsd ? given.usd : given.hours);
  }
}

TEST_F(AdviceTest, KeepsLimitsInEverySeed) {
  const double least_usd_max = cheapest().best.front().figures.usd_max;
  arguments.aim = AdviceAim::kHours;
  const double fastest_usd_max = advice_for(arguments).best.front().figures.usd_max;
  ASSERT_LT(least_usd_max, fastest_usd_max);
  arguments.usd_max = (least_usd_max + fastest_usd_max) / 2;
  const Advice limited = advice_for(arguments);
  EXPECT_TRUE(limited.within_limits);
  EXPECT_LE(limited.best.front().figures.usd_max, *arguments.usd_max);
}

TEST_F(AdviceTest, WithoutAWayToKeepTheLimitsTheNearestComesFirst) {
  arguments.aim = AdviceAim::kHours;
  arguments.usd_max = 0.01;
  const Advice advice = advice_for(arguments);
  EXPECT_FALSE(advice.within_limits);
  ASSERT_FALSE(advice.best.empty());
  EXPECT_LT(advice.best.front().figures.usd_max, advice.given.figures.usd_max);
}

TEST_F(AdviceTest, TheStalenessBudgetHasTheGivenLimit) {
  for (const std::uint32_t budget_max : {2u, 8u}) {
    arguments.staleness_budget_max = budget_max;
    const Advice advice = advice_for(arguments);
    EXPECT_EQ(number(advice.given, "staleness.budget"), 4u);
    for (const AdvisedRun& run : advice.best) EXPECT_LE(number(run, "staleness.budget"), budget_max);
  }
}

TEST_F(AdviceTest, ErrorsNameTheFileAndTheKey) {
  arguments.overrides = {{"fleet.spare", "1"}};
  const auto misspelt = advise(arguments);
  ASSERT_FALSE(misspelt.has_value());
  EXPECT_THAT(misspelt.error().message(), HasSubstr("fleet.spare"));
  arguments.overrides = {};
  EXPECT_TRUE(write_file_atomic(arguments.scenario, "run: {name: w, steps: -1}\n"));
  const auto wrong = advise(arguments);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_EQ(wrong.error().code, Code::kInvalid);
  EXPECT_THAT(wrong.error().message(), HasSubstr("w.yaml:1:"));
}

TEST_F(AdviceTest, AMarketThatIsTooSmallIsInfeasible) {
  arguments.overrides = {{"fleet.workers_max", "1"}};
  const auto advice = advise(arguments);
  ASSERT_FALSE(advice.has_value());
  EXPECT_EQ(advice.error().code, Code::kInfeasible);
}

// The start takes 100 s and $5 and counts once, the steps after it 10 s and $1 each.
TEST(AdviceFigures, TheStartOfAShortRunCountsOnce) {
  sim::RunResult result;
  result.ended = "completed";
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const double steps = static_cast<double>(step);
    sim::SimStep row;
    row.step = step;
    row.at_s = 100 + 10 * steps;
    row.usd = 5 + steps;
    row.wait_s = step == 1 ? 100 : 1;
    row.train_s = 9;
    row.staleness = {{1, 90}, {3, 10}};
    result.by_step.push_back(row);
  }
  result.wall_s = 300;
  result.usd_fleet = 20;
  result.usd_learner = 5;
  const AdviceFigures figures = advice_figures(result, 200);
  EXPECT_TRUE(figures.possible);
  EXPECT_DOUBLE_EQ(figures.usd, 205);
  EXPECT_DOUBLE_EQ(figures.hours * 3600, 2100);
  EXPECT_DOUBLE_EQ(figures.idle_fraction, 0.1);
  EXPECT_DOUBLE_EQ(figures.staleness_mean, 1.2);
  EXPECT_EQ(figures.staleness_p95, 3u);
  EXPECT_DOUBLE_EQ(advice_figures(result, 20).usd, 25);  // the whole run
}

TEST_F(AdviceTest, AnEighthOfARunTellsItsCostAndTime) {
  const auto figures_of = [&](const std::string& steps) {
    const auto run = load_sim_run(ConfigFile::load(arguments.scenario), {{"run.steps", steps}});
    EXPECT_TRUE(run.has_value());
    const auto result = sim::simulate_run(run->scenario);
    EXPECT_TRUE(result.has_value());
    return advice_figures(*result, 400);
  };
  const AdviceFigures whole = figures_of("400"), part = figures_of("50");
  EXPECT_NEAR(part.usd, whole.usd, 0.05 * whole.usd);
  EXPECT_NEAR(part.hours, whole.hours, 0.05 * whole.hours);
}

}  // namespace
}  // namespace echoline::study
