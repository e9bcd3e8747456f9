// The ledger's rules: pacing, what a step strands, lease length, acceptance and shares.
#include "replay_buffer/rules.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "base/random.hpp"

namespace echoline::replay_buffer {
namespace {

TEST(Admission, StepMinusVersionAtMostTheBudget) {
  EXPECT_TRUE(admissible(7, Version{4}, 3));
  EXPECT_FALSE(admissible(8, Version{4}, 3));
  EXPECT_TRUE(admissible(4, Version{4}, 0));
  EXPECT_TRUE(admissible(3, Version{4}, 0));  // newer than the step, after a rollback
  EXPECT_FALSE(admissible(5, Version{4}, 0));
}

TEST(Pacing, FollowsTheFormula) {
  const Pacing pacing{3, 3, 64};
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
  const Pacing pacing{4, 1, 8};
  EXPECT_EQ(room(pacing, 10, Version{10}, 0), 16u);
  EXPECT_EQ(room(pacing, 10, Version{7}, 0), 16u);
  EXPECT_EQ(room(pacing, 10, Version{6}, 0), 8u);
  EXPECT_EQ(room(pacing, 10, Version{10}, 15), 1u);
  EXPECT_EQ(room({4, 0, 8}, 10, Version{9}, 0), 8u);  // never starves, whatever kappa
}

// The n-th trajectory in consumption order is granted exactly when floor(n/R) - v <= S.
TEST(Pacing, AgreesWithTheDefinition) {
  for (std::uint32_t budget = 0; budget < 4; ++budget)
    for (std::uint64_t step = 0; step < 6; ++step)
      for (std::uint64_t version = 0; version <= step; ++version)
        for (std::uint64_t ahead = 0; ahead < 40; ++ahead) {
          const std::uint64_t consumed_at = (step * 5 + ahead) / 5;
          ASSERT_EQ(room({budget, budget, 5}, step, Version{version}, ahead) > 0, consumed_at - version <= budget)
              << budget << ' ' << step << ' ' << version << ' ' << ahead;
        }
}

TEST(Stranded, CountsWhatCanNoLongerBeUsed) {
  const Pacing pacing{2, 2, 8};
  EXPECT_EQ(stranded(pacing, 5, {}), 0u);
  const auto one = [&](std::uint64_t step, std::vector<VersionStock> stock) { return stranded(pacing, step, stock); };
  EXPECT_EQ(one(5, {{Version{3}, 0, 4}, {Version{5}, 8, 0}}), 4u);   // step 5 is the last one for version 3
  EXPECT_EQ(one(5, {{Version{4}, 0, 4}, {Version{5}, 8, 0}}), 0u);   // they fit into step 6
  EXPECT_EQ(one(5, {{Version{4}, 0, 12}, {Version{5}, 8, 0}}), 4u);  // 8 of them do
  EXPECT_EQ(one(5, {{Version{4}, 8, 8}}), 0u);                       // the waiting ones go now
  EXPECT_EQ(one(5, {{Version{3}, 12, 0}}), 0u);                      // nothing live to wait for
  EXPECT_EQ(one(5, {{Version{9}, 8, 100}}), 52u);                    // 48 fit into steps 6 .. 11
  EXPECT_EQ(one(5, {{Version{3}, 4, 4}, {Version{4}, 4, 8}}), 4u);
}

TEST(Lease, TwoAndAHalfMediansClamped) {
  const LeaseLength length{5, 600};
  EXPECT_EQ(lease_seconds(length, {}), 600);
  std::vector<double> times = {100, 4, 2};
  EXPECT_EQ(lease_seconds(length, times), 10);
  times = {1};
  EXPECT_EQ(lease_seconds(length, times), 5);
  times = {1000, 1000, 1};
  EXPECT_EQ(lease_seconds(length, times), 600);
}

TEST(Acceptance, EveryReason) {
  LeaseRecord lease{LeaseId{1}, GroupId{2}, WorkerId{3}, Version{4}, "d", 8, 100, 110, LeaseState::kLive};
  const Claim good{WorkerId{3}, Version{4}, "d"};
  EXPECT_EQ(refusal(lease, good, 105), std::nullopt);
  EXPECT_EQ(refusal(lease, good, 110), std::nullopt);
  EXPECT_EQ(refusal(lease, good, 110.001), "lease expired");
  EXPECT_EQ(refusal(lease, good, std::numeric_limits<double>::quiet_NaN()), "lease expired");
  EXPECT_EQ(refusal(std::nullopt, good, 105), "unknown lease");
  EXPECT_EQ(refusal(lease, {WorkerId{9}, Version{4}, "d"}, 105), "lease of another worker");
  EXPECT_EQ(refusal(lease, {WorkerId{3}, Version{5}, "d"}, 105), "wrong version");
  EXPECT_EQ(refusal(lease, {WorkerId{3}, Version{3}, "d"}, 105), "wrong version");
  EXPECT_EQ(refusal(lease, {WorkerId{3}, Version{4}, "D"}, 105), "wrong digest");
  lease.state = LeaseState::kSettled;
  EXPECT_EQ(refusal(lease, good, 105), "lease already settled");
  lease.state = LeaseState::kExpired;
  EXPECT_EQ(refusal(lease, good, 105), "lease expired");
  lease.state = LeaseState::kReleased;
  EXPECT_EQ(refusal(lease, good, 105), "lease released");
}

TEST(Allocation, FloorsAndTheRemainderToTheFastest) {
  std::vector<WorkerShare> workers = {
      {WorkerId{1}, 30, true, 0}, {WorkerId{2}, 50, true, 0}, {WorkerId{3}, 20, true, 0}, {WorkerId{4}, 400, false, 9}};
  allocate(11, workers);
  EXPECT_EQ(workers[0].groups, 3u);      // floor(3.3)
  EXPECT_EQ(workers[1].groups, 5u + 1);  // floor(5.5) and the remainder
  EXPECT_EQ(workers[2].groups, 2u);      // floor(2.2)
  EXPECT_EQ(workers[3].groups, 0u);
  EXPECT_EQ(workers[3].tokens_per_s, 200);  // alpha = 0.5
  EXPECT_EQ(workers[1].tokens_per_s, 50);
}

TEST(Allocation, EdgeCases) {
  std::vector<WorkerShare> nobody = {{WorkerId{1}, 30, false, 3}};
  allocate(5, nobody);
  EXPECT_EQ(nobody[0].groups, 0u);
  allocate(5, {});
  std::vector<WorkerShare> unknown = {{WorkerId{2}, 0, true, 0}, {WorkerId{1}, 0, true, 0}};
  allocate(5, unknown);
  EXPECT_EQ(unknown[0].groups, 2u);
  EXPECT_EQ(unknown[1].groups, 3u);  // a tie goes to the lowest id
}

TEST(Allocation, SumsExactlyForAnyThroughput) {
  Random random(3);
  for (int round = 0; round < 5'000; ++round) {
    std::vector<WorkerShare> workers(1 + random.below(20));
    bool any = false;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      workers[i] = {WorkerId{i + 1}, random.below(3) == 0 ? 0 : random.uniform() * 1e6, random.below(4) != 0, 7};
      any |= workers[i].eligible;
    }
    const std::uint64_t total = random.below(1'000'000);
    allocate(total, workers);
    const auto sum = std::accumulate(workers.begin(), workers.end(), std::uint64_t{0},
                                     [](std::uint64_t s, const WorkerShare& w) { return s + w.groups; });
    ASSERT_EQ(sum, any ? total : 0) << "round " << round;
    for (const WorkerShare& w : workers) ASSERT_TRUE(w.eligible || w.groups == 0);
  }
}

TEST(Throughput, MovingAverage) {
  EXPECT_EQ(updated_throughput(std::nullopt, 100, 2), 50);
  EXPECT_DOUBLE_EQ(updated_throughput(100, 100, 2), 0.8 * 100 + 0.2 * 50);
}

}  // namespace
}  // namespace echoline::replay_buffer
