// The predicted idle share of the learner against whole simulated runs, which lease by the code of real runs. Prints
// the table of docs/plan.md.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "study/sim_run_config.hpp"

namespace echoline::study {
namespace {

struct Pacing {
  int budget, lookahead, publish_every;
};
struct World {
  int machines;
  double density;  // of the deltas: 0.1 is 70 MB, which a machine receives in 11 s or more
  int speed_p95;   // tokens/s; the median is 200
  int tokens_p95;  // of responses; the median is 100
  const char* install;
};

// R = 512 in steps of 60 s; a machine of 200 tokens/s makes 2 rollouts/s or fewer.
std::string scenario(const Pacing& pacing, const World& world) {
  return fmt::format(R"(run: {{name: t, steps: 70}}
rollout: {{prompts_per_step: 64, group_size: 8, response_tokens_max: 1000}}
staleness: {{budget: {}, lookahead: {}, publish_every: {}}}
network: {{uplink: 200 Mbit/s, delay_expected: 5 ms}}
fleet: {{step_time_expected: 60 s, headroom: 0.2, install_time_expected: {}}}
simulation:
  parameters: 1e9
  density: {}
  tokens: {{median: 100, p95: {}}}
  boot: 5 s
  market:
    - {{count: {}, usd_per_hour: 0.2, tokens_per_s: 200, tokens_per_s_p95: {}, up: 50 Mbit/s, down: 50 Mbit/s}}
)",
                     pacing.budget, pacing.lookahead, pacing.publish_every, world.install, world.density,
                     world.tokens_p95, world.machines, world.speed_p95);
}

TEST(IdlePrediction, AgreesWithSimulatedRuns) {
  const Pacing pacings[] = {{0, 0, 1}, {1, 0, 1}, {1, 1, 1}, {2, 1, 1}, {2, 2, 1}, {3, 1, 1},
                            {3, 3, 1}, {6, 6, 1}, {2, 0, 2}, {3, 2, 2}, {3, 3, 2}, {5, 2, 4}};
  const World worlds[] = {
      {3, 0.02, 201, 101, "0 s"}, {6, 0.2, 320, 101, "2 s"}, {8, 0.5, 320, 250, "0 s"}, {4, 0.5, 320, 250, "1 s"}};
  fmt::print(
      "| S | lookahead | kappa | machines | MB | predicted | simulated | difference |\n"
      "|---|---|---|---|---|---|---|---|\n");
  double worst = 0;
  for (const Pacing& pacing : pacings)
    for (const World& world : worlds) {
      auto run = load_sim_run(ConfigFile::parse(scenario(pacing, world), "s.yaml"));
      ASSERT_TRUE(run) << run.error().message();
      const auto result = sim::simulate_run(run->scenario);
      ASSERT_TRUE(result) << result.error().message();
      ASSERT_EQ(result->ended, "completed");
      ASSERT_TRUE(result->idle_predicted);
      double waited_s = 0, all_s = 0;
      for (const sim::SimStep& step : result->by_step)
        if (step.step > 10) waited_s += step.wait_s, all_s += step.wait_s + step.train_s;
      const double idle = waited_s / all_s, difference = *result->idle_predicted - idle;
      worst = std::max(worst, std::abs(difference));
      EXPECT_LE(std::abs(difference), 0.02) << scenario(pacing, world);
      if (result->plan.idle_fraction) {
        EXPECT_NEAR(*result->plan.idle_fraction, *result->idle_predicted, 0.01) << "the plan has the true values";
      }
      fmt::print("| {} | {} | {} | {} | {:.0f} | {:.3f} | {:.3f} | {:+.3f} |\n", pacing.budget, pacing.lookahead,
                 pacing.publish_every, result->machines_planned, world.density * 700, *result->idle_predicted, idle,
                 difference);
    }
  fmt::print("worst: {:.3f}\n", worst);
}

}  // namespace
}  // namespace echoline::study
