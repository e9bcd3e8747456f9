// The ledger's rules: pacing, stranded work, lease length, acceptance, shares and failures.
#include "replay_buffer/rules.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace echoline::replay_buffer {
namespace {

// Pacing with S = budget, kappa = 1, L = lookahead and R = trajectories_per_step.
Pacing pacing_of(std::uint32_t budget, std::uint32_t lookahead, std::uint32_t trajectories_per_step) {
  return {.staleness = {.budget = budget, .publish_every = 1, .lookahead = lookahead},
          .trajectories_per_step = trajectories_per_step};
}

TEST(Admission, StepMinusVersionAtMostTheBudget) {
  EXPECT_TRUE(admissible(7, Version{4}, 3));
  EXPECT_FALSE(admissible(8, Version{4}, 3));
  EXPECT_TRUE(admissible(4, Version{4}, 0));
  EXPECT_TRUE(admissible(3, Version{4}, 0));  // newer than the step, after a rollback
  EXPECT_FALSE(admissible(5, Version{4}, 0));
}

TEST(Pacing, FollowsTheFormula) {
  const Pacing pacing = pacing_of(3, 3, 64);
  EXPECT_EQ(room(pacing, 0, Version{0}, 0), 4u * 64);  // (S + v + 1)*R
  EXPECT_EQ(room(pacing, 0, Version{0}, 4 * 64 - 1), 1u);
  EXPECT_EQ(room(pacing, 0, Version{0}, 4 * 64), 0u);
  EXPECT_EQ(room(pacing, 0, Version{0}, 9 * 64), 0u);
  EXPECT_EQ(room(pacing, 2, Version{0}, 0), 2u * 64);  // consumed: 2R of the 4R
  EXPECT_EQ(room(pacing, 3, Version{0}, 0), 64u);
  EXPECT_EQ(room(pacing, 4, Version{0}, 0), 0u);             // could only arrive too stale
  EXPECT_EQ(room(pacing, 5, Version{4}, 10), 3u * 64 - 10);  // kappa = 2: v lags the step
  EXPECT_EQ(room(pacing, 5, Version{9}, 0), 4u * 64);        // newer than the step: the look-ahead still bounds
  EXPECT_EQ(room(pacing, 0, Version{~0ull >> 1}, 0), 4u * 64);
}

TEST(Pacing, LookaheadBoundsTheStockAtEveryVersion) {
  const Pacing pacing = pacing_of(4, 1, 8);
  EXPECT_EQ(room(pacing, 10, Version{10}, 0), 16u);
  EXPECT_EQ(room(pacing, 10, Version{7}, 0), 16u);
  EXPECT_EQ(room(pacing, 10, Version{6}, 0), 8u);
  EXPECT_EQ(room(pacing, 10, Version{10}, 15), 1u);
  EXPECT_EQ(room(pacing_of(4, 0, 8), 10, Version{9}, 0), 8u);  // never starves, whatever kappa
}

// The n-th trajectory in consumption order is granted exactly when floor(n/R) - v <= S.
TEST(Pacing, AgreesWithTheDefinition) {
  for (std::uint32_t budget = 0; budget < 4; ++budget)
    for (std::uint64_t step = 0; step < 6; ++step)
      for (std::uint64_t version = 0; version <= step; ++version)
        for (std::uint64_t ahead = 0; ahead < 40; ++ahead) {
          const std::uint64_t consumed_at = (step * 5 + ahead) / 5;
          ASSERT_EQ(room(pacing_of(budget, budget, 5), step, Version{version}, ahead) > 0,
                    consumed_at - version <= budget)
              << budget << ' ' << step << ' ' << version << ' ' << ahead;
        }
}

TEST(Stranded, CountsRolloutsThatNoStepCanUse) {
  const Pacing pacing = pacing_of(2, 2, 8);
  EXPECT_EQ(stranded(pacing, 5, {}), 0u);
  const auto stranded_of = [&](std::uint64_t step, std::vector<VersionStock> stock) {
    return stranded(pacing, step, stock);
  };
  // Step 5 is the last one that can use version 3. A stock: version, waiting and live trajectories.
  EXPECT_EQ(stranded_of(5, {{Version{3}, 0, 4}, {Version{5}, 8, 0}}), 4u);
  EXPECT_EQ(stranded_of(5, {{Version{4}, 0, 4}, {Version{5}, 8, 0}}), 0u);   // they fit into step 6
  EXPECT_EQ(stranded_of(5, {{Version{4}, 0, 12}, {Version{5}, 8, 0}}), 4u);  // 8 of them do
  EXPECT_EQ(stranded_of(5, {{Version{4}, 8, 8}}), 0u);                       // the 8 that wait are trained on in step 5
  EXPECT_EQ(stranded_of(5, {{Version{3}, 12, 0}}), 0u);                      // none is live
  EXPECT_EQ(stranded_of(5, {{Version{9}, 8, 100}}), 52u);                    // 48 fit into steps 6 .. 11
  EXPECT_EQ(stranded_of(5, {{Version{3}, 4, 4}, {Version{4}, 4, 8}}), 4u);
}

// The oldest data that pacing admits, by brute force. Every step grants as much as room() allows, with the newest
// policy, `lag` steps behind its publication.
std::uint32_t oldest_trained(std::uint32_t budget, std::uint32_t kappa, std::uint32_t lookahead, std::uint32_t lag) {
  const Pacing pacing = pacing_of(budget, lookahead, 4);
  std::vector<std::uint64_t> versions;  // in the order granted, which is the order trained on
  std::uint64_t staleness_max = 0, trained = 0;
  for (std::uint64_t step = 0; step < 60; ++step) {
    const std::uint64_t lagging_step = step > lag ? step - lag : 0;
    const auto grant = [&](std::uint64_t version) {
      for (std::uint64_t n = room(pacing, step, Version{version}, versions.size() - trained); n > 0; --n)
        versions.push_back(version);
    };
    grant(lagging_step / kappa * kappa);
    grant(step / kappa * kappa);  // where S admits nothing older, workers wait for the newest
    EXPECT_GE(versions.size(), trained + 4) << "step " << step << " is not fed";
    for (int i = 0; i < 4; ++i, ++trained) staleness_max = std::max(staleness_max, step - versions[trained]);
  }
  return static_cast<std::uint32_t>(staleness_max);
}

TEST(Pacing, TheWorstStalenessMatchesBruteForce) {
  for (std::uint32_t kappa = 1; kappa <= 4; ++kappa)
    for (std::uint32_t budget = staleness_budget_min(kappa); budget <= 9; ++budget)
      for (std::uint32_t lookahead = 0; lookahead <= budget; ++lookahead)
        for (std::uint32_t lag = 0; lag <= 3; ++lag) {
          const std::uint32_t computed = staleness_worst(budget, kappa, lookahead, lag);
          const std::uint32_t by_brute_force = oldest_trained(budget, kappa, lookahead, lag);
          ASSERT_LE(by_brute_force, computed)
              << "S " << budget << ", kappa " << kappa << ", L " << lookahead << ", lag " << lag;
          if (kappa > 1) continue;  // the lag need not fall on a publication
          ASSERT_EQ(by_brute_force, computed) << "S " << budget << ", L " << lookahead << ", lag " << lag;
        }
  EXPECT_EQ(staleness_worst(11, 1, 11, 0), 11u);  // a lookahead of S fills S
  EXPECT_EQ(staleness_worst(11, 1, 2, 0), 2u);
  EXPECT_EQ(staleness_budget_min(1), 0u);
  EXPECT_EQ(staleness_budget_min(4), 3u);
}

TEST(Pacing, ItIsKnownWhichOfTheTwoBinds) {
  Pacing pacing = pacing_of(6, 2, 64);
  pacing.steps_total = 100;
  EXPECT_EQ(limiting_bound(pacing, 10, Version{10}), Bound::kLookahead);  // 3 batches, where S allows 7
  EXPECT_EQ(limiting_bound(pacing, 10, Version{7}), Bound::kLookahead);   // where S allows 4
  EXPECT_EQ(limiting_bound(pacing, 10, Version{6}), Bound::kBudget);      // both allow 3
  EXPECT_EQ(limiting_bound(pacing, 10, Version{3}), Bound::kBudget);      // nothing that could be fresh enough
  EXPECT_EQ(limiting_bound(pacing, 98, Version{98}), std::nullopt);       // the run needs two more batches
  for (std::uint64_t age = 0; age <= 8; ++age)
    EXPECT_EQ(limiting_bound(pacing_of(6, 6, 64), 10, Version{10 - age}), Bound::kBudget)
        << "a lookahead of S never binds";
}

TEST(Pacing, AStepCountsOnceForEachBound) {
  LimitedStepCounter steps;
  steps.record(Bound::kBudget, 0);
  steps.record(Bound::kBudget, 0);
  steps.record(Bound::kLookahead, 0);
  steps.record(Bound::kBudget, 4);
  EXPECT_EQ(steps.count(Bound::kBudget), 2u);
  EXPECT_EQ(steps.count(Bound::kLookahead), 1u);
}

TEST(Lease, FollowsTheWorkersOwnTimePerToken) {
  const LeaseLength length{{}, 1000};
  EXPECT_EQ(lease_seconds(length, std::nullopt), 60);
  EXPECT_EQ(lease_seconds(length, 0.001), 10);  // 2 x 1 s
  EXPECT_EQ(lease_seconds(length, 0.05), 100);
  EXPECT_EQ(lease_seconds(length, 60.0), 7200);
  EXPECT_EQ(patience_seconds(length, std::nullopt), 60);
  EXPECT_EQ(patience_seconds(length, 40.0), 100);
  EXPECT_EQ(patience_seconds(length, 1.0), 2.5);
  EXPECT_EQ(patience_seconds(length, 0.01), 1);
  EXPECT_EQ(renewed_expiry(length, 1000, 1050, 60), 1110);
  EXPECT_EQ(renewed_expiry(length, 1000, 8190, 60), 8200);  // but not for ever
}

// A worker without a measured rate gets few leases, for a short time, and the learner hardly waits for it.
TEST(Lease, ANewcomerIsMeasuredByTheOthers) {
  const LeaseLength length{{}, 1000};
  EXPECT_EQ(lease_seconds(length, std::nullopt, 0.005), 40);  // 8 x 5 s
  EXPECT_EQ(lease_seconds(length, std::nullopt, 0.0001), 10);
  EXPECT_EQ(lease_seconds(length, std::nullopt, 0.1), 60);
  EXPECT_EQ(lease_seconds(length, 0.1, 0.001), 200);  // its own counts
  EXPECT_EQ(patience_seconds(length, std::nullopt, 2.0), 8);
  EXPECT_EQ(patience_seconds(length, std::nullopt, 100.0), 60);
  EXPECT_EQ(patience_seconds(length, 2.0, 100.0), 5);
  // The learner never waits longer than its steps that may use the work take.
  EXPECT_EQ(patience_seconds(length, 40.0, {}, 7.0), 7);
  EXPECT_EQ(patience_seconds(length, std::nullopt, {}, 7.0), 7);
  EXPECT_EQ(patience_seconds(length, 40.0, {}, 0.1), 1);

  Pacing pacing = pacing_of(6, 2, 2048);
  pacing.group_size = 8;
  EXPECT_EQ(initial_group_allowance(length, pacing), 32u);
  pacing = pacing_of(2, 1, 4);
  pacing.group_size = 2;
  EXPECT_EQ(initial_group_allowance(length, pacing), 1u);
  EXPECT_EQ(group_allowance_after_results(32, 1), 33u);
  EXPECT_EQ(group_allowance_after_lapse(33), 16u);
  EXPECT_EQ(group_allowance_after_lapse(1), 1u);
}

TEST(Lease, AFewLapsesDoNotExpel) {
  std::uint32_t weight = 0;
  for (int i = 0; i < 4; ++i) weight = weight_after_lapse(weight, LapseKind::kExpired);
  EXPECT_LT(weight, kLapseWeightMax);
  EXPECT_GE(weight_after_lapse(weight, LapseKind::kExpired), kLapseWeightMax);
  EXPECT_LT(weight_after_lapse(weight, LapseKind::kLost), kLapseWeightMax);
}

TEST(Lease, OneRateDoesNotTakeEverything) {
  EXPECT_EQ(median({}), std::nullopt);
  EXPECT_EQ(median({3, 1, 1000}), 3);
  EXPECT_EQ(median({3, 1}), 3);
  EXPECT_EQ(capped_rate(1000, 3.0), 12);
  EXPECT_EQ(capped_rate(2, 3.0), 2);
  EXPECT_EQ(capped_rate(1000, std::nullopt), 1000);
}

TEST(Lease, LateWorkIsNotAskedFor) {
  const Pacing pacing = pacing_of(2, 2, 8);
  EXPECT_TRUE(can_finish_in_time(pacing, 5, Version{5}, 30, 10));  // steps 5, 6 and 7 may use it
  EXPECT_FALSE(can_finish_in_time(pacing, 5, Version{5}, 31, 10));
  EXPECT_TRUE(can_finish_in_time(pacing, 5, Version{4}, 20, 10));
  EXPECT_FALSE(can_finish_in_time(pacing, 5, Version{3}, 20, 10));
  EXPECT_FALSE(can_finish_in_time(pacing, 9, Version{3}, 0.1, 10));
  EXPECT_TRUE(can_finish_in_time(pacing, 3, Version{5}, 30, 10));
}

TEST(Lease, AWorkerHoldsLittleMoreThanItsShare) {
  EXPECT_EQ(groups_held_max(512, 1, 1), 1024u);  // alone
  EXPECT_EQ(groups_held_max(512, 1, 4), 256u);
  EXPECT_EQ(groups_held_max(512, 0, 4), 1u);
  EXPECT_EQ(groups_held_max(3, 0.1, 4), 1u);
  EXPECT_EQ(groups_held_max(512, 0, 0), 512u);
}

TEST(Failure, TwoTriesOrFourLostWorkers) {
  EXPECT_FALSE(must_set_aside(1, 3));
  EXPECT_TRUE(must_set_aside(2, 0));
  EXPECT_TRUE(must_set_aside(0, 4));
}

TEST(Acceptance, EveryReason) {
  LeaseRecord lease{.id = LeaseId{1},
                    .group = GroupId{2},
                    .worker = WorkerId{3},
                    .version = Version{4},
                    .policy_digest = "d",
                    .rollouts = 8,
                    .granted_unix_s = 100,
                    .expires_unix_s = 110,
                    .state = LeaseState::kLive};
  const Claim claim{.worker = WorkerId{3}, .version = Version{4}, .policy_digest = "d"};
  EXPECT_EQ(refusal(lease, claim, 105), std::nullopt);
  EXPECT_EQ(refusal(lease, claim, 110), std::nullopt);
  EXPECT_EQ(refusal(lease, claim, 110.001), "lease expired");
  EXPECT_EQ(refusal(lease, claim, std::numeric_limits<double>::quiet_NaN()), "lease expired");
  EXPECT_EQ(refusal(std::nullopt, claim, 105), "unknown lease");
  EXPECT_EQ(refusal(lease, {.worker = WorkerId{9}, .version = Version{4}, .policy_digest = "d"}, 105),
            "lease of another worker");
  EXPECT_EQ(refusal(lease, {.worker = WorkerId{3}, .version = Version{5}, .policy_digest = "d"}, 105), std::nullopt)
      << "fresher than was asked for";
  EXPECT_EQ(refusal(lease, {.worker = WorkerId{3}, .version = Version{3}, .policy_digest = "d"}, 105), "wrong version");
  EXPECT_EQ(refusal(lease, {.worker = WorkerId{3}, .version = Version{4}, .policy_digest = "D"}, 105), "wrong digest");
  lease.state = LeaseState::kSettled;
  EXPECT_EQ(refusal(lease, claim, 105), "lease already settled");
  lease.state = LeaseState::kExpired;
  EXPECT_EQ(refusal(lease, claim, 105), "lease expired");
  lease.state = LeaseState::kReleased;
  EXPECT_EQ(refusal(lease, claim, 105), "lease released");
}

}  // namespace
}  // namespace echoline::replay_buffer
