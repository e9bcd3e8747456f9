// echoline ledger and echoline down, from the outside.
#include "provisioner/ledger.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "base/clock.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using provisioner::Ledger;

TEST(LedgerVerbs, TellWhatWasRentedAndDownEndsIt) {
  const TemporaryFolder folder;
  const auto run = folder.path() / "night";
  std::filesystem::create_directories(run);
  std::ofstream(run / "status.json") << "{}";
  const pid_t worker = fork();
  if (worker == 0) {
    setpgid(0, 0);
    execl("/bin/sleep", "sleep", "100", nullptr);
    _exit(127);
  }
  setpgid(worker, worker);
  std::string started;  // field 22, as the provider names processes
  for (std::string word; started.empty();) {
    std::ifstream stat(fmt::format("/proc/{}/stat", worker));
    for (int i = 0; i < 22 && stat >> word; ++i) started = i == 21 ? word : "";
  }
  {
    auto ledger = Ledger::open(run / "ledger.sqlite", "night");
    provisioner::Offer offer;
    offer.provider = "local";
    offer.id = "a";
    offer.host = "host-a";
    offer.gpu_usd_per_hour = 0.36;
    offer.storage_usd_per_hour = 0;
    offer.rollouts_per_s = 2;
    const auto a = ledger->intend(offer, 1'700'000'000);
    ASSERT_TRUE(ledger->priced(a->id, 0.72, 1'700'001'000));  // 1000 s at 36 cents, 2000 s at 72
    ASSERT_TRUE(ledger->measured(a->id, {1.5, std::nullopt, std::nullopt}, 1'700'002'000));
    ASSERT_TRUE(ledger->failed(a->id, "never rented", 1'700'002'000));
    const auto b = ledger->intend(offer, 1'700'000'000);
    ASSERT_TRUE(ledger->running(b->id, "local:1:1", 1'700'000'000));
    ASSERT_TRUE(ledger->priced(b->id, 0.72, 1'700'001'000));
    ASSERT_TRUE(ledger->ended(b->id, "stopped", 1'700'003'000));
    const auto c = ledger->intend(offer, SystemClock().unix_seconds());
    ASSERT_TRUE(ledger->running(c->id, fmt::format("local:{}:{}", worker, started), SystemClock().unix_seconds()));
    ASSERT_TRUE(ledger->decided({1'700'000'000, "book", "12.3 of 14.0 rollouts/s", R"({"required":14})"}));
  }
  const json costs = json::parse(run_program({"ledger", "costs", run.string(), "--json"}).out);
  EXPECT_NEAR(costs["instances"][1]["usd"].get<double>(), 0.50, 1e-9);
  EXPECT_EQ(costs["instances"][0]["usd"], 0);
  EXPECT_NEAR(costs["usd_per_hour"].get<double>(), 0.36, 1e-9);
  const Outcome text = run_program({"ledger", "costs", run.string()});
  EXPECT_NE(text.out.find("0.1000"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("0.4000"), std::string::npos) << text.out;
  const json shown = json::parse(run_program({"ledger", "show", run.string(), "--json"}).out);
  EXPECT_EQ(shown["decisions"][0]["numbers"]["required"], 14);
  EXPECT_EQ(shown["states"].size(), 7u);
  EXPECT_EQ(shown["instances"][2]["state"], "running");
  const json hosts = json::parse(run_program({"ledger", "hosts", run.string(), "--json"}).out);
  ASSERT_EQ(hosts.size(), 3u);
  EXPECT_EQ(
      std::count_if(hosts.begin(), hosts.end(), [](const json& h) { return h["measured_rollouts_per_s"] == 1.5; }), 1);

  const Outcome down = run_program({"down", run.string()});
  EXPECT_EQ(down.status, 0) << down.out << down.err;
  EXPECT_NE(down.out.find("nothing of"), std::string::npos);
  int status = 0;
  ASSERT_EQ(waitpid(worker, &status, 0), worker);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ((*Ledger::open(run / "ledger.sqlite", "night")->rows())[2].state, provisioner::InstanceState::kEnded);
  const json again = json::parse(run_program({"down", run.string(), "--json"}).out);
  EXPECT_TRUE(again["released"].empty() && again["problems"].empty());
  EXPECT_EQ(run_program({"ledger", "show", folder.path().string()}).status, 2);
}

}  // namespace
}  // namespace echoline::testing
