// Several sets of chains at once: what each worker forwards, and how fast all of them receive.
#include "chains/stripes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "base/random.hpp"
#include "chains/broadcast_model.hpp"
#include "chains/fleet_graph.hpp"
#include "chains/planner.hpp"
#include "tests/chains/parents.hpp"

namespace echoline::chains {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

BitRate mbit(double m) { return BitRate::from_mbit_per_s(m); }
WorkerId id(std::uint64_t v) { return WorkerId{v}; }
ChainWorker worker(std::uint64_t v, double up_mbit, bool may_forward = true, double down_mbit = 1000) {
  return {.id = id(v), .up = mbit(up_mbit), .down = mbit(down_mbit), .score = 0.5, .may_forward = may_forward};
}

Topology two_stripes() {
  Topology topology;
  topology.policy = TopologyPolicy::kStripes;
  topology.chains = {{id(1), id(2), id(3)}};
  topology.further_stripes = {{{id(3), id(1)}, {id(2)}}};
  return topology;
}

TEST(Topology, TwoStripesHaveTheirOwnParents) {
  const Topology topology = two_stripes();
  EXPECT_EQ(topology.stripes(), 2u);
  EXPECT_EQ(topology.size(), 3u);
  EXPECT_EQ(topology.depth(), 3u);
  EXPECT_EQ(topology.to_text(), "learner -> 1 -> 2 -> 3 || learner -> 3 -> 1 | learner -> 2");
  EXPECT_EQ(topology.to_short_text(), "2 stripes, at most 3 hops; the first: learner -> 1 -> 2 -> 3");
  EXPECT_THAT(topology.workers(), ElementsAre(id(1), id(2), id(3)));
  const auto parents = topology.parents();
  EXPECT_THAT(parents.at(id(1)), ElementsAre(kLearnerId, id(3)));
  EXPECT_THAT(parents.at(id(2)), ElementsAre(id(1), kLearnerId));
  EXPECT_THAT(parents.at(id(3)), ElementsAre(id(2), kLearnerId));
  EXPECT_THAT(topology.children_of(kLearnerId), ElementsAre(id(1), id(2), id(3)));  // once, in however many stripes
  EXPECT_THAT(topology.children_of(id(3)), ElementsAre(id(1)));
  EXPECT_EQ(parent_in_first_stripe(topology, id(3)), id(2));
}

TEST(Topology, EveryStripeMustReachEveryWorker) {
  const std::vector<WorkerId> all{id(1), id(2), id(3)};
  EXPECT_TRUE(validate(two_stripes(), all));
  Topology topology = two_stripes();
  topology.further_stripes[0][1].clear();
  EXPECT_THAT(validate(topology, all).error().detail, HasSubstr("empty"));
  topology = two_stripes();
  topology.further_stripes[0].pop_back();
  EXPECT_THAT(validate(topology, all).error().detail, HasSubstr("worker 2 has no parent"));
  topology = two_stripes();
  topology.leaves_only = {id(3)};  // the last in one stripe, but not in the other
  EXPECT_THAT(validate(topology, all).error().detail, HasSubstr("may not forward"));
}

TEST(Topology, RepairsEveryStripe) {
  const Topology without = remove_worker(two_stripes(), id(3));
  EXPECT_EQ(without.to_text(), "learner -> 1 -> 2 || learner -> 1 | learner -> 2");
  Topology topology = two_stripes();
  topology.chains_wanted = 1;
  EXPECT_EQ(add_worker(topology, worker(4, 8)).to_text(),
            "learner -> 1 -> 2 -> 3 -> 4 || learner -> 3 -> 1 | learner -> 2 -> 4");
}

// learner -> 1 -> 2 -> 3, and 4 hangs on 1, 5 on 4, 6 on 2.
Topology tree() {
  Topology topology;
  topology.policy = TopologyPolicy::kTrees;
  topology.chains = {{id(1), id(2), id(3)}, {id(4), id(5)}, {id(6)}};
  topology.grafts = {{{id(4), id(1)}, {id(6), id(2)}}};
  return topology;
}

TEST(Topology, ATreeKnowsItsParentsAndChildren) {
  const Topology topology = tree();
  EXPECT_EQ(topology.to_text(), "learner -> 1 -> 2 -> 3 | 1 -> 4 -> 5 | 2 -> 6");
  EXPECT_EQ(topology.to_short_text(), topology.to_text());
  EXPECT_TRUE(validate(topology, topology.workers()));
  EXPECT_EQ(topology.depth(), 3u);
  EXPECT_EQ(parent_in_first_stripe(topology, id(4)), id(1));
  EXPECT_EQ(parent_in_first_stripe(topology, id(1)), kLearnerId);
  EXPECT_THAT(topology.children_of(id(1)), ElementsAre(id(2), id(4)));
  EXPECT_THAT(topology.children_of(kLearnerId), ElementsAre(id(1)));
  EXPECT_EQ(topology.copies_sent_by(id(1)), 2);
  EXPECT_EQ(two_stripes().copies_sent_by(id(1)), 0.5);
  EXPECT_THAT(topology.parents().at(id(6)), ElementsAre(id(2)));
}

TEST(Topology, ATreeIsCheckedAsOne) {
  Topology topology = tree();
  std::swap(topology.chains[0], topology.chains[1]);
  EXPECT_THAT(validate(topology, topology.workers()).error().detail,
              HasSubstr("worker 4 is attached to worker 1, which does not come before"));
  topology = tree();
  topology.policy = TopologyPolicy::kStripes;
  EXPECT_THAT(validate(topology, topology.workers()).error().detail, HasSubstr("worker 1 has two children"));
  topology = tree();
  topology.grafts[0][id(4)] = id(9);
  EXPECT_THAT(validate(topology, topology.workers()).error().detail, HasSubstr("is attached to worker 9"));
}

// All uplinks of a tree are shared evenly: 1 sends to two at 20 Mbit/s, 4 to one.
TEST(Topology, TimeOfATree) {
  std::vector<WorkerLink> links;
  for (std::uint64_t v = 1; v <= 6; ++v) links.push_back({id(v), mbit(40), mbit(1000), {}});
  const auto times = broadcast_time(tree(), {10'000'000}, {10'000'000}, mbit(80), links);
  ASSERT_TRUE(times);
  EXPECT_NEAR(seconds(times->time_of(id(1))), 1, 1e-9);
  EXPECT_NEAR(seconds(times->time_of(id(2))), 5, 1e-9);
  EXPECT_NEAR(seconds(times->time_of(id(4))), 5, 1e-9);
  EXPECT_NEAR(seconds(times->time_of(id(5))), 7, 1e-9);
  EXPECT_NEAR(seconds(times->time_of(id(6))), 9, 1e-9);
}

// Expects that no sender exceeds its uplink. `stripe_rate`: of one stripe, bit/s.
void expect_within_uplinks(const Topology& topology, const std::vector<ChainWorker>& workers, BitRate learner_up,
                           double stripe_rate) {
  std::map<WorkerId, std::size_t> children;
  for (std::size_t s = 0; s < topology.stripes(); ++s)
    for (const Edge& edge : edges_of(topology, s)) ++children[edge.from];
  EXPECT_LE(static_cast<double>(children[kLearnerId]) * stripe_rate, learner_up.bits_per_s * (1 + 1e-6))
      << topology.to_text();
  for (const ChainWorker& w : workers)
    EXPECT_LE(static_cast<double>(children[w.id]) * stripe_rate, w.forwarding_up().bits_per_s * (1 + 1e-6));
}

Topology planned(const std::vector<ChainWorker>& workers, BitRate learner_up, TopologyPolicy policy) {
  auto topology = plan_chains(learner_up, mbit(8), workers, policy);
  EXPECT_TRUE(topology) << topology.error().message();
  return *topology;
}

TEST(Stripes, EqualUplinksNeedNoMoreThanOneChain) {
  std::vector<ChainWorker> workers;
  for (std::uint64_t v = 1; v <= 8; ++v) workers.push_back(worker(v, 20));
  const StripePlan plan = plan_stripes(mbit(20), workers);
  EXPECT_EQ(plan.stripes, 1u);
  EXPECT_NEAR(plan.rate.mbit_per_s(), 20, 0.01);
}

TEST(Stripes, UnequalUplinksAllCarryTheirPart) {
  // One chain is as slow as its slowest forwarder. With stripes 15 = r where s + 10 s/r + 20 s/r = 3 s.
  const std::vector<ChainWorker> workers{worker(1, 30), worker(2, 10), worker(3, 10, false)};
  const StripePlan plan = plan_stripes(mbit(20), workers);
  EXPECT_GT(plan.stripes, 1u);
  EXPECT_GT(plan.rate.mbit_per_s(), 14);
  EXPECT_LE(plan.rate.mbit_per_s(), 15.01);
  const Topology topology = planned(workers, mbit(20), TopologyPolicy::kStripes);
  expect_within_uplinks(topology, workers, mbit(20), plan.rate.bits_per_s / static_cast<double>(plan.stripes));
}

TEST(Stripes, WithoutForwardersTheLearnerServesEveryWorker) {
  const std::vector<ChainWorker> workers{worker(1, 10, false), worker(2, 10, false)};
  const StripePlan plan = plan_stripes(mbit(20), workers);
  EXPECT_NEAR(plan.rate.mbit_per_s(), 10, 0.01);
  EXPECT_TRUE(validate(planned(workers, mbit(20), TopologyPolicy::kStripes), std::vector{id(1), id(2)}));
}

// Fleet b of the measurements: four fast and four slow uplinks. Chains end at 43.6 Mbit/s.
TEST(Trees, UseEveryUplink) {
  std::vector<ChainWorker> workers;
  for (std::uint64_t v = 1; v <= 8; ++v) workers.push_back(worker(v, v <= 4 ? 80 : 20, true, 100));
  const StripePlan plan = plan_stripes(mbit(100), workers, {.children_per_stripe_max = kTreeChildrenMax});
  EXPECT_GT(plan.rate.mbit_per_s(), 58);
  EXPECT_LE(plan.rate.mbit_per_s(), 62.5);
  const Topology topology = planned(workers, mbit(100), TopologyPolicy::kTrees);
  expect_within_uplinks(topology, workers, mbit(100), plan.rate.bits_per_s / static_cast<double>(plan.stripes));
  EXPECT_LE(topology.depth(), 4u);
}

// Formula 4.6, worked cases: 16 GB to 32 workers, ratio to the lower bound. The planner stops at 3 % from the best.
TEST(Trees, WorkedCases) {
  struct Case {
    double learner_up, ups[2];
    std::size_t fast;
    double ratio;
  };
  for (const Case& c :
       {Case{2000, {500, 500}, 32, 1.055}, Case{2000, {1000, 200}, 16, 1.08}, Case{1000, {1000, 100}, 28, 1.03}}) {
    SCOPED_TRACE(c.ratio);
    std::vector<ChainWorker> workers;
    std::vector<WorkerLink> links;
    for (std::uint64_t v = 1; v <= 32; ++v) {
      workers.push_back(worker(v, c.ups[v > c.fast], true, 10'000));
      links.push_back({id(v), workers.back().up, workers.back().down, {}});
    }
    const StripePlan plan = plan_stripes(mbit(c.learner_up), workers, {.children_per_stripe_max = kTreeChildrenMax});
    const Bytes payload{16'000'000'000};
    const double bound = seconds(lower_bound(payload, mbit(c.learner_up), links));
    const double planned_s = static_cast<double>(payload.count) / plan.rate.bytes_per_s();
    EXPECT_LE(planned_s, bound * c.ratio * 1.03);
    EXPECT_GE(planned_s, bound * (1 - 1e-9));
    const auto times = broadcast_time(planned(workers, mbit(c.learner_up), TopologyPolicy::kTrees), payload,
                                      {1'000'000}, mbit(c.learner_up), links);
    ASSERT_TRUE(times);
    EXPECT_LE(seconds(times->last()), planned_s * 1.01);
  }
}

// Over random fleets, no plan exceeds an uplink, and trees are as fast as the bound and rounding allow.
TEST(Trees, AreAffordableAndNearTheBound) {
  Random random(10);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE(round);
    std::vector<ChainWorker> workers;
    const auto n = static_cast<std::uint64_t>(random.between(1, 40));
    for (std::uint64_t v = 1; v <= n; ++v) {
      workers.push_back(worker(v, static_cast<double>(random.between(1, 100)), random.below(6) != 0,
                               static_cast<double>(random.between(100, 200))));
      workers.back().may_seed = random.below(4) != 0;
    }
    const BitRate learner_up = mbit(static_cast<double>(random.between(5, 200)));
    const StripePlan plan = plan_stripes(learner_up, workers, {.children_per_stripe_max = kTreeChildrenMax});
    const Topology topology = planned(workers, learner_up, TopologyPolicy::kTrees);
    const double stripe_rate = plan.rate.bits_per_s / static_cast<double>(plan.stripes);
    ASSERT_GT(stripe_rate, 0);
    expect_within_uplinks(topology, workers, learner_up, stripe_rate);
    for (std::size_t s = 0; s < topology.stripes(); ++s) {
      std::map<WorkerId, std::size_t> children;
      for (const Edge& edge : edges_of(topology, s)) ++children[edge.from];
      for (const auto& [parent, count] : children)
        if (parent != kLearnerId) {
          EXPECT_LE(count, kTreeChildrenMax);
        }
    }
    std::vector<WorkerLink> links;
    for (const ChainWorker& w : workers) links.push_back({w.id, w.may_forward ? w.up : BitRate{0}, w.down, {}});
    const Bytes payload{1'000'000'000}, chunk{1'000};
    const auto times = broadcast_time(topology, payload, chunk, learner_up, links);
    ASSERT_TRUE(times);
    EXPECT_GE(seconds(times->last()), seconds(lower_bound(payload, learner_up, links)) * (1 - 1e-9));
    const double rounding = (1 + 1 / static_cast<double>(n)) / kPlannedStripesMax;  // formula 4.6
    EXPECT_LE(seconds(times->last()), seconds(lower_bound(payload, learner_up, links)) * (1 + rounding) * 1.04);
  }
}

// Over random fleets, no plan exceeds an uplink, and stripes are never slower than the best chains.
TEST(Stripes, AreAffordableAndNotSlowerThanChains) {
  Random random(9);
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(round);
    std::vector<ChainWorker> workers;
    const auto n = static_cast<std::uint64_t>(random.between(1, 20));
    for (std::uint64_t v = 1; v <= n; ++v)
      workers.push_back(worker(v, static_cast<double>(random.between(1, 40)), random.below(5) != 0,
                               static_cast<double>(random.between(20, 200))));
    const BitRate learner_up = mbit(static_cast<double>(random.between(5, 100)));
    const StripePlan plan = plan_stripes(learner_up, workers);
    ASSERT_TRUE(std::has_single_bit(plan.stripes));
    ASSERT_LE(plan.stripes, kPlannedStripesMax);
    const Topology topology = planned(workers, learner_up, TopologyPolicy::kStripes);
    if (plan.rate.bits_per_s > 0)
      expect_within_uplinks(topology, workers, learner_up, plan.rate.bits_per_s / static_cast<double>(plan.stripes));
    std::vector<WorkerLink> links;
    for (const ChainWorker& w : workers) links.push_back({w.id, w.up, w.down, {}});
    const Bytes payload{1'000'000'000}, chunk{1'000};
    const auto stripes = broadcast_time(topology, payload, chunk, learner_up, links);
    const auto chains =
        broadcast_time(planned(workers, learner_up, TopologyPolicy::kBestChains), payload, chunk, learner_up, links);
    ASSERT_TRUE(stripes && chains);
    EXPECT_LE(seconds(stripes->last()), seconds(chains->last()) * 1.05);
    EXPECT_GE(seconds(stripes->last()), seconds(lower_bound(payload, learner_up, links)) * (1 - 1e-9));
  }
}

}  // namespace
}  // namespace echoline::chains
