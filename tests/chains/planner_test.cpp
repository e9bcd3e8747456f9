// Chain planning and repair: known plans, and properties over random fleets.
#include "chains/planner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/random.hpp"
#include "chains/fleet_graph.hpp"
#include "tests/chains/parents.hpp"

namespace echoline::chains {
namespace {

constexpr TopologyPolicy kPolicies[] = {TopologyPolicy::kEcho2, TopologyPolicy::kBestChains, TopologyPolicy::kStar,
                                        TopologyPolicy::kStripes, TopologyPolicy::kTrees};

BitRate mbit(double m) { return BitRate::from_mbit_per_s(m); }
WorkerId id(std::uint64_t v) { return WorkerId{v}; }
std::vector<WorkerId> ids(std::initializer_list<std::uint64_t> values) {
  std::vector<WorkerId> out;
  for (const auto v : values) out.push_back(id(v));
  return out;
}
ChainWorker worker(std::uint64_t v, double score = 0.5, bool may_forward = true, double up_mbit = 8) {
  return {.id = id(v), .up = mbit(up_mbit), .down = mbit(100), .score = score, .may_forward = may_forward};
}
Topology plan(const std::vector<ChainWorker>& workers, TopologyPolicy policy = TopologyPolicy::kEcho2,
              double learner_mbit = 24) {
  auto topology = plan_chains(mbit(learner_mbit), mbit(8), workers, policy);
  EXPECT_TRUE(topology) << topology.error().message();
  return *topology;
}
Status check(const Topology& topology, const std::vector<ChainWorker>& workers) {
  std::vector<WorkerId> all;
  for (const ChainWorker& w : workers) all.push_back(w.id);
  return validate(topology, all);
}

TEST(Echo2, SeedsByScoreThenRoundRobinToTheTails) {
  const Topology topology = plan(
      {worker(1, 0.1), worker(2, 0.9), worker(3, 0.5), worker(4, 0.8), worker(5, 0.7), worker(6, 0.6), worker(7, 0.2)});
  EXPECT_EQ(topology.chains_wanted, 3u);
  EXPECT_EQ(topology.chains, (Chains{ids({2, 6, 1}), ids({4, 3}), ids({5, 7})}));
  EXPECT_EQ(parent_in_first_stripe(topology, id(2)), kLearnerId);
  EXPECT_EQ(parent_in_first_stripe(topology, id(1)), id(6));
  EXPECT_EQ(parent_in_first_stripe(topology, id(99)), std::nullopt);
  EXPECT_EQ(parent_in_first_stripe(topology, kLearnerId), std::nullopt);
  EXPECT_EQ(topology.children_of(kLearnerId), ids({2, 4, 5}));
  EXPECT_EQ(topology.children_of(id(6)), ids({1}));
  EXPECT_TRUE(topology.children_of(id(1)).empty());
  EXPECT_EQ(topology.depth(), 3u);
  EXPECT_EQ(topology.to_text(), "learner -> 2 -> 6 -> 1 | learner -> 4 -> 3 | learner -> 5 -> 7");
}

TEST(Echo2, ChainCountIsTheFloorAndAtLeastOne) {
  std::vector<ChainWorker> many;
  for (std::uint64_t v = 1; v <= 9; ++v) many.push_back(worker(v));
  EXPECT_EQ(plan(many, TopologyPolicy::kEcho2, 23.9).chains.size(), 2u);
  EXPECT_EQ(plan(many, TopologyPolicy::kEcho2, 2).chains.size(), 1u);
  EXPECT_EQ(plan(many, TopologyPolicy::kEcho2, 800).chains.size(), 9u);
  // 0.3 / 0.1 is 2.9999999999999996 in doubles.
  const auto topology = plan_chains(BitRate{0.3}, BitRate{0.1}, many, TopologyPolicy::kEcho2);
  ASSERT_TRUE(topology);
  EXPECT_EQ(topology->chains_wanted, 3u);
}

TEST(Echo2, EqualScoresAreOrderedById) {
  EXPECT_EQ(plan({worker(3), worker(1), worker(2), worker(4)}).chains, (Chains{ids({1, 4}), ids({2}), ids({3})}));
}

TEST(Echo2, WorkersThatMayNotForwardStandAtTailsOfTheirOwn) {
  const Topology topology = plan(
      {worker(1, 0.9, false), worker(2, 0.8, false), worker(3, 0.5), worker(4, 0.4), worker(5, 0.3), worker(6, 0.2)});
  EXPECT_EQ(topology.chains, (Chains{ids({3, 6}), ids({4, 1}), ids({5, 2})}));
  EXPECT_EQ(topology.leaves_only, ids({1, 2}));
}

TEST(Echo2, MoreLeavesThanChainsGetChainsOfTheirOwn) {
  const Topology topology = plan({worker(1, 0.9, false), worker(2, 0.8, false), worker(3, 0.5), worker(4, 0.4, false)},
                                 TopologyPolicy::kEcho2, 8);
  EXPECT_EQ(topology.chains_wanted, 1u);
  EXPECT_EQ(topology.chains, (Chains{ids({3, 4}), ids({1}), ids({2})}));
}

TEST(Echo2, WorkersThatMayNotSeedStandBehindThoseThatMay) {
  auto demoted = worker(1, 0.99);
  demoted.may_seed = false;
  EXPECT_EQ(plan({demoted, worker(2, 0.1), worker(3, 0.2), worker(4, 0.3)}).chains,
            (Chains{ids({4, 1}), ids({3}), ids({2})}));
  EXPECT_EQ(plan({demoted}).chains, (Chains{ids({1})}));  // the only worker: it must still receive
}

TEST(BestChains, SlowUplinksStandAtTheTails) {
  // B = 24: r(1) = min(24, 2) = 2, r(2) = min(12, 8) = 8, r(3) = 8, r(4) = 6: ties go to 3.
  const std::vector<ChainWorker> workers{worker(1, 0.5, true, 1), worker(2, 0.5, true, 2), worker(3, 0.5, true, 8),
                                         worker(4, 0.5, true, 8), worker(5, 0.9, true, 20)};
  EXPECT_EQ(best_chain_count(mbit(24), workers), 3u);
  const Topology topology = plan(workers, TopologyPolicy::kBestChains);
  ASSERT_EQ(topology.chains.size(), 3u);
  std::set<std::uint64_t> with_child;
  for (const ChainWorker& w : workers)
    if (!topology.children_of(w.id).empty()) with_child.insert(w.id.value);
  EXPECT_EQ(with_child, (std::set<std::uint64_t>{3, 5}));
}

TEST(BestChains, HomogeneousTiesGoToTheShorterChains) {
  const std::vector<ChainWorker> six{worker(1), worker(2), worker(3), worker(4), worker(5), worker(6)};
  EXPECT_EQ(best_chain_count(mbit(24), six), 3u);
  EXPECT_EQ(plan(six, TopologyPolicy::kBestChains).depth(), 2u);
}

TEST(Star, TheLearnerServesEveryWorker) {
  const Topology topology = plan({worker(1), worker(2, 0.9), worker(3, 0.1, false)}, TopologyPolicy::kStar);
  EXPECT_EQ(topology.chains, (Chains{ids({2}), ids({1}), ids({3})}));
  EXPECT_EQ(add_worker(topology, worker(4)).depth(), 1u);
}

TEST(PlanChains, NoWorkersNoChains) {
  for (const auto policy : kPolicies) EXPECT_TRUE(plan({}, policy).chains.empty());
}

TEST(PlanChains, BadInputNamesTheWorker) {
  const auto error = [](BitRate learner_rate, BitRate chain_rate, const std::vector<ChainWorker>& workers) {
    const auto topology = plan_chains(learner_rate, chain_rate, workers, TopologyPolicy::kEcho2);
    EXPECT_FALSE(topology);
    EXPECT_EQ(topology.error().code, Code::kInvalid);
    return topology.error().detail;
  };
  using testing::HasSubstr;
  EXPECT_THAT(error(mbit(0), mbit(8), {worker(1)}), HasSubstr("uplink"));
  EXPECT_THAT(error(mbit(24), mbit(0), {worker(1)}), HasSubstr("one chain"));
  EXPECT_THAT(error(mbit(24), mbit(8), {worker(0)}), HasSubstr("id 0"));
  EXPECT_THAT(error(mbit(24), mbit(8), {worker(7), worker(3), worker(7)}), HasSubstr("worker 7"));
  EXPECT_THAT(error(mbit(24), mbit(8), {worker(5, 0.5, true, 0)}), HasSubstr("worker 5"));
  EXPECT_THAT(error(mbit(24), mbit(8), {worker(6, std::numeric_limits<double>::quiet_NaN())}), HasSubstr("worker 6"));
  EXPECT_THAT(error(mbit(24), mbit(8), std::vector<ChainWorker>(kChainWorkersMax + 1)), HasSubstr("at most"));
}

TEST(Detach, TheChildGoesToTheParentAndNothingElseMoves) {
  const Topology topology = plan(
      {worker(1, 0.9), worker(2, 0.8), worker(3, 0.7), worker(4, 0.6), worker(5, 0.5), worker(6, 0.4), worker(7, 0.3)});
  const Topology without_4 = remove_worker(topology, id(4));
  EXPECT_EQ(parent_in_first_stripe(without_4, id(7)), id(1));
  EXPECT_EQ(without_4.chains[1], topology.chains[1]);
  EXPECT_EQ(without_4.chains[2], topology.chains[2]);
  EXPECT_EQ(parent_in_first_stripe(remove_worker(topology, id(1)), id(4)), kLearnerId);
  EXPECT_EQ(remove_worker(topology, id(7)).chains[0], ids({1, 4}));
  EXPECT_EQ(remove_worker(topology, id(99)), topology);
  const Topology only_worker_1 = plan({worker(1)});
  EXPECT_TRUE(remove_worker(only_worker_1, id(1)).chains.empty());
}

TEST(Append, JoinsTheShortestChainWithAForwardingTail) {
  const Topology topology = plan({worker(1, 0.9), worker(2, 0.8), worker(3, 0.7), worker(4, 0.6)});
  EXPECT_EQ(parent_in_first_stripe(add_worker(topology, worker(9)), id(9)), id(2));
  // The last workers of both chains may not forward.
  const Topology tails_closed =
      plan({worker(1, 0.9), worker(4, 0.8), worker(2, 0.7, false), worker(3, 0.6, false)}, TopologyPolicy::kEcho2, 16);
  ASSERT_EQ(tails_closed.chains, (Chains{ids({1, 2}), ids({4, 3})}));
  const Topology before_tail = add_worker(tails_closed, worker(9));
  EXPECT_EQ(before_tail.chains, (Chains{ids({1, 9, 2}), ids({4, 3})}));
  // A worker that may not forward cannot stand before another, so it begins a chain.
  const Topology own_chain = add_worker(tails_closed, worker(9, 0.5, false));
  EXPECT_EQ(own_chain.chains, (Chains{ids({1, 2}), ids({4, 3}), ids({9})}));
}

TEST(Append, RefillsAChainThatDiedOut) {
  const Topology topology =
      remove_worker(plan({worker(1, 0.9), worker(2, 0.8), worker(3, 0.7), worker(4, 0.6)}), id(2));
  ASSERT_EQ(topology.chains.size(), 2u);
  EXPECT_EQ(parent_in_first_stripe(add_worker(topology, worker(5)), id(5)), kLearnerId);
  EXPECT_EQ(add_worker(Topology{}, worker(5)).chains, (Chains{ids({5})}));
}

TEST(Append, TwiceTheSameWorkerIsABug) {
  const Topology topology = plan({worker(1)});
  EXPECT_DEATH((void)add_worker(topology, worker(1)), "worker 1");
}

std::vector<ChainWorker> random_fleet(Random& random) {
  std::vector<ChainWorker> workers;
  const auto worker_count = random.between(0, 24);
  for (std::int64_t worker_id = 1; worker_id <= worker_count; ++worker_id) {
    auto w = worker(static_cast<std::uint64_t>(worker_id), static_cast<double>(random.below(5)) / 4,
                    random.below(4) != 0, static_cast<double>(random.between(1, 40)));
    w.may_seed = random.below(5) != 0;
    workers.push_back(w);
  }
  return workers;
}

TEST(PlanChains, EveryWorkerOfRandomFleetsReceivesOnce) {
  Random random(5);
  for (int round = 0; round < 500; ++round) {
    auto workers = random_fleet(random);
    for (const auto policy : kPolicies) {
      const Topology topology = plan(workers, policy, static_cast<double>(random.between(1, 100)));
      const Status status = check(topology, workers);
      ASSERT_TRUE(status) << "round " << round << ": " << status.error().message();
    }
  }
}

TEST(PlanChains, TheOrderOfTheInputDoesNotMatter) {
  Random random(6);
  for (int round = 0; round < 100; ++round) {
    auto workers = random_fleet(random);
    auto shuffled = workers;
    for (std::size_t i = shuffled.size(); i > 1; --i) std::swap(shuffled[i - 1], shuffled[random.below(i)]);
    for (const auto policy : kPolicies) EXPECT_EQ(plan(workers, policy), plan(shuffled, policy));
  }
}

TEST(PlanChains, BestChainsIsNeverSlowerThanAnyOtherCount) {
  // Tries every number of chains, computing the rate as best_chain_count() defines it.
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    auto workers = random_fleet(random);
    if (workers.empty()) continue;
    const double learner_mbit = static_cast<double>(random.between(1, 100));
    std::vector<double> up_mbit;
    for (const auto& w : workers) up_mbit.push_back(w.may_forward ? w.up.mbit_per_s() : 0);
    std::sort(up_mbit.begin(), up_mbit.end());
    // The last workers of the chains send nothing, so they are the slowest ones. 100 Mbit/s is every downlink.
    const auto rate_mbit = [&](std::size_t chain_count) {
      return std::min({learner_mbit / static_cast<double>(chain_count),
                       chain_count < up_mbit.size() ? up_mbit[chain_count] : 1e9, 100.0});
    };
    const std::size_t chosen = best_chain_count(mbit(learner_mbit), workers);
    for (std::size_t other = 1; other <= workers.size(); ++other) {
      EXPECT_GE(rate_mbit(chosen), rate_mbit(other) * (1 - 1e-6));
      if (other > chosen) {
        EXPECT_LT(rate_mbit(other), rate_mbit(chosen));
      }
    }
  }
}

TEST(Repair, LongSequencesOfLossesAndJoinsStayATree) {
  Random random(8);
  for (const auto policy : kPolicies) {
    if (policy == TopologyPolicy::kTrees) continue;  // has a repair of its own
    std::vector<ChainWorker> workers = random_fleet(random);
    Topology topology = plan(workers, policy);
    std::uint64_t next_id = 100;
    for (int step = 0; step < 300; ++step) {
      if (!workers.empty() && random.below(2) == 0) {
        const auto lost = random.below(workers.size());
        topology = remove_worker(topology, workers[lost].id);
        workers.erase(workers.begin() + static_cast<std::ptrdiff_t>(lost));
      } else {
        workers.push_back(worker(next_id++, 0.5, random.below(3) != 0));
        topology = add_worker(topology, workers.back());
      }
      const Status status = check(topology, workers);
      ASSERT_TRUE(status) << status.error().message();
    }
  }
}

}  // namespace
}  // namespace echoline::chains
