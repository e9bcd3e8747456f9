// Broadcasts under virtual time, with the real protocol cores: their times against the formulas, and faults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/log.hpp"
#include "base/random.hpp"
#include "chains/broadcast_model.hpp"
#include "sim/broadcast_scenario.hpp"

namespace echoline::sim {
namespace {

using std::chrono::milliseconds;

BroadcastScenario homogeneous(std::size_t workers, double learner_mbit, double worker_mbit) {
  BroadcastScenario s;
  s.workers = workers;
  s.learner_up = BitRate::from_mbit_per_s(learner_mbit);
  s.worker_link = {BitRate::from_mbit_per_s(worker_mbit), BitRate::from_mbit_per_s(worker_mbit)};
  s.chain_rate = BitRate::from_mbit_per_s(worker_mbit);
  return s;
}

BroadcastResult run(const BroadcastScenario& s) {
  log::configure(log::Level::kError, "simulation");
  auto result = simulate_broadcast(s);
  EXPECT_TRUE(result.has_value()) << (result ? "" : result.error().message());
  if (!result) return {};
  EXPECT_TRUE(result->finished) << "seed " << s.seed << ": " << result->unfinished;
  return std::move(*result);
}

void print(const char* name, const BroadcastResult& r) {
  std::printf("%-28s T_b %.3f s, last %.3f s, formula %.3f s, bound %.3f s, learner %.2f MB, dup %llu, %llu events\n",
              name, r.publications[0].t_b ? seconds(*r.publications[0].t_b) : -1, seconds(r.publications[0].last()),
              seconds(r.predicted), seconds(r.lower_bound), static_cast<double>(r.learner_chunk_bytes_sent.count) / 1e6,
              static_cast<unsigned long long>(r.chunks_duplicate), static_cast<unsigned long long>(r.events));
}

TEST(BroadcastSim, ChainsTakeTheTimeOfTheFormula) {
  for (const bool in_cores : {false, true})
    for (const std::size_t workers : {3u, 6u, 16u}) {
      BroadcastScenario s = homogeneous(workers, 24, 8);
      s.cores_limit_rate = in_cores;
      s.chunk = {16 * 1024};
      s.delay = milliseconds(20);
      const BroadcastResult r = run(s);
      print(in_cores ? "chains, limits in cores" : "chains, limits in network", r);
      EXPECT_NEAR(seconds(r.publications[0].last()) / seconds(r.predicted), 1, 0.1) << workers;
      EXPECT_GE(r.publications[0].last(), r.lower_bound);
      EXPECT_EQ(r.chunks_duplicate, 0u);
    }
}

TEST(BroadcastSim, AStarSharesTheUplink) {
  for (const bool in_cores : {false, true}) {
    BroadcastScenario s = homogeneous(16, 24, 8);
    s.cores_limit_rate = in_cores;
    s.chunk = {16 * 1024};
    s.topology = chains::TopologyPolicy::kStar;
    const BroadcastResult r = run(s);
    print(in_cores ? "star, limits in cores" : "star, limits in network", r);
    EXPECT_EQ(r.topology.chains.size(), 16u);
    // Formula 4.3: each gets min(d, B/N).
    const double share = std::min(s.worker_link.down->bytes_per_s(), s.learner_up.bytes_per_s() / 16);
    EXPECT_NEAR(seconds(r.publications[0].last()), 1e6 / share, 0.05 * 1e6 / share);
    EXPECT_EQ(r.learner_chunk_bytes_sent.count, 16'000'000u);
  }
}

TEST(BroadcastSim, ChainsBeatTheStarAsTheFormulasSay) {
  BroadcastScenario s = homogeneous(16, 24, 8);
  s.chunk = {16 * 1024};
  const BroadcastResult chains = run(s);
  s.topology = chains::TopologyPolicy::kStar;
  const BroadcastResult star = run(s);
  const double ratio = seconds(star.publications[0].last()) / seconds(chains.publications[0].last());
  std::printf("16 workers: the star takes %.2f times as long, and %.1f times the learner's bytes\n", ratio,
              static_cast<double>(star.learner_chunk_bytes_sent.count) /
                  static_cast<double>(chains.learner_chunk_bytes_sent.count));
  // 5.33 s against (62 + 6 - 1) chunks of 16.4 ms.
  EXPECT_NEAR(ratio, 5.33 / 1.09, 0.4);
  EXPECT_LE(chains.learner_chunk_bytes_sent.count, 3'000'000u);
  EXPECT_EQ(chains.topology.chains.size(), 3u);
}

TEST(BroadcastSim, TheSameSeedGivesTheSameTrace) {
  BroadcastScenario s = homogeneous(12, 24, 8);
  s.jitter = milliseconds(5);
  s.delay = milliseconds(10);
  s.publications = 3;
  s.kills = {{2, milliseconds(300), Death::kCrash}};
  s.late_joins = {milliseconds(700)};
  const BroadcastResult a = run(s), b = run(s);
  EXPECT_EQ(a.trace_hash, b.trace_hash);
  EXPECT_EQ(a.events, b.events);
  s.seed = 2;
  EXPECT_NE(run(s).trace_hash, a.trace_hash);
}

TEST(BroadcastSim, TheRestFinishesWhenAnInteriorWorkerDies) {
  for (const auto death : {Death::kCrash, Death::kPowerLoss})
    for (const std::size_t victim : {0u, 1u, 3u}) {  // by joining order; the chain is 0 1 2 3 4 5
      BroadcastScenario s = homogeneous(6, 8, 8);
      s.chunk = {16 * 1024};
      s.delay = milliseconds(10);
      s.kills = {{victim, milliseconds(500), death}};
      s.publications = 3;
      const BroadcastResult whole = [&] {
        auto calm = s;
        calm.kills.clear();
        return run(calm);
      }();
      const BroadcastResult r = run(s);
      print(death == Death::kCrash ? "crash" : "silent death", r);
      ASSERT_EQ(r.topology.chains.size(), 1u);
      EXPECT_EQ(r.publications[0].completions.size(), 5u);
      // The crash costs about the chunks in flight. The silent death also costs the heartbeat timeout.
      const Duration allowed = death == Death::kCrash ? milliseconds(300) : milliseconds(4600);
      EXPECT_LT(r.publications[2].last(), whole.publications[2].last() + allowed);
      // Only chunks in flight are sent twice: less than a tenth of the payload for each of the others.
      EXPECT_LT(r.worker_chunk_bytes_in.count, 6u * 1'400'000u);
      EXPECT_LT(r.chunks_duplicate, 12u);
    }
}

TEST(BroadcastSim, ALateJoinerIsBroughtUpByTheWorkerBeforeIt) {
  BroadcastScenario s = homogeneous(3, 8, 8);
  s.publications = 5;
  s.publish_every = std::chrono::seconds(2);
  s.late_joins = {milliseconds(3500)};
  const BroadcastResult r = run(s);
  EXPECT_EQ(r.publications[4].completions.size(), 4u);
  EXPECT_EQ(r.snapshots_asked, 0u);
  EXPECT_EQ(r.learner_chunk_bytes_sent.count, 1'800'000u);  // the learner did not send a byte more
}

TEST(BroadcastSim, ALateJoinerWithoutAHelperGetsASnapshotFromTheLearner) {
  BroadcastScenario s = homogeneous(3, 24, 8);
  s.publications = 8;
  s.learner_store = s.worker_store = {1'500'000};  // the first snapshot is soon forgotten
  s.late_joins = {milliseconds(6200), milliseconds(6300)};
  const BroadcastResult r = run(s);
  EXPECT_EQ(r.publications[7].completions.size(), 5u);
  EXPECT_GE(r.snapshots_asked, 1u);
}

TEST(BroadcastSim, ALaggardSkipsDeltasForASnapshot) {
  BroadcastScenario s = homogeneous(4, 24, 8);
  s.chain_rate = BitRate::from_mbit_per_s(6);  // four chains
  s.worker_links = {
      {BitRate::from_mbit_per_s(8), BitRate::from_mbit_per_s(1)}};  // 1.6 s for a delta that comes every 0.3 s
  s.publications = 40;
  s.publish_every = milliseconds(300);
  s.quorum = 0.7;
  const BroadcastResult r = run(s);
  EXPECT_GE(r.snapshots_asked, 1u);
  // Deltas alone would have taken 8 s for the first and 1.6 s for each of 39.
  EXPECT_LT(seconds(r.virtual_time), 8 + 39 * 1.6 * 0.6);
  // It does not delay the others.
  EXPECT_LT(seconds(*r.publications.back().t_b), 1.0);
}

TEST(BroadcastSim, ACorruptChunkIsAskedForAgainAndTwoChildrenThatAgreeEndIt) {
  BroadcastScenario s = homogeneous(3, 8, 8);
  s.chunk = {16 * 1024};
  s.corruptions = {milliseconds(100)};
  const BroadcastResult once = run(s);
  EXPECT_EQ(once.chunks_corrupt, 1u);
  EXPECT_LE(once.worker_chunk_bytes_in.count, 3'000'000u + 16'384u);
  for (int i = 1; i < 20; ++i) s.corruptions.push_back(milliseconds(100 + 100 * i));
  const BroadcastResult always = run(s);
  // Two bad chunks part it from its child, and two more from the next. Then no worker is left to receive from it.
  EXPECT_EQ(always.chunks_corrupt, 4u);
  EXPECT_EQ(always.publications[0].completions.size(), 3u);
}

TEST(BroadcastSim, StripesUseTheUplinksThatChainsLeaveIdle) {
  BroadcastScenario s = homogeneous(8, 24, 8);
  s.chunk = {16 * 1024};
  s.payload = {2'000'000};
  s.cores_limit_rate = true;  // the planner knows the links
  for (std::size_t i = 0; i < 8; ++i)
    s.worker_links.push_back({BitRate::from_mbit_per_s(i % 2 ? 16 : 4), BitRate::from_mbit_per_s(40)});
  const BroadcastResult chains = run(s);
  s.topology = chains::TopologyPolicy::kStripes;
  const BroadcastResult stripes = run(s);
  print("unequal uplinks, chains", chains);
  print("unequal uplinks, stripes", stripes);
  EXPECT_LT(stripes.publications[0].last(), chains.publications[0].last());
}

// One worker of twelve has a tenth of the others' links. It does not delay them, whether it declares its rate or not.
// A learner and two nodes of its trainer, each with 100 Mbit/s towards the workers.
BroadcastScenario with_nodes(std::size_t nodes, chains::TopologyPolicy topology) {
  BroadcastScenario s = homogeneous(8, 100, 400);
  s.worker_link.down = BitRate::from_mbit_per_s(1000);
  s.cores_limit_rate = true;
  s.topology = topology;
  s.nodes = nodes;
  s.node_up = BitRate::from_mbit_per_s(100);
  s.payload = {50'000'000};
  // The simulated network takes 256 KB per connection and round trip, so 5 ms would limit the local network to 26 MB/s.
  s.delay = milliseconds(1);
  s.quorum = 1;
  return s;
}

TEST(BroadcastSim, TheUplinksOfATrainersNodesAddUp) {
  for (const auto topology : {chains::TopologyPolicy::kStripes, chains::TopologyPolicy::kTrees}) {
    const BroadcastResult alone = run(with_nodes(0, topology)), together = run(with_nodes(2, topology));
    print("learner alone", alone);
    print("learner and two nodes", together);
    const double share = seconds(together.publications[0].last()) / seconds(alone.publications[0].last());
    // 32 stripes are divided into 11, 11 and 10, so the bound is 11/32 = 0.344.
    EXPECT_GT(share, 0.33) << to_string(topology);
    EXPECT_LT(share, 0.40) << to_string(topology);
    EXPECT_GE(together.publications[0].last(), together.lower_bound);
    EXPECT_NEAR(seconds(together.publications[0].last()) / seconds(together.predicted), 1, 0.15) << to_string(topology);
  }
}

TEST(BroadcastSim, WorkersOfADeadNodeGetOtherParents) {
  for (const Death death : {Death::kCrash, Death::kPowerLoss})
    for (const auto topology :
         {chains::TopologyPolicy::kStripes, chains::TopologyPolicy::kTrees, chains::TopologyPolicy::kEcho2}) {
      BroadcastScenario s = with_nodes(2, topology);
      s.publications = 3;
      s.kills = {{.worker = 9, .at = milliseconds(300), .death = death}};
      const BroadcastResult r = run(s);
      EXPECT_EQ(r.chunks_corrupt, 0u);
      EXPECT_TRUE(r.publications[2].t_b) << to_string(topology);
    }
}

// A node that joins late lacks the base of the newest delta. It feeds no worker until it has it.
TEST(BroadcastSim, NodesForwardOverEveryTopology) {
  for (const auto topology :
       {chains::TopologyPolicy::kEcho2, chains::TopologyPolicy::kBestChains, chains::TopologyPolicy::kStar}) {
    BroadcastScenario s = with_nodes(1, topology);
    s.publications = 4;
    s.late_joins = {milliseconds(1500)};
    const BroadcastResult r = run(s);
    print(std::string(to_string(topology)).c_str(), r);
    EXPECT_EQ(r.chunks_duplicate, 0u);
  }
}

TEST(BroadcastSim, AStragglerDelaysNoOtherWorkerInTrees) {
  for (const bool declared : {true, false}) {
    BroadcastScenario s = homogeneous(12, 100, 50);
    s.topology = chains::TopologyPolicy::kTrees;
    s.cores_limit_rate = declared;
    s.payload = s.delta = {5'000'000};
    s.chunk = {32 * 1024};
    s.delay = milliseconds(10);
    s.publications = 12;
    s.publish_every = milliseconds(1500);
    const BroadcastResult equal = run(s);
    s.worker_links.assign(12, s.worker_link);
    s.worker_links[3] = {BitRate::from_mbit_per_s(5), BitRate::from_mbit_per_s(5)};
    const BroadcastResult r = run(s);
    print(declared ? "trees, a declared straggler" : "trees, a straggler", r);
    // An undeclared straggler has to be found first.
    for (std::size_t i = declared ? 0 : 5; i < r.publications.size(); ++i) {
      ASSERT_TRUE(r.publications[i].t_b) << i;
      EXPECT_LT(seconds(*r.publications[i].t_b), 1.25 * seconds(*equal.publications[i].t_b)) << declared << ", " << i;
    }
  }
}

// Rented workers do not state their links. The learner then plans with those of their offers. Ten random fleets with
// links as unequal as a market's; T_b over the lower bound, for trees and stripes.
TEST(BroadcastSim, LinksOfOffersAreAsGoodAsDeclaredOnes) {
  for (const chains::TopologyPolicy policy : {chains::TopologyPolicy::kTrees, chains::TopologyPolicy::kStripes}) {
    std::vector<double> unknown, offered, declared;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      Random random(seed);
      BroadcastScenario s = homogeneous(16, 200, 50);
      s.topology = policy;
      s.payload = {8'000'000};
      s.chunk = {64 * 1024};
      s.delay = milliseconds(20);
      s.seed = seed;
      for (int i = 0; i < 16; ++i) {  // up 20 to 640 Mbit/s, down one to three times as much
        const double up = 20 * std::pow(2, 5 * random.uniform());
        s.worker_links.push_back(
            {BitRate::from_mbit_per_s(up), BitRate::from_mbit_per_s(up * (1 + 2 * random.uniform()))});
      }
      const auto over_bound = [](const BroadcastResult& r) {
        return seconds(r.publications[0].last()) / seconds(r.lower_bound);
      };
      unknown.push_back(over_bound(run(s)));
      s.links_offered = true;
      offered.push_back(over_bound(run(s)));
      s.links_offered = false;
      s.cores_limit_rate = true;
      declared.push_back(over_bound(run(s)));
    }
    const auto mean = [](const std::vector<double>& values) {
      return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
    };
    std::printf("%s, T_b over the bound, mean and worst: unknown %.2f, %.2f; offered %.2f, %.2f; declared %.2f, %.2f\n",
                std::string(to_string(policy)).c_str(), mean(unknown), *std::ranges::max_element(unknown),
                mean(offered), *std::ranges::max_element(offered), mean(declared), *std::ranges::max_element(declared));
    EXPECT_LT(mean(offered), mean(unknown));
    EXPECT_LT(mean(offered), 1.1 * mean(declared));
  }
}

// The learner replaces a topology planned for another fleet or other links by a faster one, without losing or
// repeating a chunk.
TEST(BroadcastSim, TheTopologyFollowsTheFleet) {
  BroadcastScenario narrow = homogeneous(12, 24, 8);  // too few bytes a second for a copy to each
  narrow.topology = chains::TopologyPolicy::kStar;
  narrow.payload = {500'000};
  narrow.delta = {300'000};
  narrow.chunk = {16 * 1024};
  BroadcastScenario far = homogeneous(8, 400, 100);  // enough of them, and every hop takes longer than all bytes
  far.topology = chains::TopologyPolicy::kEcho2;
  far.chain_rate = far.learner_up;
  far.payload = far.delta = {30'000};
  far.chunk = {16 * 1024};
  far.delay = milliseconds(150);
  for (BroadcastScenario s : {narrow, far}) {
    s.cores_limit_rate = true;
    s.heartbeat = milliseconds(100);
    s.publications = 16;
    s.publish_every = std::chrono::seconds(3);
    const BroadcastResult stays = run(s);
    s.chooses_topology = true;
    const BroadcastResult moves = run(s);
    const auto last = [](const BroadcastResult& r) { return seconds(r.publications.back().t_b.value()); };
    std::printf("%s: T_b %.3f s at first, %.3f s at last, %.3f s without\n", std::string(to_string(s.topology)).c_str(),
                seconds(moves.publications[1].t_b.value()), last(moves), last(stays));
    EXPECT_LT(last(moves), 0.5 * last(stays));
    EXPECT_EQ(moves.publications[1].t_b, stays.publications[1].t_b);
    EXPECT_EQ(moves.chunks_duplicate, 0u);
  }
}

// Three regions with narrow links between them. If the learner knows the regions, each payload crosses each link once,
// by the cores themselves.
TEST(BroadcastSim, OverRegionsAPayloadGoesByRelays) {
  BroadcastScenario s = homogeneous(18, 200, 60);
  s.topology = chains::TopologyPolicy::kTrees;
  s.cores_limit_rate = true;
  s.payload = s.delta = {6'000'000};
  s.chunk = {32 * 1024};
  s.publications = 3;
  s.one_at_a_time = true;
  s.delay = milliseconds(2);
  s.regions.links.assign(3, std::vector<chains::RegionLink>(3));
  for (std::uint32_t a = 0; a < 3; ++a)
    for (std::uint32_t b = 0; b < 3; ++b)
      if (a != b) s.regions.links[a][b] = {BitRate::from_mbit_per_s(30), milliseconds(40)};
  for (std::size_t i = 0; i < s.workers; ++i) s.worker_regions.push_back(static_cast<std::uint32_t>(i % 3));
  const BroadcastResult knows = run(s);
  s.regions_known = false;
  const BroadcastResult knows_not = run(s);
  const double published = 3.0 * 6'000'000;
  const auto last = [](const BroadcastResult& r) { return seconds(r.publications.back().t_b.value()); };
  std::printf("T_b %.2f s, predicted %.2f, bound %.2f; crossed %.2f times; without: %.2f s, %.2f times\n", last(knows),
              seconds(knows.predicted), seconds(knows.lower_bound),
              static_cast<double>(knows.bytes_crossed.count) / published, last(knows_not),
              static_cast<double>(knows_not.bytes_crossed.count) / published);
  EXPECT_LT(static_cast<double>(knows.bytes_crossed.count) / published,
            2.2);  // to two regions, and what is said besides
  EXPECT_GT(static_cast<double>(knows_not.bytes_crossed.count) / published, 6);
  EXPECT_LT(last(knows), 1.25 * seconds(knows.predicted));
  EXPECT_LT(last(knows), 0.5 * last(knows_not));
  EXPECT_EQ(knows.chunks_duplicate, 0u);
}

TEST(BroadcastSim, UnderConstantDeathsTreesAreMendedInTime) {
  for (const std::uint64_t seed : {1}) {
    BroadcastScenario s = homogeneous(16, 100, 50);
    s.seed = seed;
    s.topology = chains::TopologyPolicy::kTrees;
    s.cores_limit_rate = true;
    s.payload = {12'000'000};
    s.delta = {0};  // full snapshots
    s.chunk = {64 * 1024};
    s.publications = 6;
    s.one_at_a_time = true;
    s.publish_every = milliseconds(200);
    s.quorum = 1;
    const BroadcastResult calm = run(s);
    s.replace_every = std::chrono::seconds(2);
    const BroadcastResult r = run(s);
    EXPECT_GE(r.workers_replaced, 4u);
    double most = 0;
    for (std::size_t i = 0; i < s.publications; ++i) {
      ASSERT_TRUE(r.publications[i].t_b && calm.publications[i].t_b);
      EXPECT_LT(seconds(*r.publications[i].t_b), 1.5 * seconds(*calm.publications[i].t_b)) << seed << ", " << i;
      most = std::max(most, seconds(*r.publications[i].t_b) / seconds(*calm.publications[i].t_b));
    }
    std::printf("seed %llu: T_b at most %.2f times as long\n", static_cast<unsigned long long>(seed), most);
  }
}

// The same with deltas: a newcomer lacks the snapshot and all later deltas, many seconds of its downlink.
TEST(BroadcastSim, UnderConstantDeathsNewcomersCatchUpAsFastAsTheyCome) {
  BroadcastScenario s = homogeneous(16, 10, 5);
  s.topology = chains::TopologyPolicy::kTrees;
  s.cores_limit_rate = true;
  s.chunk = {16 * 1024};
  s.payload = {4'000'000};
  s.delta = {1'000'000};
  s.publish_every = std::chrono::seconds(5);
  s.publications = 3;
  const Duration calm = run(s).publications[2].t_b.value_or(Duration{});
  s.publications = 30;
  s.replace_every = std::chrono::seconds(5);
  for (const std::uint64_t seed : {1, 2}) {
    s.seed = seed;
    const BroadcastResult r = run(s);
    EXPECT_GE(r.workers_replaced, 28u);
    double most = 0;
    for (std::size_t i = 2; i < r.publications.size(); ++i) {
      ASSERT_TRUE(r.publications[i].t_b) << seed << ", " << i;
      most = std::max(most, seconds(*r.publications[i].t_b) / seconds(calm));
    }
    EXPECT_LE(most, 1.75) << seed;
    std::printf("seed %llu: T_b at most %.2f times as long\n", static_cast<unsigned long long>(seed), most);
  }
}

TEST(BroadcastSim, PoisonersAreQuarantinedByTheirSecondChild) {
  for (const std::size_t poisoners : {1u, 3u}) {
    BroadcastScenario s = homogeneous(16, 100, 50);
    s.payload = {100'000'000};
    s.poisoners = poisoners;
    const BroadcastResult r = run(s);  // what was delivered is what was published
    EXPECT_EQ(r.poisoners_quarantined, poisoners);
    EXPECT_EQ(r.others_quarantined, 0u);
    for (const std::uint64_t flipped : r.poisoned) EXPECT_LE(flipped, 8u);
    EXPECT_LE(r.chunks_corrupt, 8 * poisoners);
  }
}

TEST(BroadcastSim, TwoThousandWorkers) {
  BroadcastScenario s = homogeneous(2000, 16'000, 1000);
  s.payload = {50'000'000};
  s.chunk = {1 << 20};
  s.delay = milliseconds(20);
  s.heartbeat = std::chrono::seconds(5);
  const BroadcastResult r = run(s);
  print("2000 workers", r);
  EXPECT_EQ(r.publications[0].completions.size(), 2000u);
  EXPECT_EQ(r.learner_chunk_bytes_sent.count, 16u * 50'000'000u);
  EXPECT_EQ(r.chunks_delivered, 2000u * 48);
}

TEST(BroadcastSim, ManySeedsWithDeathsJoinsAndJitterConverge) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed, 9);
    BroadcastScenario s =
        homogeneous(static_cast<std::size_t>(2 + random.below(12)), static_cast<double>(8 + 8 * random.below(4)), 8);
    s.seed = seed;
    s.cores_limit_rate = random.below(2);
    s.chunk = {16 * 1024};
    s.payload = {200'000};
    s.delta = {1 + random.below(100'000)};
    s.delay = milliseconds(random.below(60));
    s.jitter = milliseconds(random.below(20));
    s.publications = 1 + random.below(8);
    s.publish_every = milliseconds(50 + random.below(500));
    s.worker_links.assign(s.workers, s.worker_link);
    for (auto& link : s.worker_links) link.up = BitRate::from_mbit_per_s(static_cast<double>(2 + random.below(10)));
    if (random.below(3) == 0) s.learner_store = {400'000};
    if (random.below(3) == 0) s.worker_store = {600'000};
    for (std::uint64_t i = random.below(3); i > 0; --i)
      s.kills.push_back({random.below(s.workers), milliseconds(random.below(1500)),
                         random.below(2) ? Death::kCrash : Death::kPowerLoss});
    for (std::uint64_t i = random.below(3); i > 0; --i) s.late_joins.push_back(milliseconds(random.below(2000)));
    if (random.below(3) == 0) s.corruptions = {milliseconds(random.below(500)), milliseconds(random.below(500))};
    bool all_die = s.kills.size() >= s.workers;
    if (all_die) s.kills.pop_back();
    s.time_max = std::chrono::seconds(120);
    run(s);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(BroadcastSim, SixtyFourWorkersRunInWellUnderASecond) {
  BroadcastScenario s = homogeneous(64, 64, 8);
  s.publications = 5;
  s.delay = milliseconds(30);
  const auto begin = std::chrono::steady_clock::now();
  const BroadcastResult r = run(s);
  const double wall = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print("64 workers", r);
  std::printf("wall %.3f s\n", wall);
  EXPECT_NEAR(seconds(r.publications[0].last()) / seconds(r.predicted), 1, 0.1);
}

TEST(BroadcastSim, MistakesAreNamed) {
  EXPECT_EQ(simulate_broadcast(homogeneous(0, 8, 8)).error().code, Code::kInvalid);
  BroadcastScenario s = homogeneous(2, 8, 8);
  s.kills = {{2, {}, Death::kCrash}};
  EXPECT_EQ(simulate_broadcast(s).error().code, Code::kInvalid);
  s = homogeneous(2, 0, 8);
  EXPECT_EQ(simulate_broadcast(s).error().code, Code::kInvalid);
  s = homogeneous(2, 8, 8);
  s.time_max = milliseconds(300);  // too short: says who lacks what
  const auto r = simulate_broadcast(s);
  ASSERT_TRUE(r.has_value());
  EXPECT_FALSE(r->finished);
  EXPECT_THAT(r->unfinished, testing::HasSubstr("worker 1 has nothing"));
}

}  // namespace
}  // namespace echoline::sim
