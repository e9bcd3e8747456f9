// The predicted idle share where it can be worked out by hand. tests/study/idle_prediction_test.cpp compares it with
// simulated runs.
#include "replay_buffer/idle_prediction.hpp"

#include <gtest/gtest.h>

namespace echoline::replay_buffer {
namespace {

// Steps of 10 s on 64 groups of 8; `workers` equal workers that make `groups_per_s` groups/s together.
IdleQuestion question(std::size_t workers, double groups_per_s, std::uint32_t budget, std::uint32_t lookahead) {
  IdleQuestion q;
  q.pacing = {.staleness = {.budget = budget, .publish_every = 1, .lookahead = lookahead},
              .trajectories_per_step = 512,
              .steps_total = std::nullopt,
              .group_size = 8};
  q.step_s = 10;
  q.workers.assign(workers, {.group_s = static_cast<double>(workers) / groups_per_s, .policy_s = 0});
  return q;
}

double idle(const IdleQuestion& q) { return predict_idle(q).idle_fraction; }

TEST(PredictIdle, WithoutALookaheadGenerationAndTrainingTakeTurns) {
  // 64 groups at 6.4 a second: 10 s to generate, 10 s to train.
  EXPECT_NEAR(idle(question(8, 6.4, 1, 0)), 0.5, 0.01);
  EXPECT_NEAR(idle(question(8, 12.8, 1, 0)), 1 / 3.0, 0.01);
  EXPECT_NEAR(idle(question(8, 12.8, 0, 0)), 1 / 3.0, 0.01);
  EXPECT_NEAR(predict_idle(question(8, 6.4, 1, 0)).step_s, 20, 0.2);
}

TEST(PredictIdle, WithALookaheadOnlyCapacityCounts) {
  for (const std::uint32_t lookahead : {1u, 2u, 3u}) {
    EXPECT_NEAR(idle(question(8, 7.5, 3, lookahead)), 0, 0.005) << lookahead;
    EXPECT_NEAR(idle(question(8, 3.2, 3, lookahead)), 0.5, 0.01) << lookahead;
  }
  EXPECT_EQ(idle(question(8, 3.2, 3, 1)), idle(question(8, 3.2, 3, 1)));
}

// With S = 1, workers with the version before get no work, so a broadcast of 4 s leaves 6 s of each step.
TEST(PredictIdle, ABroadcastCountsAsFarAsTheBudgetDemands) {
  IdleQuestion q = question(8, 6.4 / 0.9, 1, 1);
  EXPECT_LT(idle(q), 0.02);
  for (PredictedWorker& worker : q.workers) worker.policy_s = 4;
  // The batch needs 9 s. While the learner waits, the next policy is already on its way: 4 s - wait + 9 s = 10 s +
  // wait.
  EXPECT_NEAR(idle(q), 1 - 10 / 11.5, 0.02);
  q.pacing.staleness.budget = 2;
  EXPECT_LT(idle(q), 0.005);
  q.link_s = 25;  // longer than two periods: policies go out together, and age
  EXPECT_GT(idle(q), 0.1);
  q.pacing.staleness.budget = 5;
  EXPECT_LT(idle(q), 0.005);
}

TEST(PredictIdle, PausesAndLostWorkCostCapacity) {
  IdleQuestion q = question(8, 6.4 / 0.9, 3, 3);
  EXPECT_LT(idle(q), 0.005);
  q.install_s = 3;  // of 10 s; 9 are needed
  EXPECT_NEAR(idle(q), 1 - 10 / (3 + 9.0), 0.02);
  q.install_s = 0;
  for (PredictedWorker& worker : q.workers) worker.policy_s = 4;
  q.stops_during_broadcast = true;  // ECHO-2: R/M + T_b
  EXPECT_NEAR(idle(q), 1 - 10 / (4 + 9.0), 0.02);
  q.stops_during_broadcast = false;
  EXPECT_LT(idle(q), 0.005);
  q.groups_in_progress = GroupsInProgress::kFinish;
  EXPECT_LT(idle(q), 0.01);
  q.workers.assign(43, {.group_s = 6, .policy_s = 4});
  EXPECT_LT(idle(q), 0.02);
  q.groups_in_progress = GroupsInProgress::kAbort;  // of each worker's 10 s, 4 s are lost with its second group
  EXPECT_GT(idle(q), 0.15);
}

TEST(PredictIdle, AFleetThatCannotFinishABatchWaitsAllTheTime) {
  IdleQuestion q = question(1, 1e-6, 0, 0);
  q.lease.limits.max = std::chrono::hours(1);
  EXPECT_GT(idle(q), 0.999);
}

}  // namespace
}  // namespace echoline::replay_buffer
