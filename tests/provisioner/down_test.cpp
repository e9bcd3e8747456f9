// Everything rented is released, and nothing is believed that no complete listing shows; also after a kill at any
// moment.
#include "provisioner/down.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "provisioner/providers/vast.hpp"
#include "vast_server.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr const char* kUrl = "ECHOLINE_TEST_VAST_URL";
constexpr const char* kLedger = "ECHOLINE_TEST_LEDGER";

Offer offer(const std::string& id) {
  Offer o;
  o.id = id;
  o.provider = "vast";
  o.host = "host-" + id;
  o.gpu_usd_per_hour = 0.4;
  o.storage_usd_per_hour = 0.01;
  return o;
}

LaunchSpec spec(const LedgerRow& row) {
  LaunchSpec s;
  s.offer = offer(row.offer);
  s.label = row.label;
  s.image = "debian:12";
  s.argv = {"/bin/true"};
  return s;
}

std::unique_ptr<Provider> vast(const std::string& url) {
  VastOptions options;
  options.url = url;
  options.key = VastServer::kKey;
  return std::make_unique<VastProvider>(std::move(options));
}

class DownTest : public testing::Test {
 protected:
  void SetUp() override {
    // Where writing through to a disk costs nothing, if there is such a place: what is killed here are processes.
    const std::filesystem::path memory = "/dev/shm";
    folder = (std::filesystem::is_directory(memory) ? memory : std::filesystem::temp_directory_path()) /
             fmt::format("echoline-down-{}", getpid());
    std::filesystem::remove_all(folder);
    clock.advance(std::chrono::hours(1));
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  Ledger open() { return std::move(Ledger::open(folder / "ledger.sqlite", "run")).value(); }
  DownReport down(Ledger& ledger, bool absent_is_gone = false) {
    DownOptions options;
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
  // A row that runs, and the instance that it runs as.
  LedgerRow running(Ledger& ledger, const std::string& id) {
    const LedgerRow row = *ledger.intend(offer(id), clock.unix_seconds());
    VastInstance instance;
    instance.id = std::stoll(id);
    instance.label = row.label;
    server.put(instance);
    EXPECT_TRUE(ledger.running(row.id, "vast:" + id, clock.unix_seconds()));
    return row;
  }
  static std::size_t open_rows(const Ledger& ledger) {
    const auto rows = *ledger.rows();
    return static_cast<std::size_t>(
        std::count_if(rows.begin(), rows.end(), [](const auto& row) { return row.open(); }));
  }

  VastServer server;
  ManualClock clock;
  std::filesystem::path folder;
};

TEST_F(DownTest, ReleasesAllOfTheRunAndNothingElse) {
  Ledger ledger = open();
  running(ledger, "1");
  const LedgerRow asked = *ledger.intend(offer("2"), clock.unix_seconds());  // rented, and the answer was lost
  VastInstance lost;
  lost.id = 2;
  lost.label = asked.label;
  server.put(lost);
  const LedgerRow never = *ledger.intend(offer("3"), clock.unix_seconds());  // not rented
  const LedgerRow failed = *ledger.intend(offer("4"), clock.unix_seconds());
  ASSERT_TRUE(ledger.failed(failed.id, "status 500", clock.unix_seconds()));  // it was all the same
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

TEST_F(DownTest, DoesNotBelieveAServiceThatCannotSay) {
  Ledger ledger = open();
  running(ledger, "1");
  server.fault({.kind = "destroy", .status = 500, .times = 1000});
  DownReport report = down(ledger);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0], HasSubstr("vast:1 may still be rented"));
  EXPECT_EQ(open_rows(ledger), 1u);
}

TEST_F(DownTest, AnAccountThatKnowsNothingAtAllMayBeTheWrongOne) {
  Ledger ledger = open();
  running(ledger, "1");
  server.remove(1);
  const DownReport report = down(ledger);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0], HasSubstr("--gone"));
  EXPECT_EQ(open_rows(ledger), 1u);
  // Now it was asked to end it, so a second time its absence is the success of the first; as it is if the user says so.
  EXPECT_TRUE(down(ledger).problems.empty());
  EXPECT_EQ(open_rows(ledger), 0u);
  running(ledger, "2");
  server.remove(2);
  EXPECT_TRUE(down(ledger, true).problems.empty());
}

TEST_F(DownTest, AKeyThatIsRefusedLeavesTheLedgerAsItIs) {
  Ledger ledger = open();
  running(ledger, "1");
  ASSERT_TRUE(ledger.intend(offer("2"), clock.unix_seconds()));
  server.expire_key();
  EXPECT_FALSE(down(ledger).problems.empty());
  EXPECT_EQ(open_rows(ledger), 2u);
}

// What a learner does about each machine, in its order: books the intention, asks, books the answer; then back. It is
// killed in the middle by the test below.
TEST(DownDriver, DISABLED_RentsAndReturnsForEver) {
  auto ledger = Ledger::open(std::getenv(kLedger), "run");
  ASSERT_TRUE(ledger);
  const auto provider = vast(std::getenv(kUrl));
  ManualClock clock;
  clock.advance(std::chrono::hours(1));
  std::map<Ticket, InstanceId> rented;
  std::size_t asked = 0;
  while (true) {
    clock.advance(milliseconds(800));
    if (asked < 3) {
      const LedgerRow row = *ledger->intend(offer(std::to_string(100 + asked++)), clock.unix_seconds());
      provider->start(row.id, spec(row));
    }
    for (const ProviderEvent& event : provider->poll(clock.now())) {
      if (const auto* started = std::get_if<Started>(&event)) {
        ASSERT_TRUE(ledger->running(started->ticket, started->instance.text, clock.unix_seconds()));
        ASSERT_TRUE(ledger->stop_asked(started->ticket, clock.unix_seconds()));
        provider->stop(started->ticket, started->instance, {});
      } else if (const auto* failed = std::get_if<StartFailed>(&event)) {
        if (!failed->perhaps_rented) {
          ASSERT_TRUE(ledger->failed(failed->ticket, "failed", clock.unix_seconds()));
        }
        asked = 0;
      } else if (const auto* stopped = std::get_if<Stopped>(&event)) {
        ASSERT_TRUE(ledger->ended(stopped->ticket, stopped->how, clock.unix_seconds()));
        asked = 0;
      }
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

TEST_F(DownTest, AKillAtAnyOfFiftyPointsForgetsNothing) {
  for (int point = 0; point < 50; ++point) {
    SCOPED_TRACE(fmt::format("killed at point {}", point));
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    // Every fourth time an answer is an error although it was done, so that what follows an error is hit as well.
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
      setenv(kLedger, (folder / "ledger.sqlite").c_str(), 1);
      execl("/proc/self/exe", "driver", "--gtest_filter=DownDriver.*", "--gtest_also_run_disabled_tests",
            "--gtest_brief=1", nullptr);
      _exit(127);
    }
    child = pid;
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status) && killed) << "the driver ended by itself with " << status;
    // What was on its way is still done by the service.
    for (int quiet = 0, before = -1; quiet < 5; ++quiet) {
      const int now =
          server.count("create") + server.count("destroy") * 1000 + static_cast<int>(server.rented().size()) * 7;
      if (now != std::exchange(before, now)) quiet = 0;
      std::this_thread::sleep_for(milliseconds(2));
    }
    server.at_points({});

    Ledger ledger = open();
    std::set<std::string> known;
    for (const LedgerRow& row : *ledger.rows())
      if (row.open()) known.insert(row.label);
    for (const auto& [id, instance] : server.rented()) EXPECT_EQ(known.count(instance.label), 1u) << id;
    clock.advance(std::chrono::hours(24 * 400));  // the driver had a clock of its own
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
