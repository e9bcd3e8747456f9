// Two workers that must not be neighbours, for every topology and without moving the child forward.
#include "chains/separation.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "chains/fleet_graph.hpp"
#include "chains/planner.hpp"

namespace echoline::chains {
namespace {

using testing::ElementsAre;
using Pairs = std::set<std::pair<WorkerId, WorkerId>>;

WorkerId id(std::uint64_t v) { return WorkerId{v}; }

Topology chain(std::uint64_t n) {
  Topology topology;
  topology.chains.emplace_back();
  for (std::uint64_t v = 1; v <= n; ++v) topology.chains[0].push_back(id(v));
  return topology;
}

std::size_t depth_of(const Topology& topology, std::size_t stripe, WorkerId worker) {
  std::size_t depth = 0;
  const auto parents = topology.parents();
  for (WorkerId node = worker; node != kLearnerId; node = parents.at(node)[stripe]) ++depth;
  return depth;
}

TEST(Apart, AChildChangesPlacesWithAWorkerBehindIt) {
  const Topology topology = separate_pairs(chain(5), {{id(2), id(3)}});
  EXPECT_THAT(topology.chains, ElementsAre(ElementsAre(id(1), id(2), id(4), id(3), id(5))));
  EXPECT_EQ(separate_pairs(topology, {{id(2), id(3)}}), topology);
  EXPECT_EQ(separate_pairs(chain(5), {}), chain(5));
  EXPECT_EQ(separate_pairs(chain(5), {{id(2), id(9)}}), chain(5));
}

TEST(Apart, WithoutASuitableWorkerTheLearnerFeedsTheChildAsALeaf) {
  EXPECT_THAT(separate_pairs(chain(2), {{id(1), id(2)}}).chains, ElementsAre(ElementsAre(id(1)), ElementsAre(id(2))));
  Topology topology = chain(3);
  topology.leaves_only = {id(3)};  // may not stand where the second stands
  EXPECT_THAT(separate_pairs(topology, {{id(1), id(2)}}).chains,
              ElementsAre(ElementsAre(id(1), id(3)), ElementsAre(id(2))));
}

TEST(Apart, HoldsForEveryPolicyAndMovesNoWorkerForward) {
  Random random(7);
  std::size_t fallbacks = 0, separated = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<ChainWorker> workers;
    std::vector<WorkerId> all;
    for (std::uint64_t v = 1, n = 2 + random.below(30); v <= n; ++v) {
      workers.push_back({.id = id(v),
                         .up = BitRate::from_mbit_per_s(5 + random.uniform() * 200),
                         .down = BitRate::from_mbit_per_s(100 + random.uniform() * 200),
                         .score = random.uniform(),
                         .may_forward = random.below(8) > 0,
                         .may_seed = random.below(4) > 0});
      all.push_back(id(v));
    }
    const auto policy = std::array{TopologyPolicy::kEcho2, TopologyPolicy::kBestChains, TopologyPolicy::kStripes,
                                   TopologyPolicy::kTrees, TopologyPolicy::kStar}[random.below(5)];
    const auto before = plan_chains(BitRate::from_mbit_per_s(60), BitRate::from_mbit_per_s(20), workers, policy);
    ASSERT_TRUE(before.has_value());
    Pairs apart;
    std::vector<std::pair<WorkerId, WorkerId>> edges;  // child, parent
    for (const auto& [child, parents] : before->parents())
      for (const WorkerId parent : parents)
        if (parent != kLearnerId) edges.emplace_back(child, parent);
    for (std::uint64_t n = random.below(4); n > 0 && !edges.empty(); --n) {
      const auto [child, parent] = edges[random.below(edges.size())];
      apart.insert(std::minmax(child, parent));
    }
    const Topology after = separate_pairs(*before, apart);
    const Status valid = validate(after, all);
    ASSERT_TRUE(valid.has_value()) << valid.error().message() << "\n" << before->to_text() << "\n" << after.to_text();
    for (const auto& [child, parents] : after.parents())
      for (std::size_t s = 0; s < parents.size(); ++s)
        EXPECT_FALSE(apart.contains(std::minmax(child, parents[s]))) << after.to_text();
    if (apart.size() != 1) continue;  // of several, one may be moved for another's sake
    const auto [a, b] = *apart.begin();
    for (std::size_t s = 0; s < after.stripes(); ++s) {
      const WorkerId child = before->parents().at(a)[s] == b ? a : b, parent = child == a ? b : a;
      if (before->parents().at(child)[s] != parent) continue;
      ++separated;
      if (depth_of(after, s, child) >= depth_of(*before, s, child)) continue;
      ++fallbacks;  // the learner feeds it, and it has no children
      EXPECT_EQ(after.parents().at(child)[s], kLearnerId);
      for (const auto& [other, parents] : after.parents()) EXPECT_NE(parents[s], child) << after.to_text();
    }
  }
  EXPECT_GT(separated, 20u);
  EXPECT_LT(fallbacks, separated / 2);
}

}  // namespace
}  // namespace echoline::chains
