// The fastest topology for a fleet and a payload.
#include "chains/choice.hpp"

#include <gtest/gtest.h>

#include "tests/chains/random_fleets.hpp"

namespace echoline::chains {
namespace {

const BitRate kChainRate = BitRate::from_mbit_per_s(50);

Choice choice_of(const RandomFleet& fleet, const BroadcastGoal& goal, std::optional<TopologyPolicy> current = {}) {
  auto choice = choose_topology(fleet.learner_up, kChainRate, fleet.workers, fleet.links, goal, current, fleet.regions);
  EXPECT_TRUE(choice) << choice.error().message();
  return std::move(choice).value();
}

Duration time_of(const RandomFleet& fleet, TopologyPolicy policy, const BroadcastGoal& goal) {
  const auto topology =
      plan_chains(fleet.learner_up, kChainRate, fleet.workers, policy, goal.quorum, fleet.regions).value();
  return broadcast_time(topology, goal.payload, goal.chunk, fleet.learner_up, fleet.links, fleet.regions)
      ->quorum_time(goal.quorum);
}

// Workers with equal links, and a delay to each.
RandomFleet equal_fleet(std::size_t n, double up_mbit, Duration delay) {
  RandomFleet fleet;
  for (std::uint64_t id = 1; id <= n; ++id) {
    const auto rate = BitRate::from_mbit_per_s;
    fleet.workers.push_back({.id = WorkerId{id}, .up = rate(up_mbit), .down = rate(1000), .score = 1});
    fleet.links.push_back({.id = WorkerId{id}, .up = rate(up_mbit), .down = rate(1000), .delay = delay});
  }
  return fleet;
}

TEST(Choice, IsWithinTwoPercentOfTheBestInRandomFleets) {
  Random random(5);
  std::vector<double> over_bound;
  for (int i = 0; i < 500; ++i) {
    const RandomFleet fleet = random_regions(random, i % 4 == 1, i % 2 == 0);
    const BroadcastGoal goal{Bytes{1'000 + random.below(200'000'000)}, Bytes{16'384u << (2 * random.below(4))}, 0.9};
    const Choice choice = choice_of(fleet, goal);
    Duration best = choice.predicted;
    for (const TopologyPolicy policy :
         {TopologyPolicy::kTrees, TopologyPolicy::kStripes, TopologyPolicy::kBestChains, TopologyPolicy::kStar})
      if (policy != TopologyPolicy::kStar || fleet.workers.size() <= kStarWorkersMax)
        best = std::min(best, time_of(fleet, policy, goal));
    ASSERT_LE(seconds(choice.predicted), seconds(best) / kLeaveTreesTimeShare + 1e-9) << "fleet " << i;
    ASSERT_EQ(choice.predicted, choice.times.quorum_time(0.9));
    ASSERT_GE(seconds(choice.predicted), 0.999 * seconds(choice.lower_bound));
    ASSERT_TRUE(std::is_sorted(choice.candidates.begin(), choice.candidates.end(),
                               [](const auto& a, const auto& b) { return a.predicted < b.predicted; }));
  }
}

TEST(Choice, LargePayloadsGoByTreesAndSmallOnesStraight) {
  // With 200 MB for twenty workers, the learner cannot send twenty copies. With 2 kB and a delay of 80 ms, every hop
  // costs more than the copies.
  const RandomFleet fleet = equal_fleet(20, 100, std::chrono::milliseconds(80));
  EXPECT_EQ(choice_of(fleet, {Bytes{200'000'000}, Bytes{262'144}, 0.9}).topology.policy, TopologyPolicy::kTrees);
  const Choice small = choice_of(fleet, {Bytes{2'000}, Bytes{262'144}, 0.9});
  EXPECT_EQ(small.topology.depth(), 1u) << to_string(small.topology.policy);
  EXPECT_LT(seconds(small.predicted), 0.09);
}

TEST(Choice, TheTopologyStaysUntilAnotherIsAFifthFaster) {
  Random random(3);
  int moved = 0, stayed = 0;
  for (int i = 0; i < 200; ++i) {
    const RandomFleet fleet = random_fleet(random, false, i % 2 == 0);
    const BroadcastGoal goal{Bytes{1'000 + random.below(5'000'000)}, Bytes{65'536}, 0.9};
    for (const TopologyPolicy current : {TopologyPolicy::kTrees, TopologyPolicy::kBestChains, TopologyPolicy::kEcho2}) {
      const Choice choice = choice_of(fleet, goal, current);
      const double current_s = seconds(time_of(fleet, current, goal));
      const double best_s = seconds(choice.candidates.front().predicted);
      if (choice.topology.policy == current) {
        ASSERT_LE(kSwitchTimeShare * current_s, best_s + 1e-9);
        ++stayed;
      } else {
        ASSERT_LE(seconds(choice.predicted), kSwitchTimeShare * current_s + 1e-9);
        ++moved;
      }
    }
  }
  EXPECT_GT(moved, 50);
  EXPECT_GT(stayed, 50);
}

TEST(Choice, AutoIsNoTopologyByItself) {
  const RandomFleet fleet = equal_fleet(3, 100, {});
  const auto planned = plan_chains(fleet.learner_up, kChainRate, fleet.workers, TopologyPolicy::kAuto);
  ASSERT_FALSE(planned);
  EXPECT_NE(planned.error().message().find("'auto' is not a topology"), std::string::npos);
  EXPECT_EQ(parse_topology_policy("auto").value(), TopologyPolicy::kAuto);
}

}  // namespace
}  // namespace echoline::chains
