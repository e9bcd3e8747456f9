// The driver of the fleet with real processes and a real ledger.
#include "provisioner/fleet_driver.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <set>

#include "tests/overlay/folder.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

Offer offer(const std::string& id, const std::string& provider = "local") {
  Offer o;
  o.id = id;
  o.provider = provider;
  o.host = "host-" + id;
  o.up = o.down = BitRate{1e8};
  o.rollouts_per_s = 60;
  o.rollouts_source = RateSource::kProfile;
  o.gpu_usd_per_hour = 0.36;
  o.storage_usd_per_hour = 0;
  o.upload_usd_per_gb = o.download_usd_per_gb = 0;
  return o;
}

class DriverOfFleet : public testing::Test {
 protected:
  // M* is 100 rollouts/s and 110 are rented: two of the offers.
  FleetOptions options(const std::vector<Offer>& offers) {
    PlanRequest request;
    request.fleet.provider = "none";  // of any
    request.pace = {1000, 1, seconds(10)};
    request.delta_bytes = {1000};
    request.full_bytes = {1000};
    request.learner_up = {1e9};
    auto plan = make_plan(request, offers);
    EXPECT_TRUE(plan) << plan.error().message();
    FleetOptions o;
    o.run = "r";
    o.plan = std::move(*plan);
    o.ledger_file = ledger_file();
    o.providers.log_folder = folder.path();
    o.launch = [](const Offer&) -> Result<LaunchSpec> {
      LaunchSpec spec;
      spec.argv = {"/bin/sleep", "600"};
      return spec;
    };
    o.record = [this](std::string_view event, const std::string& about, const std::string& detail) {
      const std::lock_guard lock(mutex);
      events.emplace_back(std::string(event) + " " + about, detail);
    };
    o.machine_ended = [this](WorkerId worker, const std::string&) { ended_worker = worker.value; };
    return o;
  }
  std::filesystem::path ledger_file() { return folder.path() / "ledger.sqlite"; }
  std::vector<std::string> seen() {
    const std::lock_guard lock(mutex);
    std::vector<std::string> all;
    for (const auto& [event, detail] : events) all.push_back(event);
    return all;
  }
  template <class F>
  static bool eventually(F&& holds) {
    const SystemClock clock;
    for (const TimePoint end = clock.now() + seconds(20); clock.now() < end;
         std::this_thread::sleep_for(std::chrono::milliseconds(10)))
      if (holds()) return true;
    return holds();
  }

  overlay::TemporaryFolder folder;
  std::mutex mutex;
  std::vector<std::pair<std::string, std::string>> events;
  std::atomic<std::uint64_t> ended_worker = 0;
};

// An offer of one provider is never requested from another.
TEST_F(DriverOfFleet, AnOfferOfAProviderThatCannotBeUsedIsAnErrorAndNothingIsStarted) {
  const auto fleet = FleetDriver::start(options({offer("a"), offer("b", "nimbus")}));
  ASSERT_FALSE(fleet);
  EXPECT_EQ(fleet.error().code, Code::kInvalid);
  EXPECT_THAT(fleet.error().message(), HasSubstr("offer 'b' is of provider 'nimbus'"));
  EXPECT_THAT(seen(), testing::IsEmpty());
  EXPECT_FALSE(std::filesystem::exists(ledger_file()));
}

TEST_F(DriverOfFleet, AStandbyOfferOfAnUnusableProviderIsLeftOut) {
  std::vector<Offer> offers{offer("a"), offer("b"), offer("c", "nimbus")};
  offers[2].gpu_usd_per_hour = 9;
  auto fleet = FleetDriver::start(options(offers));
  ASSERT_TRUE(fleet) << fleet.error().message();
  EXPECT_EQ((*fleet)->summary().started, 2u);
}

TEST_F(DriverOfFleet, RentsBooksReplacesAndReleases) {
  std::vector<Offer> offers{offer("a"), offer("b"), offer("c")};
  offers[2].gpu_usd_per_hour = 0.5;
  auto started = FleetDriver::start(options(offers));
  ASSERT_TRUE(started) << started.error().message();
  FleetDriver& fleet = **started;
  EXPECT_EQ(fleet.summary().planned, 2u);
  EXPECT_EQ(fleet.summary().started, 2u);
  fleet.notify(fleet::Joined{WorkerId{1}, "a"});
  fleet.notify(fleet::Joined{WorkerId{2}, "b"});
  fleet.on_heartbeat({WorkerId{1}, 600, 30}, {500'000}, {250'000}, {250'000});  // its first results give no rate
  fleet.on_heartbeat({WorkerId{1}, 600, 10}, {1'000'000}, {500'000}, {500'000});
  ASSERT_TRUE(eventually([&] { return fleet.summary().numbers.working == 2; }));
  // The process dies: the fleet books it, gives up its worker, and rents a replacement.
  pid_t pid = 0;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [event, detail] : events)
      if (event == "rented a") pid = static_cast<pid_t>(std::stol(detail.substr(detail.find_first_of("0123456789"))));
  }
  ASSERT_GT(pid, 1);
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  ASSERT_TRUE(eventually([&] { return fleet.summary().started == 3; }));
  EXPECT_EQ(ended_worker, 1u);
  EXPECT_THAT(seen(), testing::IsSupersetOf({"planned a", "planned b", "lost a", "replaced c", "rented c"}));
  const FleetSummary before = fleet.summary();
  EXPECT_EQ(before.lost, 1u);
  EXPECT_EQ(before.replaced, 1u);
  fleet.stop();

  auto ledger = Ledger::open(ledger_file(), "r");
  ASSERT_TRUE(ledger);
  double usd = 0;
  for (const LedgerRow& row : *ledger->rows()) {
    EXPECT_EQ(row.state, InstanceState::kEnded) << row.label;
    usd += row.usd(0);
    if (row.offer == "a") {
      EXPECT_EQ(row.downloaded.count, 1'000'000u);
      EXPECT_EQ(row.uploaded.count, 500'000u);
      EXPECT_NEAR(row.measured_rollouts_per_s.value_or(0), 60, 1);
    }
  }
  EXPECT_EQ(ledger->rows()->size(), 3u);
  EXPECT_NEAR(fleet.summary().usd, usd, 1e-9);
  // The ledger explains every step, with numbers.
  std::set<std::string> decided;
  for (const LedgerDecision& decision : *ledger->decisions()) {
    decided.insert(decision.what);
    EXPECT_THAT(decision.numbers, HasSubstr("target_rollouts_per_s"));
    EXPECT_THAT(decision.numbers, decision.what == "lost" ? HasSubstr("\"row\":1,") : HasSubstr("{"));
  }
  EXPECT_THAT(decided, testing::IsSupersetOf({"planned", "lost", "replaced"}));
}

// The traffic in a worker's heartbeats, and the bytes that others received from it, give a lower bound of its host's
// links. Later plans use it.
TEST_F(DriverOfFleet, RecordsMeasuredLinks) {
  auto fleet = FleetDriver::start(options({offer("a"), offer("b")}));
  ASSERT_TRUE(fleet) << fleet.error().message();
  (*fleet)->notify(fleet::Joined{WorkerId{1}, "a"});
  const SystemClock clock;
  const TimePoint begin = clock.now();
  while (clock.now() - begin < LinkMeter::kStretchMin + std::chrono::milliseconds(300)) {
    const auto bytes = static_cast<std::uint64_t>(echoline::seconds(clock.now() - begin) * 1e6);
    (*fleet)->on_heartbeat({WorkerId{1}, 0, 0}, {2 * bytes}, {3 * bytes}, {bytes});
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  (*fleet)->stop();
  const auto hosts = Ledger::open(ledger_file(), "r")->hosts();
  ASSERT_EQ(hosts->size(), 2u);
  EXPECT_FALSE(hosts->at(0).up || hosts->at(0).down);
  ASSERT_TRUE(hosts->at(1).up && hosts->at(1).down);
  EXPECT_NEAR(hosts->at(1).down->bits_per_s / hosts->at(1).up->bits_per_s, 2, 0.1);
  EXPECT_NEAR(hosts->at(1).up->mbit_per_s(), 8, 2);
}

// A worker that is told to stop is replaced at once. Its machine is released after it has submitted its work.
TEST_F(DriverOfFleet, DrainsAnEndingMachineAndReplacesItAtOnce) {
  FleetOptions o = options({offer("a"), offer("b"), offer("c")});
  std::atomic<std::uint64_t> drains = 0;
  o.drain = [&](WorkerId worker, const std::string& why) {
    EXPECT_THAT(why, HasSubstr("told to stop"));
    drains = worker.value;
  };
  auto started = FleetDriver::start(std::move(o));
  ASSERT_TRUE(started) << started.error().message();
  FleetDriver& fleet = **started;
  fleet.notify(fleet::Joined{WorkerId{1}, "a"});
  fleet.notify(fleet::Joined{WorkerId{2}, "b"});
  fleet.notify(fleet::Leaving{WorkerId{1}});
  ASSERT_TRUE(eventually([&] { return fleet.summary().started == 3; }));
  EXPECT_EQ(drains, 1u);
  EXPECT_EQ(fleet.summary().numbers.stopping, 1u);  // the ending machine still works
  EXPECT_THAT(seen(), testing::Not(testing::Contains("ended a")));
  fleet.notify(fleet::Drained{WorkerId{1}});
  ASSERT_TRUE(eventually([&] { return fleet.summary().numbers.stopping == 0; }));
  EXPECT_EQ(fleet.summary().lost, 1u);
  fleet.stop();
  const auto ledger = Ledger::open(ledger_file(), "r");
  ASSERT_TRUE(ledger);
  EXPECT_THAT(ledger->rows()->front().note, HasSubstr("told to stop"));
}

// The market is refreshed on its own thread while the run goes on. Later rentals come from the refreshed market.
TEST_F(DriverOfFleet, ReplacesByTheMarketOfNow) {
  std::vector<Offer> offers{offer("a"), offer("b"), offer("c")};
  offers[2].gpu_usd_per_hour = 0.5;
  FleetOptions o = options(offers);
  std::atomic<bool> given_up = false;
  o.market_every = std::chrono::milliseconds(1);
  o.market = [&, looks = 0](const std::atomic<bool>& stop) mutable -> Result<std::optional<std::vector<Offer>>> {
    switch (++looks) {
      case 1:
        return fail(Code::kUnavailable, "look", "not now");
      case 2: {  // c is gone; d has no known rate; e belongs to an unavailable provider
        std::vector<Offer> now{offer("a"), offer("d"), offer("e", "nimbus"), offer("f")};
        now[1].rollouts_per_s = 0;
        now[3].gpu_usd_per_hour = 0.7;
        return std::optional(std::move(now));
      }
      case 3:
        return std::optional<std::vector<Offer>>();
      default:  // a search that takes for ever ends with the run
        while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        given_up = true;
        return fail(Code::kUnavailable, "look", "given up");
    }
  };
  auto started = FleetDriver::start(std::move(o));
  ASSERT_TRUE(started) << started.error().message();
  FleetDriver& fleet = **started;
  fleet.notify(fleet::Joined{WorkerId{1}, "a"});
  fleet.notify(fleet::Joined{WorkerId{2}, "b"});
  ASSERT_TRUE(eventually([&] { return std::ranges::count(seen(), "market ") == 1; }));
  fleet.notify(fleet::Left{WorkerId{2}, "away for too long"});
  ASSERT_TRUE(eventually([&] { return fleet.summary().started == 3; }));
  EXPECT_THAT(seen(), testing::Contains("replaced f"));
  fleet.stop();
  EXPECT_TRUE(given_up);
}

TEST_F(DriverOfFleet, MachinesOfAKilledProcessAreBookedUntilLastSeenAndReplaced) {
  double last_seen = 0;
  {
    auto ledger = Ledger::open(ledger_file(), "r");
    ASSERT_TRUE(ledger);
    const double then = SystemClock().unix_seconds() - 3600;
    const auto row = ledger->record_intent(offer("a"), then);
    ASSERT_TRUE(row && ledger->record_start(row->id, "local:999999:1", then + 1));
    last_seen = then + 100;
    const LedgerSignOfLife sign{row->id, {}, {}};
    ASSERT_TRUE(ledger->record_signs_of_life(std::span(&sign, 1), last_seen));
    ASSERT_TRUE(ledger->record_intent(offer("b"), then + 50));
  }
  {
    auto fleet = FleetDriver::start(options({offer("a"), offer("b")}));
    ASSERT_TRUE(fleet) << fleet.error().message();
    EXPECT_TRUE(eventually([&] { return (*fleet)->summary().started == 2; }));
    EXPECT_EQ((*fleet)->summary().numbers.joining, 2u);
  }
  auto ledger = Ledger::open(ledger_file(), "r");
  ASSERT_TRUE(ledger);
  const auto rows = *ledger->rows();
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_NEAR(rows[0].ended_unix_s.value_or(0), last_seen, 1e-3);
  EXPECT_NEAR(rows[1].ended_unix_s.value_or(0), last_seen - 50,
              1e-3);  // the ledger knows only that the rental was intended
  for (const LedgerRow& row : rows) EXPECT_FALSE(row.is_open()) << row.label;
}

}  // namespace
}  // namespace echoline::provisioner
