// Rental plans: the fixed point, reasons, prices, limits and both output forms.
#include "provisioner/plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/random.hpp"
#include "chains/broadcast_model.hpp"
#include "chains/fleet_graph.hpp"
#include "provisioner/allocation.hpp"
#include "provisioner/replacement.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;

Offer offer(const std::string& id, double rollouts_per_s, double usd) {
  Offer o;
  o.id = id;
  o.provider = "local";
  o.gpu = "RTX 3090";
  o.up = BitRate::from_mbit_per_s(50);
  o.down = BitRate::from_mbit_per_s(500);
  o.reliability = 0.99;
  o.duration_max = std::chrono::hours(240);
  o.rollouts_per_s = rollouts_per_s;
  o.gpu_usd_per_hour = usd;
  o.storage_usd_per_hour = 0;
  o.upload_usd_per_gb = 0;
  o.download_usd_per_gb = 0;
  return o;
}

// Three chains of 8 Mbit/s, 300 kB each second. Engines stop during a broadcast, so that T_b changes the target.
PlanRequest request() {
  PlanRequest r;
  r.fleet.capacity_rule = CapacityRule::kEcho2;
  r.fleet.provider = "none";  // of any
  r.pace = {256, 1, seconds(1)};
  r.staleness_budget = 6;
  r.delta_bytes = {300'000};
  r.full_bytes = {1'000'000};
  r.learner_up = BitRate::from_mbit_per_s(24);
  r.topology = chains::TopologyPolicy::kEcho2;  // worked out by hand
  r.paths.worker_rate = BitRate::from_mbit_per_s(8);
  r.chunk = {16 * 1024};
  r.paths.delay_expected = milliseconds(5);
  return r;
}

// With the pacing of the replay buffer.
PlanRequest paced(PlanRequest r) {
  r.staleness_worst = [s = r.staleness_budget, kappa = r.pace.publish_every, l = r.lookahead](int lag) {
    return std::min(s, kappa - 1 + lag + l);
  };
  return r;
}

Result<std::vector<Offer>> quickstart_offers() {
  auto list = load_offers("configs/offers/quickstart.json");
  if (!list) return std::move(list).error();
  return std::move(list->offers);
}

const PlanRow& row(const Plan& plan, const std::string& id) {
  const auto it = std::find_if(plan.rows.begin(), plan.rows.end(), [&](const PlanRow& r) { return r.offer.id == id; });
  EXPECT_NE(it, plan.rows.end()) << id;
  return *it;
}
std::vector<std::string> chosen_ids(const Plan& plan) {
  std::vector<std::string> ids;
  for (const PlanRow* r : plan.chosen()) ids.push_back(r->offer.id);
  return ids;
}
Plan planned(const PlanRequest& r, const std::vector<Offer>& offers) {
  auto plan = make_plan(r, offers);
  EXPECT_TRUE(plan) << plan.error().message();
  return std::move(plan).value();
}
std::string refusal(const PlanRequest& r, const std::vector<Offer>& offers, Code code = Code::kInfeasible) {
  const auto plan = make_plan(r, offers);
  EXPECT_FALSE(plan);
  if (plan) return "";
  EXPECT_EQ(plan.error().code, code) << plan.error().message();
  return plan.error().detail;
}

// The broadcast of request() to the workers of a plan.
Result<chains::BroadcastTimes> replayed(const Plan& plan) {
  const BitRate cap = BitRate::from_mbit_per_s(8);
  std::vector<chains::WorkerLink> links;
  for (const PlanRow* r : plan.chosen()) links.push_back({*r->worker, cap, cap, milliseconds(5)});
  return chains::broadcast_time(plan.topology, {300'000}, {16 * 1024}, BitRate::from_mbit_per_s(24), links);
}

TEST(MakePlan, RentsTheCheapestThatMeetTheTargetOfTheirOwnBroadcast) {
  std::vector<Offer> offers;
  for (int i = 0; i < 12; ++i) offers.push_back(offer("o" + std::to_string(i), 70, 0.10 + 0.01 * i));
  const Plan plan = planned(request(), offers);
  EXPECT_TRUE(plan.converged);
  // T_b belongs to this topology, and the target to this T_b.
  const auto times = replayed(plan);
  ASSERT_TRUE(times);
  EXPECT_EQ(plan.broadcast_time, times->quorum_time(0.9));
  EXPECT_EQ(plan.broadcast_time_last, times->last());
  EXPECT_DOUBLE_EQ(plan.target.required_rollouts_per_s, 256 / (1 - echoline::seconds(plan.broadcast_time)));
  EXPECT_GE(plan.rollouts_per_s, plan.target.provisioned_rollouts_per_s);
  EXPECT_EQ(chosen_ids(plan).size(), static_cast<std::size_t>(std::ceil(plan.target.provisioned_rollouts_per_s / 70)));
  EXPECT_EQ(chosen_ids(plan).front(), "o0");
  EXPECT_EQ(plan.standby.size() + chosen_ids(plan).size(), 12u);
  EXPECT_EQ(plan.staleness_needed, 1);
  EXPECT_EQ(plan.staleness_worst, request().staleness_budget);  // the pace of the work is not stated
  EXPECT_EQ(planned(paced(request()), offers).staleness_worst, 1);
  EXPECT_TRUE(chains::validate(plan.topology, plan.topology.workers()));
  EXPECT_EQ(plan.topology.size(), chosen_ids(plan).size());
}

TEST(MakePlan, DrawsSendersAndReceivers) {
  const Plan plan = planned(request(), {offer("a", 400, 0.1), offer("b", 400, 0.2)});
  const std::string dot = plan.to_dot();
  for (const PlanRow* row : plan.chosen()) EXPECT_NE(dot.find("\\n" + row->offer.id), std::string::npos) << dot;
}

TEST(MakePlan, KeepsEveryOfferWithAReason) {
  auto r = request();
  r.fleet.reliability_min = 0.95;
  r.fleet.duration_min = std::chrono::hours(24);
  r.fleet.up_min = BitRate::from_mbit_per_s(8);
  std::vector<Offer> offers{offer("dear", 100, 9),       offer("flaky", 100, 0.01), offer("brief", 100, 0.01),
                            offer("unrated", 100, 0.01), offer("thin", 100, 0.01),  offer("endless", 100, 0.01)};
  for (int i = 0; i < 8; ++i) offers.push_back(offer("ok" + std::to_string(i), 80, 0.1));
  offers[1].reliability = 0.90;
  offers[2].duration_max = std::chrono::hours(2);
  offers[3].reliability.reset();
  offers[4].up = BitRate::from_mbit_per_s(3);
  offers[5].duration_max.reset();
  const Plan plan = planned(r, offers);
  EXPECT_EQ(plan.rows.size(), offers.size());
  EXPECT_THAT(row(plan, "dear").reason, HasSubstr("dearer per rollout"));
  EXPECT_THAT(row(plan, "flaky").reason, HasSubstr("reliability 0.900 below 0.950"));
  EXPECT_THAT(row(plan, "brief").reason, HasSubstr("rentable for"));
  EXPECT_THAT(row(plan, "unrated").reason, HasSubstr("not stated"));
  EXPECT_THAT(row(plan, "endless").reason, HasSubstr("not stated"));
  EXPECT_THAT(row(plan, "thin").reason, HasSubstr("uplink 3 Mbit/s below 8"));
  for (const PlanRow& each : plan.rows) {
    EXPECT_FALSE(each.reason.empty()) << each.offer.id;
    EXPECT_EQ(each.chosen, each.worker.has_value());
  }
  for (const char* refused : {"flaky", "brief", "unrated", "thin", "endless"}) {
    EXPECT_EQ(row(plan, refused).rank, 0);
    EXPECT_THAT(plan.standby, testing::Not(testing::Contains(refused)));
  }
  EXPECT_EQ(plan.standby.back(), "dear");
}

TEST(MakePlan, BandwidthIsPartOfThePrice) {
  auto r = request();
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  offers[0].gpu_usd_per_hour = 0.05;  // cheap to rent, dear to feed: 1.08 GB/h at $0.10
  offers[0].download_usd_per_gb = 0.10;
  const Plan plan = planned(r, offers);
  const PlanRow& fed = row(plan, "o0");
  EXPECT_FALSE(fed.chosen);
  EXPECT_NEAR(*fed.cost.bandwidth, 0.3e-3 * 3600 * 0.10, 1e-12);
  EXPECT_NEAR(*fed.cost.usd_per_hour(), 0.05 + 0.108, 1e-12);
  EXPECT_NEAR(*fed.usd_per_1k_rollouts(), 1000 * 0.158 / (3600 * 80), 1e-12);
}

TEST(MakePlan, AChosenWorkerPaysForTheCopiesItReallySends) {
  std::vector<Offer> offers;
  for (int i = 0; i < 6; ++i) {
    offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
    offers.back().upload_usd_per_gb = 0.01;
  }
  const Plan plan = planned(request(), offers);
  double total = 0;
  for (const PlanRow* r : plan.chosen()) {
    const double copies = static_cast<double>(plan.topology.children_of(*r->worker).size());
    EXPECT_NEAR(*r->cost.bandwidth, copies * 1.08 * 0.01, 1e-12);
    total += 0.10 + copies * 0.0108;
  }
  EXPECT_NEAR(plan.usd_per_hour.expected, total, 1e-9);
}

TEST(MakePlan, MissingFiguresAreUnknownOrAssumedButNeverZero) {
  std::vector<Offer> offers;
  for (int i = 0; i < 15; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  offers[0].storage_usd_per_hour.reset();
  offers[1].upload_usd_per_gb.reset();
  offers[2].download_usd_per_gb.reset();
  offers[3].up.reset();
  offers[4].down.reset();
  offers[5].gpu_usd_per_hour.reset();
  offers[6].rollouts_per_s = 0;
  offers[6].rollouts_source = RateSource::kUnknown;
  for (int i = 0; i < 7; ++i)
    offers[static_cast<std::size_t>(i)].gpu_usd_per_hour = i == 5 ? std::nullopt : std::optional(0.001);
  auto r = request();
  const Plan plan = planned(r, offers);
  const std::pair<const char*, const char*> unknown[] = {
      {"o0", "disk price not stated"}, {"o1", "upload price not stated"}, {"o2", "download price not stated"},
      {"o3", "uplink not stated"},     {"o4", "downlink not stated"},     {"o5", "price is not stated"},
      {"o6", "throughput unknown"}};
  for (const auto& [id, why] : unknown) {
    EXPECT_EQ(row(plan, id).rank, 0) << id;
    EXPECT_THAT(row(plan, id).reason, HasSubstr(why));
  }
  const auto json = plan.to_json();
  const auto entry = [&](const std::string& id) {
    const auto it =
        std::find_if(json["offers"].begin(), json["offers"].end(), [&](const auto& e) { return e["offer"] == id; });
    EXPECT_NE(it, json["offers"].end());
    return *it;
  };
  EXPECT_TRUE(entry("o0")["storage_usd_per_hour"].is_null());
  EXPECT_TRUE(entry("o0")["usd_per_hour"].is_null());
  EXPECT_TRUE(entry("o1")["bandwidth_usd_per_hour"].is_null());
  EXPECT_TRUE(entry("o3")["up_mbit_per_s"].is_null());
  EXPECT_TRUE(entry("o6")["rollouts_per_s"].is_null());
  EXPECT_THAT(plan.to_table(), HasSubstr(" ? "));

  // An explicit option sets the assumed price, and the plan states it.
  r.fleet.assume.storage_usd_per_hour = 0.15;
  r.fleet.assume.upload_usd_per_gb = 0.02;
  r.fleet.assume.down = BitRate::from_mbit_per_s(100);
  const Plan assumed = planned(r, offers);
  EXPECT_NEAR(*row(assumed, "o0").cost.usd_per_hour(), 0.001 + 0.15, 1e-12);
  EXPECT_NEAR(*row(assumed, "o1").cost.bandwidth,
              row(assumed, "o1").chosen ? assumed.topology.copies_sent_by(*row(assumed, "o1").worker) * 1.08 * 0.02
                                        : 1.08 * 0.02,
              1e-12);
  EXPECT_THAT(row(assumed, "o0").assumed, ElementsAre("storage_usd_per_hour"));
  EXPECT_TRUE(row(assumed, "o4").chosen);
  EXPECT_THAT(assumed.notes, testing::Contains(HasSubstr("down is assumed for o4")));
  EXPECT_FALSE(row(assumed, "o0").offer.storage_usd_per_hour);  // it still does not state it
  EXPECT_EQ(row(assumed, "o2").rank, 0);

  // If no offer states a price, there is no plan, and the error names the setting to assume one.
  for (Offer& o : offers) o.download_usd_per_gb.reset();
  EXPECT_THAT(refusal(request(), offers), HasSubstr("download price not stated (fleet.assume.download_usd_per_gb)"));
}

TEST(MakePlan, TheSpendHasARangeByHowSureTheThroughputIs) {
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  auto r = request();
  r.run_time = std::chrono::hours(10);
  Plan plan = planned(r, offers);
  const double usd = plan.usd_per_hour.expected;
  EXPECT_NEAR(plan.usd_per_hour.low, usd / 1.50, 1e-9);
  EXPECT_NEAR(plan.usd_per_hour.high, usd / 0.50, 1e-9);
  EXPECT_NEAR(plan.rollouts_per_s_estimate().low, plan.rollouts_per_s * 0.50, 1e-9);
  EXPECT_NEAR(plan.rollouts_per_s_estimate().high, plan.rollouts_per_s * 1.50, 1e-9);
  for (Offer& o : offers) {
    o.rollouts_uncertainty = 0.25;
    o.rollouts_from = "an operator who has tried";
  }
  plan = planned(r, offers);
  EXPECT_NEAR(plan.usd_per_hour.high, usd / 0.75, 1e-9);
  EXPECT_THAT(plan.notes,
              testing::Contains("throughput of RTX 3090, perhaps 25 % more or less: an operator who has tried"));
  EXPECT_THAT(plan.to_table(),
              HasSubstr(fmt::format("rented: {:.4g} rollouts/s ({:.4g} to {:.4g}) from", plan.rollouts_per_s,
                                    plan.rollouts_per_s * 0.75, plan.rollouts_per_s * 1.25)));
  for (Offer& o : offers) o.rollouts_uncertainty.reset();
  for (Offer& o : offers) o.rollouts_source = RateSource::kMeasured;
  plan = planned(r, offers);
  EXPECT_NEAR(plan.usd_per_hour.high, usd / 0.95, 1e-9);
  EXPECT_NEAR(plan.usd_fleet()->expected, 10 * usd + plan.replacing.usd.expected, 1e-9);
  r.fleet.usd_max = 10 * usd * 0.9;
  EXPECT_THAT(refusal(r, offers), HasSubstr("the budget is"));
}

// The formula of docs/plan.md, computed by hand.
TEST(MakePlan, MachinesThatAreLostArePaidForWhileOthersBoot) {
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) {
    offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
    offers.back().reliability = 0.96;
    offers.back().download_usd_per_gb = 0.01;
  }
  auto r = request();
  r.run_time = std::chrono::hours(240);
  r.fleet.join_timeout = std::chrono::minutes(6);
  r.full_bytes = {16'000'000'000};
  Plan plan = planned(r, offers);
  const double machines = static_cast<double>(plan.topology.size());
  const double losses = machines * 240 * (0.04 / 0.96), join = 0.16, hour = plan.usd_per_hour.expected / machines;
  EXPECT_NEAR(*plan.rows.front().losses_per_hour, 0.04 / 0.96, 1e-12);
  EXPECT_NEAR(plan.replacing.losses, losses, 1e-9);
  EXPECT_NEAR(plan.replacing.usd.expected, losses * (join + hour * 0.05), 1e-9);
  EXPECT_NEAR(plan.replacing.usd.low, (losses - 2 * std::sqrt(losses)) * join, 1e-9);
  EXPECT_NEAR(plan.replacing.usd.high, (losses + 2 * std::sqrt(losses)) * (join + hour * 0.1), 1e-9);
  EXPECT_NEAR(plan.usd_fleet()->expected,
              240 * plan.usd_per_hour.expected + machines * join + plan.replacing.usd.expected, 1e-9);
  EXPECT_NEAR(plan.usd_fleet()->low, 240 * plan.usd_per_hour.low + machines * join + plan.replacing.usd.low, 1e-9);
  EXPECT_THAT(plan.to_table(), HasSubstr(fmt::format("{:.2g} machines lost and replaced: $", losses)));
  // Machines in ledgers count by their hours, a host's own before its provider's.
  const std::vector<PastRental> seen{
      {"local", "h0", 100, true}, {"cloud", "h1", 60, true}, {"cloud", "h1", 12, true}, {"cloud", "h2", 400, false}};
  for (std::size_t i = 0; i < offers.size(); ++i) {
    offers[i].provider = i == 0 ? "local" : "cloud";
    offers[i].host = fmt::format("h{}", i);
  }
  set_loss_history(offers, seen);
  EXPECT_NEAR(*losses_per_hour(r, offers[0]), 0.04 / 0.96, 1e-12);
  EXPECT_NEAR(*losses_per_hour(r, offers[1]), (24 * 0.04 / 0.96 + 2) / (24 + 72), 1e-12);
  EXPECT_NEAR(*losses_per_hour(r, offers[2]), (24 * 0.04 / 0.96 + 0) / (24 + 400), 1e-12);
  EXPECT_NEAR(*losses_per_hour(r, offers[3]), (24 * 0.04 / 0.96 + 2) / (24 + 472), 1e-12);
  auto bids = r;
  bids.fleet.pricing = Pricing::kBid;
  EXPECT_NEAR(*losses_per_hour(bids, offers[0]), 0.04 / 0.96 + 1 / 24.0, 1e-12);
  // Not known is not never.
  for (Offer& o : offers) o.reliability.reset();
  EXPECT_FALSE(losses_per_hour(r, offers[0]));
  EXPECT_NEAR(*losses_per_hour(r, offers[1]), 2 / 72.0, 1e-12);
  offers[0].gpu_usd_per_hour = 0.01;
  plan = planned(r, offers);
  EXPECT_TRUE(row(plan, "o0").chosen);
  EXPECT_TRUE(plan.to_json()["offers"][0]["losses_per_hour"].is_null());
  EXPECT_THAT(plan.notes,
              testing::Contains("it is unknown how often these are lost, so nothing is included for it: o0"));
  r.fleet.assume.reliability = 0.9;
  EXPECT_NEAR(*losses_per_hour(r, offers[0]), 0.1 / 0.9, 1e-12);
}

TEST(MakePlan, BidsAreAMarginAboveTheLeastAndMayRiseToTheFullPrice) {
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) {
    offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
    offers.back().rollouts_source = RateSource::kMeasured;
    if (i > 0) offers.back().bid_usd_per_hour_min = 0.04;
  }
  auto r = request();
  r.fleet.pricing = Pricing::kBid;
  r.fleet.bid_over_min = 0.25;
  const Plan plan = planned(r, offers);
  EXPECT_EQ(row(plan, "o0").reason, "no bid stated that would rent it");
  for (const PlanRow* chosen : plan.chosen()) {
    EXPECT_NEAR(*chosen->offer.bid_usd_per_hour, 0.05, 1e-12);
    EXPECT_NEAR(*chosen->offer.usd_per_hour(), 0.05, 1e-12);
  }
  EXPECT_NEAR(plan.usd_per_hour.expected, 0.05 * static_cast<double>(plan.topology.size()), 1e-9);
  EXPECT_NEAR(plan.usd_per_hour.high, 0.10 / 0.95 * static_cast<double>(plan.topology.size()), 1e-9);
}

TEST(MakePlan, PartsOfAMachineThatShareNoGpuGoTogetherUpToTheCapOfAHost) {
  std::vector<Offer> offers;
  for (int i = 0; i < 14; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10 + 0.01 * i));
  for (int i = 0; i < 4; ++i) offers[static_cast<std::size_t>(i)].host = "m";
  offers[0].gpu_ids = {0};
  offers[1].gpu_ids = {1};
  offers[2].gpu_ids = {1, 2};
  offers[3].gpu_ids = {};  // the whole machine
  const Plan plan = planned(request(), offers);
  EXPECT_TRUE(row(plan, "o0").chosen);
  EXPECT_TRUE(row(plan, "o1").chosen);
  EXPECT_EQ(row(plan, "o2").reason, "the same machine as o1");
  EXPECT_EQ(row(plan, "o3").reason, "the same machine as o0");
  EXPECT_THAT(plan.standby, testing::Not(testing::Contains("o2")));
  auto r = request();
  r.fleet.per_host_max = 1;
  for (int i = 4; i < 7; ++i) {  // of one owner, on machines of their own
    offers[static_cast<std::size_t>(i)].host = "m" + std::to_string(i);
    offers[static_cast<std::size_t>(i)].owner = "somebody";
  }
  const Plan capped = planned(r, offers);
  EXPECT_FALSE(row(capped, "o1").chosen);
  EXPECT_THAT(row(capped, "o1").reason, HasSubstr("fleet.per_host_max"));
  EXPECT_TRUE(row(capped, "o4").chosen);
  EXPECT_FALSE(row(capped, "o5").chosen);
  EXPECT_FALSE(row(capped, "o6").chosen);
}

TEST(MakePlan, KeepsTheGivenOffers) {
  std::vector<Offer> offers;
  for (int i = 0; i < 9; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  offers[8].gpu_usd_per_hour = 2;
  auto r = request();
  r.keep = {"o8"};
  const Plan plan = planned(r, offers);
  EXPECT_TRUE(row(plan, "o8").chosen);
  EXPECT_THAT(row(plan, "o8").reason, HasSubstr("kept"));
  r.keep = {"nobody"};
  EXPECT_THAT(refusal(r, offers, Code::kInvalid), HasSubstr("not available"));
}

TEST(MakePlan, OffersThatAreTakenOrElsewhereAreNotConsidered) {
  std::vector<Offer> offers;
  for (int i = 0; i < 9; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  for (Offer& o : offers) o.place = "Stockholm, SE";
  offers[0].rentable = false;
  offers[1].place = "Ohio, US";
  offers[2].place = "";
  auto r = request();
  r.fleet.places = {", se", "Norway"};
  const Plan plan = planned(r, offers);
  EXPECT_EQ(row(plan, "o0").reason, "another customer rents it");
  EXPECT_EQ(row(plan, "o1").reason, "in Ohio, US, not in fleet.places");
  EXPECT_EQ(row(plan, "o2").reason, "place not stated, but fleet.places requires one");
  EXPECT_GT(row(plan, "o3").rank, 0);
}

TEST(MakePlan, TheRunAndTheLearnerHaveAPrice) {
  std::vector<Offer> offers;
  for (int i = 0; i < 6; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  auto r = request();
  r.learner_usd_per_hour = 2;
  r.run_time = std::chrono::hours(3);
  const Plan plan = planned(r, offers);
  EXPECT_NEAR(plan.usd_run()->expected, 3 * (2 + plan.usd_per_hour.expected) + plan.replacing.usd.expected, 1e-9);
  EXPECT_NEAR(plan.to_json()["totals"]["run_usd_low"].get<double>(), plan.usd_run()->low, 1e-12);
  EXPECT_EQ(plan.to_json()["header"]["learner_usd_per_hour"], 2);
  EXPECT_THAT(plan.to_table(), HasSubstr("learner: $2.0000 per hour"));
  EXPECT_THAT(plan.to_table(), HasSubstr("run: 3 h, $"));
}

TEST(MakePlan, RefusesOffersOfTooLittleMemoryOrTimeOrAnotherProvider) {
  auto r = request();
  r.fleet.provider = "local";
  r.gpu_memory_min = Bytes{17'000'000'000};
  r.run_time = std::chrono::hours(30);
  std::vector<Offer> offers;
  for (int i = 0; i < 12; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  offers[0].vram_gb = 16;
  for (std::size_t i = 1; i < 12; ++i) offers[i].vram_gb = 24;
  offers[5].vram_gb.reset();
  offers[2].duration_max = std::chrono::hours(24);
  offers[3].duration_max.reset();
  offers[4].provider = "vast";
  const Plan plan = planned(r, offers);
  EXPECT_EQ(row(plan, "o0").reason, "16 GB per GPU, 17 needed");
  EXPECT_EQ(row(plan, "o2").reason, "rentable for 1 days, the run takes 1.2");
  EXPECT_EQ(row(plan, "o4").reason, "of provider vast, but this run rents from local");
  for (const char* refused : {"o0", "o2", "o4"}) {
    EXPECT_EQ(row(plan, refused).rank, 0);
    EXPECT_THAT(plan.standby, testing::Not(testing::Contains(refused)));
  }
  EXPECT_THAT(row(plan, "o5").reason, HasSubstr("GPU memory not stated"));
  for (const char* eligible : {"o1", "o3", "o6"}) EXPECT_GT(row(plan, eligible).rank, 0) << eligible;
}

TEST(MakePlan, OneMachineIsRentedOnce) {
  std::vector<Offer> offers;
  for (int i = 0; i < 12; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  offers[0].host = offers[1].host = offers[2].host = "h";
  offers[0].gpu_usd_per_hour = 0.06;
  offers[1].gpu_usd_per_hour = 0.05;
  offers[2].gpu_usd_per_hour = 0.07;
  offers[7].host = "h";
  offers[7].provider = "other";  // another's name for another machine
  const Plan plan = planned(request(), offers);
  EXPECT_TRUE(row(plan, "o1").chosen);
  EXPECT_EQ(row(plan, "o0").reason, "the same machine as o1");
  EXPECT_EQ(row(plan, "o2").reason, "the same machine as o1");
  EXPECT_GT(row(plan, "o7").rank, 0);
  EXPECT_THAT(plan.standby, testing::Not(testing::Contains("o0")));

  // Where the cheapest of a machine is too small for the target, its fastest is taken.
  std::vector<Offer> few{offer("small", 40, 0.01), offer("large", 400, 0.90), offer("other", 80, 0.10)};
  few[0].host = few[1].host = "h";
  const Plan fast = planned(request(), few);
  EXPECT_THAT(chosen_ids(fast), testing::Contains("large"));
  EXPECT_EQ(row(fast, "small").reason, "the same machine as large");
}

TEST(MakePlan, TheWorstStalenessFollowsTheLookahead) {
  std::vector<Offer> offers;
  for (int i = 0; i < 12; ++i) offers.push_back(offer("o" + std::to_string(i), 70, 0.10));
  auto r = request();
  r.lookahead = 3;
  EXPECT_EQ(planned(paced(r), offers).staleness_worst, 4);  // T_b below T
  r.lookahead = r.staleness_budget;
  EXPECT_EQ(planned(paced(r), offers).staleness_worst, r.staleness_budget);
  r.lookahead = 0;
  r.group_size = 70;  // a second on the slow ones
  offers[0].rollouts_per_s = 700;
  offers[0].gpu_usd_per_hour = 9;
  EXPECT_EQ(planned(paced(r), offers).staleness_worst, 1);  // all rented are equally fast
  offers[0].gpu_usd_per_hour = 0.01;
  r.pace.rollouts_per_step = 700;
  EXPECT_EQ(planned(paced(r), offers).staleness_worst, 2);
  // Strictly on-policy is a choice: the learner waits, and the plan reports it.
  r.staleness_budget = 0;
  const Plan strict = planned(paced(r), offers);
  EXPECT_EQ(strict.staleness_worst, 0);
  EXPECT_THAT(strict.notes, testing::Contains(HasSubstr("strictly on-policy")));
}

TEST(MakePlan, TakesTheOptimumWhereTheGreedySetIsDearer) {
  auto r = request();
  r.pace.rollouts_per_step = 100;
  r.fleet.headroom = 0;
  r.delta_bytes = {1};
  r.paths.delay_expected = {};
  // About 100/s are needed: greedy keeps "best" and completes it with "small"; the others together cost less.
  const Plan plan = planned(r, {offer("best", 90, 0.9), offer("middle", 61, 0.66), offer("small", 40, 0.46)});
  EXPECT_THAT(chosen_ids(plan), ElementsAre("middle", "small"));
  EXPECT_GT(plan.greedy_usd_per_hour, *plan.exact_usd_per_hour);
  EXPECT_DOUBLE_EQ(plan.chosen_usd_per_hour, *plan.exact_usd_per_hour);
  EXPECT_FALSE(row(plan, "best").chosen);
}

// The printed gap is against a bound that knows the limit on workers.
TEST(MakePlan, SaysHowFarAboveTheCheapestSetItMayBe) {
  Random random(4);
  std::vector<Offer> offers;
  for (int i = 0; i < 600; ++i) {
    const double rate = 20 + 100 * random.uniform();
    offers.push_back(offer("o" + std::to_string(i), rate, rate * rate * (0.5 + random.uniform()) / 10000));
  }
  auto r = request();
  r.fleet.workers_max = 5;
  const Plan plan = planned(r, offers);
  EXPECT_GE(plan.chosen_usd_per_hour, plan.lp_bound_usd_per_hour * (1 - 1e-9));
  EXPECT_LE(plan.chosen_usd_per_hour, plan.lp_bound_usd_per_hour * 1.02);
  EXPECT_EQ(plan.exact_usd_per_hour.has_value(), plan.method == "exact");
  EXPECT_THAT(plan.to_table(), HasSubstr(plan.method == "exact" ? "search: no set of these offers is cheaper"
                                                                : "% above the cheapest set within the limits"));
}

TEST(MakePlan, InfeasiblePoolsNameTheSettingToChange) {
  EXPECT_THAT(refusal(request(), {offer("a", 100, 1), offer("b", 100, 1)}), HasSubstr("together give 200"));
  auto r = request();
  r.fleet.workers_max = 2;
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  EXPECT_THAT(refusal(r, offers), HasSubstr("raise workers_max"));
  r = request();
  r.fleet.reliability_min = 0.999;
  EXPECT_THAT(refusal(r, offers), HasSubstr("8 more are refused"));
}

// The number that follows `words` in `text`.
std::optional<long> number_after(const std::string& text, const std::string& words) {
  const auto at = text.find(words);
  if (at == std::string::npos) return std::nullopt;
  return std::stol(text.substr(at + words.size()));
}

TEST(MakePlan, TheSettingsNamedWhenThePoolIsTooSmallAreEnough) {
  Random random(12);
  int kappas = 0, lowered = 0, older = 0;
  for (int round = 0; round < 200; ++round) {
    auto r = request();
    r.staleness_budget = 100;
    if (round % 2) {
      r.fleet.capacity_rule = CapacityRule::kOverlap;
      r.staleness_budget = 2 + static_cast<int>(random.below(2));
      r.pace.publish_every = 2;
      r.fleet.install_time_expected = milliseconds(random.between(0, 500));
      r.delta_bytes = {static_cast<std::uint64_t>(random.between(100'000, 900'000))};
    }
    r.pace.rollouts_per_step = static_cast<double>(random.between(300, 1200));
    std::vector<Offer> offers;
    const auto n = random.between(2, 9);
    for (int i = 0; i < n; ++i)
      offers.push_back(offer("o" + std::to_string(i), static_cast<double>(random.between(20, 160)), 0.10));
    const auto first = make_plan(r, offers);
    if (first) continue;
    const std::string text = first.error().detail;
    if (const auto kappa = number_after(text, "publish every ")) {
      auto slower = r;
      slower.pace.publish_every = static_cast<int>(*kappa);
      EXPECT_TRUE(make_plan(slower, offers)) << text;
      ++kappas;
    }
    if (const auto budget = number_after(text, "or allow S = ")) {
      auto looser = r;
      looser.staleness_budget = static_cast<int>(*budget);
      EXPECT_TRUE(make_plan(looser, offers)) << text;
      ++older;
    }
    if (const auto rollouts = number_after(text, "lower R to ")) {
      auto smaller = r;
      smaller.pace.rollouts_per_step = static_cast<double>(*rollouts);
      const auto plan = make_plan(smaller, offers);
      EXPECT_TRUE(plan) << text << "\n" << plan.error().detail;
      ++lowered;
    }
  }
  EXPECT_GT(kappas, 5);
  EXPECT_GT(older, 2);
  EXPECT_GT(lowered, 30);
}

TEST(MakePlan, InstallingIsPartOfTheBroadcastTime) {
  std::vector<Offer> offers;
  for (int i = 0; i < 12; ++i) offers.push_back(offer("o" + std::to_string(i), 70, 0.10));
  auto r = request();
  const Plan plain = planned(r, offers);
  r.fleet.install_time_expected = milliseconds(100);
  const Plan plan = planned(r, offers);
  const auto times = replayed(plan);
  ASSERT_TRUE(times);
  EXPECT_EQ(plan.broadcast_time, times->quorum_time(0.9) + milliseconds(100));
  EXPECT_GT(plan.target.required_rollouts_per_s, plain.target.required_rollouts_per_s);
}

// T = 2 s, T_b above 1 s: by echo2 eleven machines were needed, and with longer broadcasts no fleet sufficed.
TEST(MakePlan, WorkersThatGenerateDuringBroadcastsNeedNoMoreCapacityForThem) {
  auto r = request();
  r.fleet.capacity_rule = CapacityRule::kOverlap;
  r.pace = {256, 1, seconds(2)};
  r.delta_bytes = {1'100'000};
  std::vector<Offer> offers;
  for (int i = 0; i < 20; ++i) offers.push_back(offer("o" + std::to_string(i), 30, 0.10));
  const Plan plan = planned(r, offers);
  EXPECT_GT(plan.broadcast_time, seconds(1));
  EXPECT_DOUBLE_EQ(plan.target.required_rollouts_per_s, 128);
  EXPECT_EQ(plan.topology.size(), 5u);
  EXPECT_EQ(plan.staleness_needed, 2);
  r.fleet.install_time_expected = milliseconds(400);
  EXPECT_DOUBLE_EQ(planned(r, offers).target.required_rollouts_per_s, 160);
  // A budget of one step leaves the rest of each step for a batch.
  r.fleet.install_time_expected = {};
  r.staleness_budget = 1;
  const Plan tight = planned(r, offers);
  EXPECT_DOUBLE_EQ(tight.target.required_rollouts_per_s, 256 / (2 - echoline::seconds(tight.broadcast_time)));
  EXPECT_THAT(tight.notes, testing::Contains(HasSubstr("S = 2 would require 128")));
  EXPECT_EQ(tight.staleness_needed, 1);
  r.delta_bytes = {3'000'000};
  EXPECT_THAT(refusal(r, offers), HasSubstr("Allow S = 2 or more"));
  r.staleness_budget = 3;
  EXPECT_TRUE(make_plan(r, offers)) << "T_b above T";
  r.fleet.capacity_rule = CapacityRule::kEcho2;
  EXPECT_THAT(refusal(r, offers), HasSubstr("engines stop (fleet.capacity_rule: echo2)"));
}

TEST(MakePlan, ABroadcastLongerThanThePeriodIsInfeasible) {
  auto r = request();
  r.delta_bytes = {2'000'000};
  std::vector<Offer> offers(9, offer("x", 80, 0.1));
  for (std::size_t i = 0; i < offers.size(); ++i) offers[i].id += std::to_string(i);
  EXPECT_THAT(refusal(r, offers), HasSubstr("publish every 3 steps"));
}

TEST(MakePlan, HoldsTheBudgets) {
  auto r = request();
  std::vector<Offer> offers;
  for (int i = 0; i < 8; ++i) offers.push_back(offer("o" + std::to_string(i), 80, 0.10));
  r.fleet.usd_per_hour_max = 0.3;
  EXPECT_THAT(refusal(r, offers), HasSubstr("the budget is $0.3000/h"));
  r = request();
  r.pace.publish_every = 4;
  r.staleness_budget = 2;
  EXPECT_THAT(refusal(r, offers, Code::kInvalid), HasSubstr("set S to 4"));
  r.pace = {256, 4, seconds(1)};
  r.staleness_budget = 4;
  r.fleet.headroom = 0;
  const std::string text = refusal(r, offers);  // kappa - 1 + ceil(R/M + T_b) = 5 for this fleet
  EXPECT_THAT(text, HasSubstr("allow S = 5"));
  r.staleness_budget = 5;
  EXPECT_TRUE(make_plan(r, offers));
}

TEST(MakePlan, RefusesRequestsOutOfRange) {
  const std::vector<Offer> offers(1, offer("a", 1e6, 1));
  const auto with = [&](auto change) {
    PlanRequest r = request();
    change(r);
    return refusal(r, offers, Code::kInvalid);
  };
  EXPECT_THAT(with([](auto& r) { r.delta_bytes = {}; }), HasSubstr("publication"));
  EXPECT_THAT(with([](auto& r) { r.learner_up = {}; }), HasSubstr("uplink"));
  EXPECT_THAT(with([](auto& r) { r.paths.worker_rate = BitRate{}; }), HasSubstr("cap"));
  EXPECT_THAT(with([](auto& r) { r.paths.delay_expected = seconds(-1); }), HasSubstr("delay"));
  EXPECT_THAT(with([](auto& r) { r.quorum = 0; }), HasSubstr("q "));
  EXPECT_THAT(with([](auto& r) { r.fleet.workers_max = 0; }), HasSubstr("workers_max"));
  EXPECT_THAT(with([](auto& r) { r.pace.step_time = {}; }), HasSubstr("T must"));
  EXPECT_THAT(refusal(request(), {}, Code::kInvalid), HasSubstr("no offers"));
}

TEST(MakePlan, SetsThatAlternateAreReportedAndStillMeetTheirTarget) {
  // A chain of slow links: each further worker lengthens the broadcast, which raises the target. Some random pools do
  // not settle. Every returned plan still meets the target of its own fleet's T_b.
  Random random(33);
  int unsettled = 0, given = 0;
  for (int round = 0; round < 600; ++round) {
    PlanRequest r = request();
    r.learner_up = BitRate::from_mbit_per_s(static_cast<double>(random.between(4, 24)));
    r.delta_bytes = {static_cast<std::uint64_t>(random.between(50'000, 400'000))};
    r.paths.worker_rate = random.below(2) ? std::optional(BitRate::from_mbit_per_s(8)) : std::nullopt;
    r.topology = static_cast<chains::TopologyPolicy>(random.below(5));
    std::vector<Offer> offers;
    for (int i = 0; i < 14; ++i) {
      offers.push_back(
          offer("o" + std::to_string(i), static_cast<double>(random.between(20, 160)), 0.05 + 0.5 * random.uniform()));
      offers.back().up = BitRate::from_mbit_per_s(static_cast<double>(random.between(4, 40)));
      offers.back().reliability = random.uniform();
    }
    const auto plan = make_plan(r, offers);
    if (!plan) {
      EXPECT_EQ(plan.error().code, Code::kInfeasible) << plan.error().message();
      continue;
    }
    ++given;
    unsettled += !plan->converged;
    EXPECT_GE(plan->rollouts_per_s, plan->target.provisioned_rollouts_per_s * (1 - 1e-9));
    const auto target = capacity_target(r.pace, r.publication_times(plan->broadcast_time), r.capacity_terms());
    ASSERT_TRUE(target);
    EXPECT_DOUBLE_EQ(target->provisioned_rollouts_per_s, plan->target.provisioned_rollouts_per_s);
    EXPECT_LE(plan->staleness_worst, r.staleness_budget);
    EXPECT_LE(*plan->exact_usd_per_hour, plan->greedy_usd_per_hour + 1e-9);
    EXPECT_GE(plan->chosen_usd_per_hour, plan->lp_bound_usd_per_hour - 1e-9);
    EXPECT_EQ(plan->converged, std::none_of(plan->notes.begin(), plan->notes.end(), [](const auto& n) {
                return n.find("did not converge") != std::string::npos;
              }));
  }
  EXPECT_GT(given, 100);
  EXPECT_GT(unsettled, 0);
  RecordProperty("unsettled", unsettled);
}

PlanRequest quickstart() {
  PlanRequest r = request();
  r.pace = {2560, 1, seconds(1)};
  r.fleet.reliability_min = 0.95;
  r.fleet.duration_min = std::chrono::hours(6);
  return r;
}

TEST(Quickstart, RentsSixToEightForDifferentReasonsAndScales) {
  const auto offers = quickstart_offers();
  ASSERT_TRUE(offers) << offers.error().message();
  const Plan plan = planned(quickstart(), *offers);
  EXPECT_GE(plan.topology.size(), 6u);
  EXPECT_LE(plan.topology.size(), 8u);
  EXPECT_TRUE(plan.converged);
  EXPECT_GT(plan.target.provisioned_rollouts_per_s, 4000);
  EXPECT_LT(plan.target.provisioned_rollouts_per_s, 4600);
  std::set<std::string> kinds;
  for (const PlanRow& r : plan.rows)
    if (!r.chosen) kinds.insert(r.reason.substr(0, 15));
  EXPECT_GE(kinds.size(), 4u);
  EXPECT_GE(plan.standby.size(), 3u);
  // R and T scaled together need the same throughput, and take the same share of a step.
  auto slower = quickstart();
  slower.pace = {5120, 1, seconds(2)};
  slower.delta_bytes = {600'000};
  slower.chunk = {32 * 1024};
  slower.paths.delay_expected = milliseconds(10);
  EXPECT_EQ(chosen_ids(planned(slower, *offers)), chosen_ids(plan));
}

TEST(Output, JsonHoldsThePlan) {
  const auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  const Plan plan = planned(quickstart(), *offers);
  const auto json = plan.to_json();
  EXPECT_EQ(json["schema_version"], 5);
  EXPECT_EQ(json["header"]["rollouts_per_step"], 2560);
  EXPECT_EQ(json["header"]["t_b_seconds"], echoline::seconds(plan.broadcast_time));
  EXPECT_EQ(json["offers"].size(), offers->size());
  EXPECT_EQ(json["totals"]["workers"], plan.topology.size());
  EXPECT_EQ(json["topology"]["chains"].size(), plan.topology.chains.size());
  EXPECT_EQ(json["standby"].size(), plan.standby.size());
  double sum = 0;
  for (const auto& o : json["offers"]) {
    if (!o["chosen"]) continue;
    sum += o["rollouts_per_s"].get<double>();
    EXPECT_DOUBLE_EQ(o["cumulative_rollouts_per_s"].get<double>(), sum);
  }
  EXPECT_NEAR(sum, json["totals"]["rollouts_per_s"].get<double>(), 1e-9);
  EXPECT_EQ(nlohmann::json::parse(json.dump()), json);
}

TEST(Output, TheTableIsAlignedAsciiWithEveryOffer) {
  auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  (*offers)[0].place =
      "K\xc3\xb8"
      "benhavn\n";
  (*offers)[0].host = "a-host-name-that-is-far-too-long-for-its-column";
  const Plan plan = planned(quickstart(), *offers);
  const std::string table = plan.to_table();
  for (const char c : table) EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~'));
  std::istringstream lines(table);
  std::string line, longest;
  bool in_tables = false;
  std::size_t column_end = 0;
  while (std::getline(lines, line)) {
    if (line.starts_with("wkr")) {
      in_tables = true;
      column_end = line.size();  // the last column is right aligned: every row ends where the title does
      continue;
    }
    if (line.empty()) column_end = 0;
    if (in_tables) {
      EXPECT_LE(line.size(), 80u) << line;
      if (column_end > 0) {
        EXPECT_EQ(line.size(), column_end) << line;
      }
    }
  }
  EXPECT_TRUE(in_tables);
  for (const Offer& o : *offers) EXPECT_THAT(table, HasSubstr(o.id));
}

// A narrow terminal folds the lines, and drops the least informative columns. Offers, prices and reasons stay.
TEST(Output, TheTableFitsANarrowTerminal) {
  auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  for (Offer& o : *offers)
    o.rollouts_from = "an author whose name is long and who has published it in a paper about many things";
  const Plan plan = planned(quickstart(), *offers);
  for (const std::size_t columns : {40u, 60u, 80u, 200u}) {
    std::istringstream lines(plan.to_table({}, columns));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), columns) << line;
  }
  const std::string table = plan.to_table({}, 60);
  EXPECT_THAT(table, HasSubstr("wkr offer"));
  EXPECT_THAT(table, HasSubstr("gpu $/h"));
  EXPECT_THAT(table, HasSubstr("why not"));
  EXPECT_THAT(table, testing::Not(HasSubstr(" up days\n")));
  EXPECT_THAT(plan.to_table(), HasSubstr(" up days\n"));
  for (const Offer& o : *offers) EXPECT_THAT(table, HasSubstr(o.id));
}

TEST(Output, ALargeMarketIsSummedUp) {
  std::vector<Offer> offers;
  for (int i = 0; i < 500; ++i) offers.push_back(offer(fmt::format("offer-{}", i), 70, 0.10 + 0.001 * i));
  const Plan plan = planned(request(), offers);
  const std::string table = plan.to_table();
  EXPECT_LT(std::count(table.begin(), table.end(), '\n'), 80);
  EXPECT_THAT(table, HasSubstr(fmt::format("and {} more", 500 - plan.topology.size() - 40)));
}

TEST(Output, APlanReadsBackToTheSame) {
  const auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  for (const auto policy :
       {chains::TopologyPolicy::kTrees, chains::TopologyPolicy::kStripes, chains::TopologyPolicy::kStar}) {
    auto r = quickstart();
    r.topology = policy;
    r.learner_up = BitRate::from_mbit_per_s(200);
    r.run_time = std::chrono::hours(2);
    r.fleet.assume.upload_usd_per_gb = 0.1;
    r.fleet.places = {"SE", "US", "CA", "PL", "DE", "NL", "FR", "IS", "ES", "CZ", "FI"};
    r.paths.regions.regions = {{"here", {"US"}}, {"far", {"SE", "DE"}}};
    r.paths.regions.graph.links.assign(2, std::vector<chains::RegionLink>(2));
    r.paths.regions.graph.links[0][1].rate = BitRate::from_mbit_per_s(100);
    r.paths.regions.graph.links[1][1].delay = milliseconds(3);
    Plan plan = planned(r, *offers);
    plan.market = {"market.json", "own", 1.7e9};
    const std::string text = plan.to_json().dump();
    const auto again = Plan::from_json(nlohmann::json::parse(text));
    ASSERT_TRUE(again) << again.error().message();
    EXPECT_EQ(again->to_json().dump(), text);
    EXPECT_EQ(again->topology, plan.topology);
    EXPECT_EQ(again->to_table(), plan.to_table());
    EXPECT_EQ(chosen_ids(*again), chosen_ids(plan));
    EXPECT_EQ(again->request.fleet.assume, plan.request.fleet.assume);
  }
}

// A run of an earlier version resumes with its plan, whose offers have fewer keys.
TEST(Output, APlanOfAnEarlierVersionIsRead) {
  auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  offers->front().cloud = "aws";
  offers->front().machine_type = "p5.48xlarge";
  nlohmann::json json = planned(quickstart(), *offers).to_json();
  const auto now = Plan::from_json(json);
  ASSERT_TRUE(now) << now.error().message();
  EXPECT_TRUE(std::any_of(now->rows.begin(), now->rows.end(), [](const PlanRow& row) {
    return row.offer.cloud == "aws" && row.offer.machine_type == "p5.48xlarge";
  }));
  for (auto& offer : json["offers"])
    for (const char* key : {"cloud", "region", "zone", "machine_type"}) offer.erase(key);
  const auto earlier = Plan::from_json(json);
  ASSERT_TRUE(earlier) << earlier.error().message();
  EXPECT_EQ(earlier->rows.front().offer.cloud, "");
}

TEST(Output, AChangedPlanIsRefusedWithThePlaceOfTheMistake) {
  const auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  const nlohmann::json good = planned(quickstart(), *offers).to_json();
  const auto problem = [&](const char* pointer, nlohmann::json value) {
    nlohmann::json bad = good;
    bad[nlohmann::json::json_pointer(pointer)] = std::move(value);
    const auto plan = Plan::from_json(bad);
    EXPECT_FALSE(plan) << pointer;
    return plan ? std::string() : plan.error().detail;
  };
  EXPECT_THAT(problem("/schema_version", 2), HasSubstr("make the plan again"));
  EXPECT_THAT(problem("/header/headroom", -1), HasSubstr("header.headroom: expected a number of 0"));
  EXPECT_THAT(problem("/header/publish_every", 1.5), HasSubstr("header.publish_every"));
  EXPECT_THAT(problem("/offers/0/gpu_usd_per_hour", "1"), HasSubstr("offers[0].gpu_usd_per_hour"));
  EXPECT_THAT(problem("/offers/0/gpu_usd_per_hour", nullptr), HasSubstr("its throughput or price is unknown"));
  EXPECT_THAT(problem("/offers/0/worker", 7000000), HasSubstr("offers[0].worker"));
  EXPECT_THAT(problem("/offers/1/worker", 1), HasSubstr("expected worker 2"));
  EXPECT_THAT(problem("/offers/0/offer", std::string(10'000'000, 'x')), HasSubstr("at most 4096 bytes"));
  EXPECT_LT(problem("/offers/0/offer", std::string(10'000'000, 'x')).size(), 300u);
  EXPECT_THAT(problem("/offers", nlohmann::json::array()), HasSubstr("topology"));
  EXPECT_THAT(problem("/offers/0/chosen", false), HasSubstr("a rented offer has a worker"));
  EXPECT_THAT(problem("/topology/chains/0/0", 999), HasSubstr("topology.chains"));
  EXPECT_THAT(problem("/topology/chains", nlohmann::json::array()), HasSubstr("topology: "));
  EXPECT_THAT(problem("/totals", 3), HasSubstr("totals: expected an object"));
  EXPECT_FALSE(Plan::from_json(nlohmann::json(3)));
  EXPECT_EQ(load_plan("/nonexistent/plan.json").error().code, Code::kNotFound);
}

// docs/plan.md names every field.
void expect_documented(const nlohmann::json& value, const std::string& path, const std::string& text) {
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items())
      expect_documented(inner, path.empty() ? key : path + "." + key, text);
  } else if (value.is_array() && !value.empty() && value[0].is_object()) {
    expect_documented(value[0], path + "[]", text);
  } else {
    EXPECT_THAT(text, HasSubstr("| `" + path + "` |"));
  }
}

TEST(Output, EveryFieldIsDocumented) {
  const auto offers = quickstart_offers();
  ASSERT_TRUE(offers);
  std::ifstream in("docs/plan.md");
  const std::string text(std::istreambuf_iterator<char>(in), {});
  ASSERT_FALSE(text.empty());
  expect_documented(planned(quickstart(), *offers).to_json(), "", text);
}

}  // namespace
}  // namespace echoline::provisioner
