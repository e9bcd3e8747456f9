// Regions: the region of a place, and plans with limited links between regions.
#include "provisioner/regions.hpp"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {
namespace {

TEST(Regions, APlaceContainsWholeWords) {
  for (const auto& [place, part] : {std::pair("Sweden, SE", "SE"),
                                    {"Sweden, SE", "sweden"},
                                    {"eu-west-1b", "eu-west"},
                                    {"eu-west-1b", "EU"},
                                    {"Ohio, US", ", us"},
                                    {"us", "US"},
                                    {"New York, US", "new york"}})
    EXPECT_TRUE(contains_place(place, part)) << part << " in " << place;
  for (const auto& [place, part] : {std::pair("Sweden, SE", "DE"),
                                    {"Delaware, US", "DE"},
                                    {"there", "here"},
                                    {"eu-west-1b", "west-1"},
                                    {"", "US"},
                                    {"US", ""},
                                    {"US", "USA"},
                                    {"Belarus, BY", "us"}})
    EXPECT_FALSE(contains_place(place, part)) << part << " in " << place;
}

RegionMap two_regions() {
  RegionMap map;
  map.regions = {{"america", {"US", "CA"}}, {"europe", {"SE", "eu-west"}}};
  map.graph.links.assign(2, std::vector<chains::RegionLink>(2));
  map.graph.links[0][1] = {BitRate::from_mbit_per_s(20), std::chrono::milliseconds(45)};
  map.graph.links[1][0] = {BitRate::from_mbit_per_s(10), std::chrono::milliseconds(45)};
  return map;
}

TEST(Regions, AnUnknownPlaceIsInTheLearnersRegion) {
  RegionMap map = two_regions();
  EXPECT_EQ(map.of("Ohio, US"), 0u);
  EXPECT_EQ(map.of("eu-west-1a"), 1u);
  EXPECT_FALSE(map.find("Tokyo, JP"));
  map.graph.learner_region = 1;
  EXPECT_EQ(map.of("Tokyo, JP"), 1u);
  EXPECT_EQ(map.of(""), 1u);
  EXPECT_EQ(RegionMap{}.of("Tokyo, JP"), 0u);
}

TEST(Regions, APlanSendsOverEachWayOnce) {
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) {
    Offer o;
    o.id = "o" + std::to_string(i);
    o.provider = "local";
    o.place = i % 2 ? "Stockholm, SE" : "Ohio, US";
    o.up = BitRate::from_mbit_per_s(100);
    o.down = BitRate::from_mbit_per_s(500);
    o.reliability = 0.99;
    o.duration_max = std::chrono::hours(240);
    o.rollouts_per_s = 40;
    o.gpu_usd_per_hour = 0.1;
    o.storage_usd_per_hour = o.upload_usd_per_gb = o.download_usd_per_gb = 0;
    offers.push_back(o);
  }
  PlanRequest r;
  r.fleet.provider = "none";  // of any
  r.pace = {256, 1, std::chrono::seconds(4)};
  r.staleness_budget = 6;
  r.delta_bytes = {1'000'000};
  r.full_bytes = {2'000'000};
  r.learner_up = BitRate::from_mbit_per_s(200);
  r.topology = chains::TopologyPolicy::kAuto;
  r.chunk = {16 * 1024};
  for (int i = 0; i < 8; ++i) r.keep.push_back("o" + std::to_string(i));
  const auto near = make_plan(r, offers);
  ASSERT_TRUE(near) << near.error().message();
  r.paths.regions = two_regions();
  const auto plan = make_plan(r, offers);
  ASSERT_TRUE(plan) << plan.error().message();
  std::map<WorkerId, bool> far{{kLearnerId, false}};
  for (const PlanRow* row : plan->chosen()) far[*row->worker] = row->offer.place == "Stockholm, SE";
  double crossed = 0;
  for (const auto& [id, parents] : plan->topology.parents())
    for (const WorkerId parent : parents)
      crossed += (far.at(id) && !far.at(parent)) / static_cast<double>(plan->topology.stripes());
  EXPECT_NEAR(crossed, 1, 1e-9) << plan->topology.to_text();
  EXPECT_GE(seconds(plan->broadcast_lower_bound), 0.4 - 1e-9);  // 8 Mbit over 20 Mbit/s
  EXPECT_GT(plan->broadcast_time, near->broadcast_time);

  const std::string text = plan->to_json().dump();
  const auto again = Plan::from_json(nlohmann::json::parse(text));
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->to_json().dump(), text);
  EXPECT_EQ(again->request.paths.regions.of("eu-west-1a"), 1u);
  EXPECT_EQ(again->request.paths.regions.graph.rate(1, 0), BitRate::from_mbit_per_s(10));
  nlohmann::json bad = nlohmann::json::parse(text);
  bad["header"]["ways"][0]["to"] = "asia";
  EXPECT_NE(Plan::from_json(bad).error().message().find("from and to of the regions"), std::string::npos);
  bad = nlohmann::json::parse(text);
  bad["header"]["region"] = "asia";
  EXPECT_NE(Plan::from_json(bad).error().message().find("one of the regions"), std::string::npos);
}

}  // namespace
}  // namespace echoline::provisioner
