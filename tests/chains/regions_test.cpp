// Workers in several regions: the upper bound of their inflow, and trees that cross between regions once.
#include "chains/regions.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "chains/fleet_graph.hpp"
#include "chains/relays.hpp"
#include "chains/trees.hpp"
#include "tests/chains/random_fleets.hpp"

namespace echoline::chains {
namespace {

using std::chrono::milliseconds;

BitRate mbit(double rate) { return BitRate::from_mbit_per_s(rate); }

// Mbit/s from each region to each. The diagonal does not count.
Regions regions_of(const std::vector<std::vector<double>>& rates) {
  Regions regions;
  for (std::size_t a = 0; a < rates.size(); ++a) {
    auto& links_from_a = regions.links.emplace_back(rates.size());
    for (std::size_t b = 0; b < rates.size(); ++b)
      if (a != b) links_from_a[b].rate = mbit(rates[a][b]);
  }
  return regions;
}

// The given number of workers in each region, with the learner in the first.
RandomFleet fleet_of(const std::vector<std::size_t>& counts, double up, double down = 1000) {
  RandomFleet fleet;
  for (std::uint32_t region = 0; region < counts.size(); ++region)
    for (std::size_t i = 0; i < counts[region]; ++i) {
      const WorkerId id{fleet.workers.size() + 1};
      fleet.workers.push_back({.id = id, .up = mbit(up), .down = mbit(down), .score = 1, .region = region});
      fleet.links.push_back({.id = id, .up = mbit(up), .down = mbit(down), .region = region});
    }
  return fleet;
}

Topology trees(const RandomFleet& fleet, double quorum = 1) {
  auto planned = plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kTrees, quorum, fleet.regions);
  EXPECT_TRUE(planned) << planned.error().message();
  return *std::move(planned);
}

// Number of payloads that cross from each region to each other. A stripe is an equal part of a payload.
using Crossings = std::map<std::pair<std::uint32_t, std::uint32_t>, double>;
Crossings crossings(const Topology& topology, const RandomFleet& fleet) {
  std::map<WorkerId, std::uint32_t> region{{kLearnerId, fleet.regions.learner_region}};
  for (const ChainWorker& w : fleet.workers) region[w.id] = w.region;
  Crossings crossed;
  for (const auto& [id, parents] : topology.parents())
    for (const WorkerId parent : parents)
      if (region.at(parent) != region.at(id)) crossed[{region.at(parent), region.at(id)}] += 1.0 / topology.stripes();
  return crossed;
}

double payloads_into(const Crossings& crossed, std::uint32_t region) {
  double total = 0;
  for (const auto& [from_to, payloads] : crossed)
    if (from_to.second == region) total += payloads;
  return total;
}

TEST(Regions, InflowOfARegionIsTheMaximumFlow) {
  // From 0 to 2, the link carries 10, and 30 reach 1, whose workers send 25 in all. The learner itself sends 100.
  const Regions regions = regions_of({{0, 30, 10}, {5, 0, 40}, {5, 5, 0}});
  const std::vector<BitRate> up = {mbit(0), mbit(25), mbit(500)};
  const auto flow = inflow_max(regions, mbit(100), up);
  EXPECT_NEAR(flow[0].mbit_per_s(), 100, 1e-3);
  EXPECT_NEAR(flow[1].mbit_per_s(), 30 + 5, 1e-3);  // 5 come back from 2
  EXPECT_NEAR(flow[2].mbit_per_s(), 10 + 25, 1e-3);
  EXPECT_NEAR(inflow_max(regions, mbit(8), up)[2].mbit_per_s(), 8, 1e-3);  // never more than the learner sends
  EXPECT_NEAR(inflow_max({}, mbit(8), std::vector{mbit(1)})[0].mbit_per_s(), 8, 1e-3);
}

TEST(Regions, NoBroadcastIsFasterThanTheLinksAllow) {
  RandomFleet fleet = fleet_of({1, 4}, 100);
  fleet.learner_up = mbit(1000);
  fleet.regions = regions_of({{0, 20}, {20, 0}});
  const Bytes payload{10'000'000};  // 80 Mbit
  const auto bound = [&](double q) {
    return seconds(lower_bound(payload, fleet.learner_up, fleet.links, q, fleet.regions));
  };
  EXPECT_NEAR(bound(1), 4, 1e-6);
  EXPECT_NEAR(bound(0.2), 0.08, 1e-6);  // the workers near the learner are enough
  // Without forwarding workers, the learner sends four copies over the link.
  for (WorkerLink& link : fleet.links) link.up = mbit(1e-6);
  EXPECT_NEAR(bound(1), 16, 1e-3);
  EXPECT_NEAR(bound(0.6), 8, 1e-3);
}

TEST(Regions, ABorrowingRegionMayLendToAThird) {
  // Region 0 has 20 to spare, and 2 lacks 30. The flow has to pass 1, whose workers send 12.
  const Regions regions = regions_of({{0, 50, 0}, {50, 0, 50}, {50, 50, 0}});
  const std::vector<double> spare = {20e6, 0, -30e6}, forwardable = {0, 12e6, 0};
  const std::vector<std::vector<double>> unused_links(3, std::vector<double>(3, 0));
  const Lending lending = plan_lending(regions, spare, forwardable, unused_links);
  EXPECT_NEAR(lending.bits_per_s_total, 12e6, 10);
  EXPECT_NEAR(lending.bits_per_s_by_link[0][1], 12e6, 10);
  EXPECT_NEAR(lending.bits_per_s_by_link[1][2], 12e6, 10);
  const std::vector<std::vector<double>> link_load = {{0, 0, 0}, {0, 0, 45e6}, {0, 0, 0}};
  EXPECT_NEAR(plan_lending(regions, spare, forwardable, link_load).bits_per_s_total, 5e6, 10);
}

// Each of two regions could receive 150, but both together 200, beside the 300 that their six workers send.
TEST(Regions, RegionsWithASharedInflowAreBoundTogether) {
  RandomFleet fleet = fleet_of({4, 3, 3}, 50);
  fleet.learner_up = mbit(1000);
  fleet.regions = regions_of({{0, 100, 100}, {1000, 0, 1000}, {1000, 1000, 0}});
  const Duration bound = lower_bound(Bytes{1'000'000'000}, fleet.learner_up, fleet.links, 1, fleet.regions);
  EXPECT_NEAR(seconds(bound), 8000.0 * 6 / (300 + 200), 0.1);
}

TEST(Regions, ALinkIsSharedByAllEdgesThatCrossIt) {
  RandomFleet fleet = fleet_of({1, 3}, 100);
  fleet.learner_up = mbit(1000);
  fleet.regions = regions_of({{0, 30}, {30, 0}});
  fleet.regions.links[0][1].delay = milliseconds(100);
  const Topology star = plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kStar).value();
  const auto times =
      broadcast_time(star, Bytes{1'250'000}, Bytes{1'250'000}, fleet.learner_up, fleet.links, fleet.regions).value();
  EXPECT_NEAR(seconds(times.time_of(WorkerId{1})), 10.0 / 970, 1e-6);
  for (const std::uint64_t id : {2, 3, 4}) EXPECT_NEAR(seconds(times.time_of(WorkerId{id})), 1.1, 1e-6);
}

TEST(Regions, ALinkLeavesUnusedUplinkToOtherReceivers) {
  RandomFleet fleet = fleet_of({1, 1}, 100);
  fleet.learner_up = mbit(100);
  fleet.regions = regions_of({{0, 10}, {10, 0}});
  const Topology star = plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kStar).value();
  const auto times =
      broadcast_time(star, Bytes{1'125'000}, Bytes{1'125'000}, fleet.learner_up, fleet.links, fleet.regions).value();
  EXPECT_NEAR(seconds(times.time_of(WorkerId{1})), 0.1, 1e-6);  // at 90 Mbit/s
  EXPECT_NEAR(seconds(times.time_of(WorkerId{2})), 0.9, 1e-6);
}

TEST(Relays, APayloadCrossesToEveryRegionOnce) {
  RandomFleet fleet = fleet_of({10, 12, 8, 20}, 200);
  fleet.learner_up = mbit(500);
  fleet.regions = regions_of({{0, 100, 100, 100}, {100, 0, 100, 100}, {100, 100, 0, 100}, {100, 100, 100, 0}});
  const Topology topology = trees(fleet);
  const auto crossed = crossings(topology, fleet);
  for (const std::uint32_t region : {1, 2, 3})
    EXPECT_NEAR(payloads_into(crossed, region), 1, 1e-9) << topology.to_text();
  EXPECT_EQ(payloads_into(crossed, 0), 0);
  const auto times =
      broadcast_time(topology, Bytes{100'000'000}, Bytes{65'536}, fleet.learner_up, fleet.links, fleet.regions).value();
  EXPECT_LT(seconds(times.last()),
            1.1 * seconds(lower_bound(Bytes{100'000'000}, fleet.learner_up, fleet.links, 1, fleet.regions)));
  // A star of the same workers sends 40 over three links.
  const Topology star = plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kStar).value();
  EXPECT_NEAR(payloads_into(crossings(star, fleet), 3), 20, 1e-9);
}

TEST(Relays, TwoNarrowRoutesCarryMoreThanOne) {
  // 40 straight and 40 through region 1, whose own link is wide.
  RandomFleet fleet = fleet_of({4, 4, 4}, 300);
  fleet.learner_up = mbit(400);
  fleet.regions = regions_of({{0, 1000, 40}, {1000, 0, 40}, {40, 40, 0}});
  const auto times =
      broadcast_time(trees(fleet), Bytes{50'000'000}, Bytes{16'384}, fleet.learner_up, fleet.links, fleet.regions)
          .value();
  const double rate = 400 / seconds(times.time_of(WorkerId{9}));  // Mbit/s
  EXPECT_GT(rate, 75);
  EXPECT_LT(rate, 81);
  EXPECT_GT(400 / seconds(times.time_of(WorkerId{1})), 200);  // the worker near the learner does not wait for the link
}

TEST(Relays, ARegionWithoutForwardersIsServedFromOutside) {
  RandomFleet fleet = fleet_of({6, 5}, 300);
  fleet.learner_up = mbit(500);
  for (ChainWorker& w : fleet.workers)
    if (w.region == 1) w.may_forward = false;
  fleet.regions = regions_of({{0, 400}, {400, 0}});
  const Topology topology = trees(fleet);
  EXPECT_NEAR(payloads_into(crossings(topology, fleet), 1), 5, 1e-9);
  const auto times =
      broadcast_time(topology, Bytes{50'000'000}, Bytes{16'384}, fleet.learner_up, fleet.links, fleet.regions).value();
  EXPECT_GT(400 / seconds(times.last()), 65);  // Mbit/s, of the 80 that the link leaves to each
}

TEST(Relays, OneRegionHasNoRelays) {
  RandomFleet fleet = fleet_of({3, 3}, 100);
  EXPECT_FALSE(spans_regions(fleet.workers, {}));
  fleet.regions = regions_of({{0, 10}, {10, 0}});
  EXPECT_TRUE(spans_regions(fleet.workers, fleet.regions));
  for (ChainWorker& w : fleet.workers) w.region = 0;
  EXPECT_FALSE(spans_regions(fleet.workers, fleet.regions));
  EXPECT_EQ(trees(fleet).to_text(),
            plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kTrees).value().to_text());
}

TEST(Relays, InvalidRegionsAndLinksAreNamed) {
  RandomFleet fleet = fleet_of({1, 1}, 100);
  const auto error = [&] {
    const auto planned =
        plan_chains(fleet.learner_up, mbit(10), fleet.workers, TopologyPolicy::kTrees, 1, fleet.regions);
    return planned ? std::string() : planned.error().message();
  };
  fleet.regions = regions_of({{0, 0}, {10, 0}});
  EXPECT_THAT(error(), testing::HasSubstr("needs a capacity, found 0 bit/s"));
  fleet.regions.links[0][1].rate = mbit(10);
  fleet.workers[1].region = 2;
  EXPECT_THAT(error(), testing::HasSubstr("worker 2: its region is 2, expected 0 to 1"));
  fleet.workers[1].region = 1;
  EXPECT_EQ(error(), "");
  fleet.regions.links[1].pop_back();
  EXPECT_THAT(error(), testing::HasSubstr("links from a region is 1, expected 2"));
  fleet.regions.learner_region = 7;
  EXPECT_THAT(error(), testing::HasSubstr("the learner's region is 7, expected 0 to 1"));
}

TEST(Relays, AreWithinReachOfTheBoundInRandomFleets) {
  for (const double quorum : {1.0, 0.9}) {
    Random random(5);
    std::vector<double> over_bound;
    for (int i = 0; i < 500; ++i) {
      const RandomFleet fleet = random_regions(random, i % 4 == 1, i % 2 == 0);
      const Topology topology = trees(fleet, quorum);
      std::vector<WorkerId> ids;
      for (const ChainWorker& w : fleet.workers) ids.push_back(w.id);
      ASSERT_TRUE(validate(topology, ids)) << "fleet " << i;
      over_bound.push_back(time_over_bound(fleet, TopologyPolicy::kAuto, quorum, false));
      ASSERT_GE(over_bound.back(), 0.999) << "fleet " << i;
    }
    std::sort(over_bound.begin(), over_bound.end());
    EXPECT_LE(quantile(over_bound, 0.5), 1.10) << quorum;
    EXPECT_LE(quantile(over_bound, 0.95), quorum < 1 ? 1.25 : 1.12);
  }
}

// The workers near the learner have little uplink, so their payload has to come from a third region.
TEST(Relays, SlowUplinksNearTheLearnerDoNotLimitOtherRegions) {
  RandomFleet fleet = fleet_of({1, 4, 4}, 100);
  fleet.workers[0].up = fleet.links[0].up = mbit(5);
  fleet.learner_up = mbit(120);
  fleet.regions = regions_of({{0, 300, 300}, {300, 0, 300}, {300, 300, 0}});
  for (std::size_t i = 5; i < 9; ++i) fleet.workers[i].up = fleet.links[i].up = mbit(200);
  const double over_bound = time_over_bound(fleet, TopologyPolicy::kTrees, 1, false);
  EXPECT_LE(over_bound, 1.15);
}

// The planner reaches every worker even without forwarders, with links of one kilobit, or with hardly any learner
// uplink.
TEST(Relays, OddFleetsAreReached) {
  Random random(9);
  for (int i = 0; i < 2000; ++i) {
    RandomFleet fleet = random_regions(random, i % 3 == 0, i % 2 == 0);
    while (fleet.workers.size() > 2 + static_cast<std::size_t>(i % 9)) fleet.workers.pop_back();
    for (ChainWorker& w : fleet.workers) {
      w.may_forward = random.uniform() < 0.7;
      w.may_seed = random.uniform() < 0.8;
      if (random.uniform() < 0.1) w.up = w.down = BitRate{1000};
    }
    if (fleet.regions.several())
      fleet.regions.learner_region = static_cast<std::uint32_t>(random.below(fleet.regions.links.size()));
    for (auto& row : fleet.regions.links)
      for (RegionLink& link : row)
        if (i % 5 == 0 && random.uniform() < 0.3) link.rate = BitRate{1000};
    if (i % 11 == 0) fleet.learner_up = BitRate{1000};
    const Topology topology = trees(fleet, 0.9);
    const auto all_but_first = std::span(fleet.workers).subspan(1);
    const RepairedTrees repaired = repair_trees(topology, fleet.learner_up, all_but_first, 0.9, {}, fleet.regions);
    std::vector<WorkerId> ids;
    for (const ChainWorker& w : all_but_first) ids.push_back(w.id);
    ASSERT_TRUE(validate(repaired.topology, ids)) << "fleet " << i;
  }
}

// Workers come and go for a while. The repaired trees always reach every worker, within its region if possible.
TEST(Relays, AreRepairedWithinTheirRegion) {
  Random random(11);
  RandomFleet fleet = fleet_of({8, 8, 8}, 200);
  fleet.learner_up = mbit(400);
  fleet.regions = regions_of({{0, 90, 90}, {90, 0, 90}, {90, 90, 0}});
  Topology topology = trees(fleet);
  std::uint64_t next_id = 100;
  for (int step = 0; step < 200; ++step) {
    if (fleet.workers.size() > 15 && random.uniform() < 0.5) {
      fleet.workers.erase(fleet.workers.begin() + static_cast<std::ptrdiff_t>(random.below(fleet.workers.size())));
    } else {
      fleet.workers.push_back({.id = WorkerId{next_id++},
                               .up = mbit(200),
                               .down = mbit(1000),
                               .score = 1,
                               .region = static_cast<std::uint32_t>(random.below(3))});
    }
    const RepairedTrees repaired = repair_trees(topology, fleet.learner_up, fleet.workers, 1, {}, fleet.regions);
    std::vector<WorkerId> ids;
    for (const ChainWorker& w : fleet.workers) ids.push_back(w.id);
    ASSERT_TRUE(validate(repaired.topology, ids)) << "step " << step;
    topology = repaired.worth_replanning() ? trees(fleet) : repaired.topology;
    const auto crossed = crossings(topology, fleet);
    for (const std::uint32_t region : {1, 2})
      ASSERT_LE(payloads_into(crossed, region), 1.5) << "step " << step << ": " << topology.to_text();
  }
}

TEST(Relays, ALostRelayIsReplacedByAnotherOfItsRegion) {
  RandomFleet fleet = fleet_of({3, 6}, 300);
  fleet.learner_up = mbit(200);
  fleet.regions = regions_of({{0, 50}, {50, 0}});
  Topology topology = trees(fleet);
  std::set<WorkerId> relays;
  for (const auto& [id, parents] : topology.parents())
    for (const WorkerId parent : parents)
      if (id.value > 3 && parent.value <= 3) relays.insert(id);
  ASSERT_FALSE(relays.empty());
  std::erase_if(fleet.workers, [&](const ChainWorker& w) { return w.id == *relays.begin(); });
  const RepairedTrees repaired = repair_trees(topology, fleet.learner_up, fleet.workers, 1, {}, fleet.regions);
  EXPECT_NEAR(payloads_into(crossings(repaired.topology, fleet), 1), 1, 1e-9) << repaired.topology.to_text();
  EXPECT_FALSE(repaired.worth_replanning());
}

}  // namespace
}  // namespace echoline::chains
