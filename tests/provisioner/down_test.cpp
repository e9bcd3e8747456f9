// `down` releases every rented machine, and trusts complete listings only. This holds after a kill at any moment.
#include "provisioner/down.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "provisioner/fleet_driver.hpp"
#include "provisioner/providers/vast.hpp"
#include "vast_fleet.hpp"
#include "vast_server.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr const char* kUrl = "ECHOLINE_TEST_VAST_URL";
constexpr const char* kLedger = "ECHOLINE_TEST_LEDGER";

Offer offer(const std::string& id) { return vast_offer(id); }

std::unique_ptr<Provider> vast(const std::string& url) {
  VastOptions options;
  options.url = url;
  options.key = VastServer::kKey;
  return std::make_unique<VastProvider>(std::move(options));
}

class DownTest : public testing::Test {
 protected:
  void SetUp() override {
    // Uses a folder in memory if there is one, where synced writes are cheap. The test kills processes, not the
    // machine.
    const std::filesystem::path memory = "/dev/shm";
    folder = (std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path()) /
             fmt::format("echoline-down-{}", getpid());
    std::filesystem::remove_all(folder);
    clock.advance(std::chrono::hours(1));
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  Ledger open() { return std::move(Ledger::open(folder / "ledger.sqlite", "run")).value(); }
  DownReport down(Ledger& ledger, bool absent_is_gone = false, const Bill& bill = {}) {
    DownOptions options;
    options.bill = [&](const std::string&, double, double) { return Result<Bill>(bill); };
    options.provider = [&](const std::string&) { return Result<std::unique_ptr<Provider>>(vast(server.url())); };
    options.providers = {"vast"};
    options.absent_is_gone = absent_is_gone;
    options.pause = [&](Duration d) {  // virtual time runs faster than the server
      clock.advance(std::max<Duration>(d, milliseconds(500)));
      std::this_thread::sleep_for(milliseconds(1));
    };
    auto report = bring_down(ledger, clock, options);
    EXPECT_TRUE(report) << report.error().message();
    return report ? *report : DownReport{};
  }
  // Adds a row in the state running, and its instance.
  LedgerRow running(Ledger& ledger, const std::string& id) {
    const LedgerRow row = *ledger.record_intent(offer(id), clock.unix_seconds());
    VastInstance instance;
    instance.id = std::stoll(id);
    instance.label = row.label;
    server.put(instance);
    EXPECT_TRUE(ledger.record_start(row.id, "vast:" + id, clock.unix_seconds()));
    return row;
  }
  static std::size_t open_rows(const Ledger& ledger) {
    const auto rows = *ledger.rows();
    return static_cast<std::size_t>(
        std::count_if(rows.begin(), rows.end(), [](const auto& row) { return row.is_open(); }));
  }

  VastServer server;
  ManualClock clock;
  std::filesystem::path folder;
};

TEST_F(DownTest, ReleasesExactlyTheMachinesOfTheRun) {
  Ledger ledger = open();
  running(ledger, "1");
  const LedgerRow asked = *ledger.record_intent(offer("2"), clock.unix_seconds());  // rented, and the answer was lost
  VastInstance lost;
  lost.id = 2;
  lost.label = asked.label;
  server.put(lost);
  const LedgerRow never = *ledger.record_intent(offer("3"), clock.unix_seconds());  // not rented
  const LedgerRow failed = *ledger.record_intent(offer("4"), clock.unix_seconds());
  ASSERT_TRUE(ledger.record_failure(failed.id, "status 500", clock.unix_seconds()));  // but its instance exists
  VastInstance orphan;
  orphan.id = 4;
  orphan.label = failed.label;
  server.put(orphan);
  VastInstance other;
  other.id = 5;
  other.label = "run.00000000/1";  // of a run of the same name, elsewhere
  server.put(other);

  const DownReport report = down(ledger);
  EXPECT_THAT(report.problems, testing::IsEmpty());
  EXPECT_EQ(report.released.size(), 4u);
  ASSERT_EQ(server.rented().size(), 1u);
  EXPECT_EQ(server.rented().begin()->first, 5);
  EXPECT_EQ(open_rows(ledger), 0u);
  const auto rows = *ledger.rows();
  ASSERT_EQ(rows.size(), 5u);  // the orphan got a row of its own
  EXPECT_EQ(rows[1].instance, "vast:2");
  EXPECT_EQ(rows[2].id, never.id);
  EXPECT_EQ(rows[2].state, InstanceState::kFailed);
  EXPECT_EQ(rows[4].instance, "vast:4");

  const DownReport again = down(ledger);
  EXPECT_TRUE(again.released.empty() && again.problems.empty());
  EXPECT_EQ(server.rented().size(), 1u);
}

TEST(LabelOfRun, IsToldFromOthers) {
  EXPECT_TRUE(is_label_of_run("night.1a2b3c4d/17", ""));
  EXPECT_TRUE(is_label_of_run("night.1a2b3c4d/17", "night"));
  EXPECT_TRUE(is_label_of_run("night-1a2b3c4d-17", "Night"));
  EXPECT_FALSE(is_label_of_run("night.1a2b3c4d/17", "nigh"));
  for (const char* other : {"", "17", "/17", "night", "night/17", "night.1a2b3c4g/17", "night.1a2b3c4d/", "a1a2b3c4d/1",
                            "night.1a2b3c4d-17", "my training", "pod-7"})
    EXPECT_FALSE(is_label_of_run(other, "")) << other;
}

// Without a ledger, from any machine that has the key.
TEST_F(DownTest, LabelsAloneReleaseTheMachinesOfARunOrOfAll) {
  for (int i = 0; i < 60; ++i) {
    VastInstance instance;
    instance.label = fmt::format("{}.1a2b3c4d/{}", i % 2 == 0 ? "night" : "day", i);
    server.put(instance);
  }
  VastInstance of_the_user;
  of_the_user.label = "my own training";
  server.put(of_the_user);
  DownOptions options;
  options.provider = [&](const std::string&) { return Result<std::unique_ptr<Provider>>(vast(server.url())); };
  options.providers = {"vast"};
  options.pause = [&](Duration d) {
    clock.advance(std::max<Duration>(d, milliseconds(500)));
    std::this_thread::sleep_for(milliseconds(1));
  };
  server.fail_randomly(0.1, 3);
  const DownReport night = bring_down_labelled(clock, options, "night");
  EXPECT_THAT(night.problems, testing::IsEmpty());
  EXPECT_EQ(night.released.size(), 30u);
  EXPECT_EQ(server.rented().size(), 31u);
  const DownReport all = bring_down_labelled(clock, options, "");
  EXPECT_THAT(all.problems, testing::IsEmpty());
  ASSERT_EQ(server.rented().size(), 1u);
  EXPECT_EQ(server.rented().begin()->second.label, "my own training");
  server.expire_key();
  EXPECT_THAT(bring_down_labelled(clock, options, "").problems, testing::ElementsAre(HasSubstr("key")));
}

TEST_F(DownTest, AFailedReleaseKeepsItsRowOpen) {
  Ledger ledger = open();
  running(ledger, "1");
  server.fault({.kind = "destroy", .status = 500, .times = 1000});
  DownReport report = down(ledger);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0], HasSubstr("vast:1 may still be rented"));
  EXPECT_EQ(open_rows(ledger), 1u);
}

TEST_F(DownTest, AnAccountWithoutAnyRentalMayBeTheWrongOne) {
  Ledger ledger = open();
  running(ledger, "1");
  server.remove(1);
  const DownReport report = down(ledger);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0], HasSubstr("--gone"));
  EXPECT_EQ(open_rows(ledger), 1u);
  // The first call requested the end, so the second takes the absence as its success. The user may also state it.
  EXPECT_TRUE(down(ledger).problems.empty());
  EXPECT_EQ(open_rows(ledger), 0u);
  running(ledger, "2");
  server.remove(2);
  EXPECT_TRUE(down(ledger, true).problems.empty());
}

// After the hosts have ended all instances of a killed learner, the account's bill shows that it is the right one.
TEST_F(DownTest, AnAccountWhoseBillHasAnInstanceIsTheRightOne) {
  Ledger ledger = open();
  running(ledger, "1");
  running(ledger, "2");
  server.remove(1);
  server.remove(2);
  EXPECT_THAT(down(ledger).problems, testing::ElementsAre(HasSubstr("--gone")));
  EXPECT_EQ(open_rows(ledger), 2u);
  running(ledger, "3");
  server.remove(3);
  Bill bill;
  bill.charges.push_back({.instance = {"vast:3"}, .day_unix_s = 0, .usd = 1, .usd_rent = 1, .usd_traffic = 0});
  EXPECT_THAT(down(ledger, false, bill).problems, testing::IsEmpty());
  EXPECT_EQ(open_rows(ledger), 0u);
}

// A host has ended its instance after the learner was killed. The user runs `down` days later.
TEST_F(DownTest, AnInstanceThatEndedUnwatchedCostsUntilItsLastSignOfLife) {
  Ledger ledger = open();
  const LedgerRow row = running(ledger, "1");
  clock.advance(std::chrono::hours(1));
  const std::array<LedgerSignOfLife, 1> signs{LedgerSignOfLife{.row = row.id, .uploaded = {}, .downloaded = {}}};
  ASSERT_TRUE(ledger.record_signs_of_life(signs, clock.unix_seconds()));
  server.remove(1);
  clock.advance(std::chrono::hours(48));
  EXPECT_TRUE(down(ledger, true).problems.empty());
  EXPECT_NEAR(ledger.rows()->front().usd(clock.unix_seconds()), row.usd_per_hour, 1e-6);
}

TEST_F(DownTest, AKeyThatIsRefusedLeavesTheLedgerAsItIs) {
  Ledger ledger = open();
  running(ledger, "1");
  ASSERT_TRUE(ledger.record_intent(offer("2"), clock.unix_seconds()));
  server.expire_key();
  EXPECT_FALSE(down(ledger).problems.empty());
  EXPECT_EQ(open_rows(ledger), 2u);
}

// The fleet of a learner that wants two machines of forty.
FleetOptions fleet_options(const Clock& clock, const std::string& url, const std::filesystem::path& ledger) {
  constexpr int kWanted = 2, kOffers = 40;
  return vast_fleet_options(clock, url, ledger, kWanted, kOffers);
}

// The worker of each machine is lost as soon as it works, so that the machine is released and another rented. The test
// below kills the process in the middle.
TEST(DownDriver, DISABLED_RentsAndReturnsForEver) {
  const FastClock clock;
  FleetOptions options = fleet_options(clock, std::getenv(kUrl), std::getenv(kLedger));
  std::mutex mutex;
  std::vector<std::string> rented;
  options.record = [&](std::string_view event, const std::string& about, const std::string&) {
    const std::lock_guard lock(mutex);
    if (event == "rented") rented.push_back(about);
  };
  auto fleet = FleetDriver::start(std::move(options));
  ASSERT_TRUE(fleet) << fleet.error().message();
  for (std::uint64_t worker = 1;; std::this_thread::sleep_for(milliseconds(1))) {
    std::vector<std::string> newly_rented;
    {
      const std::lock_guard lock(mutex);
      newly_rented.swap(rented);
    }
    for (const std::string& id : newly_rented) {
      (*fleet)->notify(fleet::Joined{WorkerId{worker}, id});
      (*fleet)->notify(fleet::Left{WorkerId{worker++}, "gone"});
    }
  }
}

TEST_F(DownTest, AKillAtAnyOfFiftyPointsForgetsNothing) {
  for (int point = 0; point < 50; ++point) {
    SCOPED_TRACE(fmt::format("killed at point {}", point));
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    // Every fourth answer is an error although the request was done, so that the handling of errors is interrupted as
    // well.
    if (point % 4 == 1) server.fault({.kind = "create", .status = 500, .acts = true});
    if (point % 4 == 3) server.fault({.kind = "destroy", .status = 502, .acts = true});
    std::atomic<pid_t> child = 0;
    std::atomic<bool> killed = false;
    server.at_points([&](int at) {
      while (child == 0) std::this_thread::yield();
      if (at != point) return;
      killed = true;
      ::kill(child, SIGKILL);
    });
    const pid_t pid = fork();
    if (pid == 0) {
      setenv(kUrl, server.url().c_str(), 1);
      setenv("VAST_API_KEY", VastServer::kKey, 1);
      setenv(kLedger, (folder / "ledger.sqlite").c_str(), 1);
      execl("/proc/self/exe", "driver", "--gtest_filter=DownDriver.*", "--gtest_also_run_disabled_tests",
            "--gtest_brief=1", nullptr);
      _exit(127);
    }
    child = pid;
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && killed) << "the driver ended by itself with " << status;
    // Waits until the service has done all pending requests: its state must stay the same for five looks.
    for (int equal_looks = 0, last_state = -1; equal_looks < 5; ++equal_looks) {
      const int state =
          server.count("create") + server.count("destroy") * 1000 + static_cast<int>(server.rented().size()) * 7;
      if (state != std::exchange(last_state, state)) equal_looks = 0;
      std::this_thread::sleep_for(milliseconds(2));
    }
    server.at_points({});

    Ledger ledger = open();
    std::set<std::string> labels_of_open_rows;
    for (const LedgerRow& row : *ledger.rows())
      if (row.is_open()) labels_of_open_rows.insert(row.label);
    for (const auto& [id, instance] : server.rented()) EXPECT_EQ(labels_of_open_rows.count(instance.label), 1u) << id;
    if (point % 5 == 4) {  // sometimes the run continues; it adopts the machines and releases them at its end
      setenv("VAST_API_KEY", VastServer::kKey, 1);
      const FastClock fast;
      auto fleet = FleetDriver::start(fleet_options(fast, server.url(), folder / "ledger.sqlite"));
      ASSERT_TRUE(fleet) << fleet.error().message();
      (*fleet)->stop();
      unsetenv("VAST_API_KEY");
      EXPECT_EQ(server.rented().size(), 0u);
      for (const LedgerRow& row : *ledger.rows())  // a machine requested a moment ago may still appear
        EXPECT_TRUE(!row.is_open() || row.instance.empty()) << row.label;
    }
    clock.advance(std::chrono::hours(24 * 400));  // beyond the driver's own clock, so that no row is recent
    const DownReport report = down(ledger);
    EXPECT_THAT(report.problems, testing::IsEmpty());
    EXPECT_EQ(server.rented().size(), 0u);
    EXPECT_EQ(open_rows(ledger), 0u);
    const DownReport again = down(ledger);
    EXPECT_TRUE(again.released.empty() && again.problems.empty());
  }
}

}  // namespace
}  // namespace echoline::provisioner
