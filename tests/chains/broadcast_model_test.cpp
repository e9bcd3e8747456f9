// Broadcast times against hand-computed cases and against a chunk-by-chunk replay.
#include "chains/broadcast_model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/random.hpp"
#include "chains/planner.hpp"

namespace echoline::chains {
namespace {

constexpr Bytes kMb{1'000'000};
BitRate gbit(double g) { return {g * 1e9}; }
BitRate mbyte(double mb) { return BitRate::from_bytes_per_s(mb * 1e6); }

std::vector<WorkerLink> links_of(const std::vector<ChainWorker>& workers, Duration delay = {}) {
  std::vector<WorkerLink> links;
  for (const ChainWorker& w : workers) links.push_back({.id = w.id, .up = w.up, .down = w.down, .delay = delay});
  return links;
}

// N workers whose first `fast` have uplink `up_fast`; downlinks are never the limit.
std::vector<ChainWorker> fleet(std::size_t n, std::size_t fast, BitRate up_fast, BitRate up_slow) {
  std::vector<ChainWorker> workers;
  for (std::size_t i = 0; i < n; ++i)
    workers.push_back({.id = WorkerId{i + 1}, .up = i < fast ? up_fast : up_slow, .down = gbit(100), .score = 1.0});
  return workers;
}

// A chain as its hops, the first one from the learner.
struct Hop {
  BitRate rate;
  Duration delay{};
};

// The time when the last worker of a chain has the payload, if downlinks are the bottleneck.
Duration chain_time(Bytes payload, Bytes chunk, const std::vector<Hop>& hops) {
  Topology topology;
  std::vector<WorkerLink> links;
  for (const Hop& hop : hops) links.push_back({WorkerId{links.size() + 1}, gbit(1e6), hop.rate, hop.delay});
  if (!hops.empty()) topology.chains.emplace_back();
  for (const WorkerLink& link : links) topology.chains[0].push_back(link.id);
  const auto times = broadcast_time(topology, payload, chunk, gbit(1e6), links);
  EXPECT_TRUE(times) << (times ? "" : times.error().message());
  return times ? times->last() : Duration{};
}

// Sends every chunk over every hop in order, one at a time per hop: the definition of store and forward.
double replay_s(std::uint64_t payload, std::uint64_t chunk, const std::vector<Hop>& hops) {
  std::vector<double> arrival_s((payload + chunk - 1) / chunk, 0.0);  // by chunk, at the latest hop
  for (const Hop& hop : hops) {
    double hop_free_s = 0;
    for (std::size_t k = 0; k < arrival_s.size(); ++k) {
      const std::uint64_t bytes = std::min(chunk, payload - k * chunk);
      hop_free_s = std::max(hop_free_s, arrival_s[k]) + static_cast<double>(bytes) / hop.rate.bytes_per_s();
      arrival_s[k] = hop_free_s + seconds(hop.delay);
    }
  }
  return arrival_s.back();
}

TEST(LowerBound, EachOfTheThreeTermsCanBind) {
  const Bytes f{1'000'000'000};
  const std::vector<WorkerLink> one{{WorkerId{1}, mbyte(1), mbyte(1000)}};
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(100), one)), 10.0, 1e-9);  // F/B
  const std::vector<WorkerLink> slow{{WorkerId{1}, mbyte(1), mbyte(5)}};
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(100), slow)), 200.0, 1e-9);  // F/d_min
  const std::vector<WorkerLink> four(4, {WorkerId{1}, mbyte(10), mbyte(1000)});
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(100), four)), 4000.0 / 140, 1e-9);  // N F/(B + sum u)
  EXPECT_EQ(lower_bound(f, mbyte(100), {}), Duration{});
}

// With 9 of 10 workers counted, the slowest downlink does not matter, and all workers may help to send the nine copies.
TEST(LowerBound, ForAFraction) {
  const Bytes f{1'000'000'000};
  std::vector<WorkerLink> ten(10, {WorkerId{1}, mbyte(10), mbyte(50)});
  ten[3].down = mbyte(1);
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(1000), ten)), 1000, 1e-6);
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(1000), ten, 0.9)), 20, 1e-6);
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(100), ten, 0.9)), 9000.0 / 200, 1e-6);
  EXPECT_NEAR(seconds(lower_bound(f, mbyte(100), ten, 0.91)), 1000, 1e-6);  // all ten
}

// A slow child leaves the rest of its parent's uplink to the others.
TEST(BroadcastTime, ASlowChildTakesNoMoreThanItCan) {
  Topology topology;
  topology.policy = TopologyPolicy::kTrees;
  topology.chains = {{WorkerId{1}, WorkerId{2}}, {WorkerId{3}}};
  topology.grafts = {{{WorkerId{3}, WorkerId{1}}}};
  const std::vector<WorkerLink> links{{WorkerId{1}, mbyte(10), mbyte(50), {}},
                                      {WorkerId{2}, mbyte(10), mbyte(50), {}},
                                      {WorkerId{3}, mbyte(10), mbyte(1), {}}};
  const auto times = broadcast_time(topology, {90'000'000}, {1000}, mbyte(50), links);
  ASSERT_TRUE(times);
  EXPECT_NEAR(seconds(times->time_of(WorkerId{2})), 10, 0.01);
  EXPECT_NEAR(seconds(times->time_of(WorkerId{3})), 90, 0.01);
}

TEST(ChainTime, KnownPipelineOfFourHops) {
  const std::vector<Hop> hops(4, {mbyte(12.5)});
  EXPECT_NEAR(seconds(chain_time(Bytes{160'000'000}, kMb, hops)), 13.04, 1e-9);
}

TEST(ChainTime, UnequalRatesAndDelaysFollowTheSumAndTheBottleneck) {
  const std::vector<Hop> hops{{mbyte(10), std::chrono::milliseconds(20)},
                              {mbyte(2), std::chrono::milliseconds(50)},
                              {mbyte(5), std::chrono::milliseconds(5)}};
  // sum c/r = 0.1 + 0.5 + 0.2; (K-1) c/min r = 9 * 0.5; delays 0.075.
  EXPECT_NEAR(seconds(chain_time(Bytes{10'000'000}, kMb, hops)), 0.8 + 4.5 + 0.075, 1e-9);
}

TEST(ChainTime, OneChunkAndNothing) {
  const std::vector<Hop> hops(3, {mbyte(1)});
  EXPECT_NEAR(seconds(chain_time(Bytes{500'000}, kMb, hops)), 1.5, 1e-9);  // a chunk is no larger than the payload
  EXPECT_EQ(chain_time(Bytes{0}, kMb, hops), Duration{});
  EXPECT_EQ(chain_time(kMb, kMb, {}), Duration{});
}

TEST(ChainTime, EqualsAChunkByChunkReplay) {
  Random random(11);
  for (int round = 0; round < 300; ++round) {
    const auto payload = static_cast<std::uint64_t>(random.between(1, 5000));
    const auto chunk = static_cast<std::uint64_t>(random.between(1, 700));
    std::vector<Hop> hops(static_cast<std::size_t>(random.between(1, 7)));
    for (Hop& hop : hops)
      hop = {BitRate::from_bytes_per_s(static_cast<double>(random.between(1, 500))),
             std::chrono::milliseconds(random.between(0, 30))};
    EXPECT_NEAR(seconds(chain_time(Bytes{payload}, Bytes{chunk}, hops)), replay_s(payload, chunk, hops), 1e-6)
        << "round " << round;
  }
}

TEST(ChainTime, ASmallDeltaInLargeChunksWastesThePipeline) {
  const Bytes f{200'000'000};
  const Bytes large{4 << 20};
  const double slot_s = static_cast<double>(large.count) / 62.5e6;
  const std::vector<Hop> hops(32, {mbyte(62.5)});
  EXPECT_EQ(chunk_count(f, large) + 31, 79u);
  EXPECT_GT(seconds(chain_time(f, large, hops)) / slot_s, 78);
  EXPECT_LT(seconds(chain_time(f, Bytes{450'000}, hops)) / slot_s, 52);
}

// Worked cases of 16 GB to 32 workers, as multiples of the lower bound. The chunk is so small that the time until the
// first one arrives does not matter.
struct Worked {
  std::size_t fast;                  // number of workers with the uplink up_fast
  double up_fast, up_slow, learner;  // Gbit/s
  TopologyPolicy policy;
  double ratio, tolerance;
};

class WorkedBroadcast : public testing::TestWithParam<Worked> {};

TEST_P(WorkedBroadcast, RatioToTheLowerBound) {
  const Worked& w = GetParam();
  const auto workers = fleet(32, w.fast, gbit(w.up_fast), gbit(w.up_slow));
  const auto links = links_of(workers);
  const auto topology = plan_chains(gbit(w.learner), gbit(0.5), workers, w.policy);
  ASSERT_TRUE(topology);
  const Bytes payload{16'000'000'000};
  const auto times = broadcast_time(*topology, payload, Bytes{100'000}, gbit(w.learner), links);
  ASSERT_TRUE(times);
  EXPECT_NEAR(seconds(times->last()) / seconds(lower_bound(payload, gbit(w.learner), links)), w.ratio, w.tolerance);
}

INSTANTIATE_TEST_SUITE_P(Formulas, WorkedBroadcast,
                         testing::Values(Worked{32, 0.5, 0.5, 2, TopologyPolicy::kStar, 9.0, 0.01},
                                         Worked{32, 0.5, 0.5, 2, TopologyPolicy::kEcho2, 1.125, 0.005},
                                         Worked{32, 0.5, 0.5, 2, TopologyPolicy::kBestChains, 1.125, 0.005},
                                         Worked{16, 1.0, 0.2, 2, TopologyPolicy::kStar, 10.6, 0.01},
                                         Worked{16, 1.0, 0.2, 2, TopologyPolicy::kBestChains, 3.31, 0.01},
                                         Worked{28, 1.0, 0.1, 1, TopologyPolicy::kStar, 29, 0.5},
                                         Worked{28, 1.0, 0.1, 1, TopologyPolicy::kBestChains, 3.68, 0.01}));

TEST(BroadcastTime, CompletionsGrowAlongTheChainAndFractionsAreRanks) {
  const auto workers = fleet(6, 6, mbyte(1), mbyte(1));
  const auto topology = plan_chains(mbyte(3), mbyte(1), workers, TopologyPolicy::kEcho2);
  ASSERT_TRUE(topology);
  ASSERT_THAT(topology->chains, testing::SizeIs(3));
  const auto delay = std::chrono::milliseconds(10);
  const auto times = broadcast_time(*topology, Bytes{300'000}, Bytes{100'000}, mbyte(3), links_of(workers, delay));
  ASSERT_TRUE(times);
  for (const std::uint64_t seed : {1, 2, 3}) EXPECT_NEAR(seconds(times->time_of(WorkerId{seed})), 0.31, 1e-6);
  for (const std::uint64_t tail : {4, 5, 6}) EXPECT_NEAR(seconds(times->time_of(WorkerId{tail})), 0.42, 1e-6);
  EXPECT_NEAR(seconds(times->quorum_time(0.5)), 0.31, 1e-6);
  EXPECT_NEAR(seconds(times->quorum_time(0.51)), 0.42, 1e-6);
  EXPECT_NEAR(seconds(times->quorum_time(0.01)), 0.31, 1e-6);
  EXPECT_EQ(times->last(), times->quorum_time(1.0));
}

TEST(BroadcastTime, LearnerUplinkIsSharedFairlyBySeedsOfUnequalDownlinks) {
  const std::vector<ChainWorker> workers{{.id = WorkerId{1}, .up = mbyte(1), .down = mbyte(0.5), .score = 3},
                                         {.id = WorkerId{2}, .up = mbyte(1), .down = mbyte(9), .score = 2},
                                         {.id = WorkerId{3}, .up = mbyte(1), .down = mbyte(9), .score = 1}};
  const auto topology = plan_chains(mbyte(3), mbyte(1), workers, TopologyPolicy::kStar);
  ASSERT_TRUE(topology);
  const auto times = broadcast_time(*topology, kMb, Bytes{1000}, mbyte(3), links_of(workers));
  ASSERT_TRUE(times);
  EXPECT_NEAR(seconds(times->time_of(WorkerId{1})), 2.0, 1e-6);
  EXPECT_NEAR(seconds(times->time_of(WorkerId{2})), 0.8, 1e-6);
  EXPECT_NEAR(seconds(times->time_of(WorkerId{3})), 0.8, 1e-6);
}

TEST(BroadcastTime, RefusesEmptyPayloadsAndAbsentLinks) {
  const auto workers = fleet(2, 2, mbyte(1), mbyte(1));
  const auto topology = plan_chains(mbyte(1), mbyte(1), workers, TopologyPolicy::kEcho2);
  ASSERT_TRUE(topology);
  auto links = links_of(workers);
  EXPECT_EQ(broadcast_time(*topology, kMb, Bytes{0}, mbyte(1), links).error().code, Code::kInvalid);
  EXPECT_EQ(broadcast_time(*topology, kMb, kMb, mbyte(0), links).error().code, Code::kInvalid);
  links[0].up = {};
  EXPECT_EQ(broadcast_time(*topology, kMb, kMb, mbyte(1), links).error().code, Code::kInvalid);
  links.pop_back();
  const auto missing = broadcast_time(*topology, kMb, kMb, mbyte(1), links);
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().detail, testing::HasSubstr("worker 2"));
}

// Compares the choice with every other power of two, with the cost of chunks counted by hand. None is much better.
TEST(BestChunk, NoOtherIsMuchFaster) {
  for (const std::uint64_t bytes : {10'000ull, 300'000ull, 20'000'000ull, 1'000'000'000ull})
    for (const double up : {8.0, 100.0, 2000.0}) {
      std::vector<ChainWorker> workers;
      std::vector<WorkerLink> links;
      for (std::uint64_t id = 1; id <= 40; ++id) {
        workers.push_back({.id = WorkerId{id},
                           .up = BitRate::from_mbit_per_s(up),
                           .down = BitRate::from_mbit_per_s(4 * up),
                           .score = 1});
        links.push_back({WorkerId{id}, workers.back().up, workers.back().down});
      }
      const BitRate learner{workers[0].up.bits_per_s * 2};
      const auto topology = plan_chains(learner, workers[0].up, workers, TopologyPolicy::kTrees).value();
      const auto time_s = [&](Bytes chunk) {
        const double chunks = static_cast<double>(bytes) / static_cast<double>(chunk.count);
        const Bytes sent{static_cast<std::uint64_t>(static_cast<double>(bytes) + chunks * kChunkOverheadBytes)};
        return seconds(broadcast_time(topology, sent, chunk, learner, links).value().last()) +
               chunks * kChunkOverheadSeconds;
      };
      const Bytes best = best_chunk(Bytes{bytes}, topology, lower_bound(Bytes{bytes}, learner, links));
      for (std::uint64_t other = kBestChunkMin; other <= kBestChunkMax; other *= 2)
        EXPECT_LT(time_s(best), 1.1 * time_s({other}))
            << bytes << " bytes at " << up << " Mbit/s: " << best.count << " or " << other;
    }
}

TEST(BestChunk, GrowsWithThePayloadAndStaysWithinItsLimits) {
  const Topology topology = plan_chains(BitRate::from_mbit_per_s(100), BitRate::from_mbit_per_s(10),
                                        std::vector<ChainWorker>{{.id = WorkerId{1},
                                                                  .up = BitRate::from_mbit_per_s(50),
                                                                  .down = BitRate::from_mbit_per_s(100),
                                                                  .score = 1}},
                                        TopologyPolicy::kTrees)
                                .value();
  Bytes before;
  for (std::uint64_t bytes = 1; bytes < 1ull << 46; bytes *= 8) {
    const Bytes chunk = best_chunk(Bytes{bytes}, topology, from_seconds(static_cast<double>(bytes) / 1e7));
    EXPECT_GE(chunk, before);
    EXPECT_GE(chunk.count, kBestChunkMin);
    EXPECT_LE(chunk.count, kBestChunkMax);
    before = chunk;
  }
  EXPECT_EQ(before.count, kBestChunkMax);
  EXPECT_EQ(best_chunk(Bytes{0}, topology, Duration{}).count, kBestChunkMin);
}

}  // namespace
}  // namespace echoline::chains
