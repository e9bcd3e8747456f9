// Repairs of trees: the workers that stay, the workers that move, and the resulting rate.
#include "chains/trees.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/random.hpp"
#include "chains/fleet_graph.hpp"
#include "chains/planner.hpp"
#include "tests/chains/random_fleets.hpp"

namespace echoline::chains {
namespace {

using testing::ElementsAre;

BitRate mbit(double m) { return BitRate::from_mbit_per_s(m); }
WorkerId id(std::uint64_t v) { return WorkerId{v}; }
ChainWorker worker(std::uint64_t v, double up_mbit, double down_mbit = 1000) {
  return {.id = id(v), .up = mbit(up_mbit), .down = mbit(down_mbit), .score = 0.5};
}
std::vector<ChainWorker> equal_workers(std::uint64_t n) {
  std::vector<ChainWorker> workers;
  for (std::uint64_t v = 1; v <= n; ++v) workers.push_back(worker(v, 50, 50));
  return workers;
}
Topology planned(const std::vector<ChainWorker>& workers, double learner_mbit) {
  auto topology = plan_chains(mbit(learner_mbit), mbit(8), workers, TopologyPolicy::kTrees);
  EXPECT_TRUE(topology) << topology.error().message();
  return *topology;
}
void expect_valid(const Topology& topology, const std::vector<ChainWorker>& workers) {
  std::vector<WorkerId> all;
  for (const ChainWorker& w : workers) all.push_back(w.id);
  const Status status = validate(topology, all);
  EXPECT_TRUE(status) << status.error().message();
}
// Number of (worker, stripe) pairs with another parent than before. Newcomers do not count.
std::size_t moved_edges(const Topology& before, const Topology& after) {
  std::size_t edges = 0;
  const auto now = after.parents();
  for (const auto& [worker, parents] : before.parents())
    if (const auto it = now.find(worker); it != now.end())
      for (std::size_t s = 0; s < parents.size(); ++s) edges += parents[s] != it->second[s];
  return edges;
}

TEST(RepairedTrees, NothingBrokenNothingMoves) {
  const auto workers = equal_workers(16);
  const Topology topology = planned(workers, 100);
  const RepairedTrees repaired = repair_trees(topology, mbit(100), workers, 1);
  EXPECT_EQ(moved_edges(topology, repaired.topology), 0u);
  EXPECT_NEAR(repaired.replanned_rate.mbit_per_s(), 50, 0.1);
  EXPECT_NEAR(repaired.rate.mbit_per_s(), 50, 0.1);
}

TEST(RepairedTrees, OnlyChildrenOfADeadWorkerMove) {
  auto workers = equal_workers(16);
  const Topology topology = planned(workers, 100);
  for (std::size_t dead = 0; dead < workers.size(); ++dead) {
    auto living = workers;
    living.erase(living.begin() + static_cast<std::ptrdiff_t>(dead));
    const RepairedTrees repaired = repair_trees(topology, mbit(100), living, 1);
    expect_valid(repaired.topology, living);
    std::size_t children_of_dead = 0;
    for (const auto& [worker, parents] : topology.parents())
      children_of_dead += static_cast<std::size_t>(std::count(parents.begin(), parents.end(), workers[dead].id));
    EXPECT_EQ(moved_edges(topology, repaired.topology), children_of_dead);
    EXPECT_NEAR(repaired.rate.mbit_per_s(), 50, 0.1) << repaired.topology.to_text();
  }
}

TEST(RepairedTrees, AMovedWorkerKeepsNoChildren) {
  const auto workers = equal_workers(16);
  const Topology topology = planned(workers, 100);
  const WorkerId busy = topology.chains.front().front();
  auto slower = workers;
  for (ChainWorker& w : slower)
    if (w.id == busy) w.may_forward = false;
  const RepairedTrees repaired = repair_trees(topology, mbit(100), slower, 1, busy);
  expect_valid(repaired.topology, slower);
  EXPECT_TRUE(repaired.topology.children_of(busy).empty());
  EXPECT_THAT(repaired.topology.leaves_only, ElementsAre(busy));
}

// Random fleets lose, gain and demote workers. The topology stays a set of trees, with every uplink close to its limit
// at most.
TEST(RepairedTrees, StayTreesAndFastOverManyChanges) {
  Random random(11);
  std::vector<double> rate_ratios;  // of repaired trees to trees planned from scratch
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    const double learner_mbit = static_cast<double>(random.between(50, 200));
    std::vector<ChainWorker> workers;
    std::uint64_t next_id = 1;
    const auto join = [&] {
      workers.push_back(worker(next_id++, static_cast<double>(random.between(10, 100)), 200));
      workers.back().may_seed = random.below(4) != 0;
    };
    for (auto n = random.between(2, 40); n > 0; --n) join();
    Topology topology = planned(workers, learner_mbit);
    for (int step = 0; step < 100; ++step) {
      std::optional<WorkerId> reattached;
      const auto chosen = random.below(workers.size());
      switch (random.below(4)) {
        case 0:
          if (workers.size() > 2) workers.erase(workers.begin() + static_cast<std::ptrdiff_t>(chosen));
          break;
        case 1:
          reattached = workers[chosen].id;
          workers[chosen].may_forward = !workers[chosen].may_forward;
          break;
        default:
          if (workers.size() < 60) join();
      }
      RepairedTrees repaired = repair_trees(topology, mbit(learner_mbit), workers, 1, reattached);
      expect_valid(repaired.topology, workers);
      rate_ratios.push_back(repaired.rate.bits_per_s / repaired.replanned_rate.bits_per_s);
      topology = std::move(repaired.topology);
    }
  }
  std::sort(rate_ratios.begin(), rate_ratios.end());
  EXPECT_GE(quantile(rate_ratios, 0.5), 0.88);
  EXPECT_GE(quantile(rate_ratios, 0.05), 0.75);
}

// ---- workers with slow downlinks ----

TEST(LateWorkers, ASlowDownlinkDelaysNoOtherWorker) {
  auto workers = equal_workers(9);
  workers.push_back(worker(10, 50, 5));
  const Topology topology = planned(workers, 100);
  expect_valid(topology, workers);
  EXPECT_TRUE(topology.children_of(id(10)).empty());
  EXPECT_THAT(topology.leaves_only, ElementsAre(id(10)));
  std::vector<WorkerLink> links;
  for (const ChainWorker& w : workers) links.push_back({w.id, w.up, w.down, {}});
  const auto times = broadcast_time(topology, {100'000'000}, {16 * 1024}, mbit(100), links);
  ASSERT_TRUE(times);
  EXPECT_NEAR(seconds(times->quorum_time(0.9)), 16, 0.2);  // 100 MB at 50 Mbit/s
  EXPECT_NEAR(seconds(times->time_of(id(10))), 160, 1);    // as fast as it can take it
}

TEST(LateWorkers, EqualWorkersAreNotLate) {
  EXPECT_THAT(late_workers(mbit(100), equal_workers(16), 0.9), testing::Each(false));
  // Differences of a few percent do not make a worker late, and a single worker delays no other.
  auto workers = equal_workers(16);
  for (std::uint64_t v = 0; v < 16; ++v) workers[v].down = mbit(49 + 0.1 * static_cast<double>(v));
  EXPECT_THAT(late_workers(mbit(100), workers, 0.9), testing::Each(false));
  EXPECT_THAT(late_workers(mbit(100), std::vector{worker(1, 5, 5)}, 0.9), ElementsAre(false));
}

TEST(LateWorkers, AJoiningStragglerBecomesALeafAndMovesNoWorker) {
  auto workers = equal_workers(16);
  const Topology topology = planned(workers, 100);
  workers.push_back(worker(17, 50, 5));
  const RepairedTrees repaired = repair_trees(topology, mbit(100), workers, 0.9);
  expect_valid(repaired.topology, workers);
  EXPECT_EQ(moved_edges(topology, repaired.topology), 0u);
  EXPECT_FALSE(repaired.worth_replanning());
  EXPECT_NEAR(repaired.rate.mbit_per_s(), 50, 0.1);
  EXPECT_TRUE(repaired.topology.children_of(id(17)).empty());
}

TEST(LateWorkers, AWorkerThatBecomesLateLosesItsChildren) {
  auto workers = equal_workers(16);
  const Topology topology = planned(workers, 100);
  const WorkerId busy = topology.chains.front().front();
  for (ChainWorker& w : workers)
    if (w.id == busy) w.down = mbit(5);
  const RepairedTrees repaired = repair_trees(topology, mbit(100), workers, 0.9);
  expect_valid(repaired.topology, workers);
  EXPECT_TRUE(repaired.topology.children_of(busy).empty());
  EXPECT_NEAR(repaired.rate.mbit_per_s(), 50, 0.1);
}

// The experiment of docs/overlay.md: T_b at q = 0.9 over the bound for it.
TEST(LateWorkers, RandomFleetsComeCloseToTheBoundForTheQuorum) {
  for (const bool straggler : {false, true}) {
    const auto unequal = times_over_bound(200, TopologyPolicy::kTrees, 0.9, straggler, false);
    EXPECT_LE(quantile(unequal, 0.95), 1.05) << "straggler " << straggler;
    const auto scarce = times_over_bound(200, TopologyPolicy::kTrees, 0.9, straggler, true);
    EXPECT_LE(quantile(scarce, 0.95), 1.2) << "straggler " << straggler;
  }
}

}  // namespace
}  // namespace echoline::chains
