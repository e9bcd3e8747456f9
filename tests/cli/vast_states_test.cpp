// Real runs against the test's vast.ai in trouble with the account, the machines or the run's files: the user gets one
// line that says what to do, and no machine stays rented.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "tests/cli/fake_host.hpp"
#include "tests/cli/program.hpp"
#include "tests/cli/vast_run.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

class VastStates : public ::testing::Test {
 protected:
  VastStates() {
    setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
    setenv("ECHOLINE_VAST_URL", server.url().c_str(), 1);
    run_file = vast_run(folder.path(), server.url(), 100);
  }
  ~VastStates() override {
    unsetenv("VAST_API_KEY");
    unsetenv("ECHOLINE_VAST_URL");
  }
  std::string file() {
    write_json(folder.path() / "run.yaml", run_file);
    return folder.path() / "run.yaml";
  }
  std::filesystem::path run() const { return folder.path() / "runs" / "night"; }
  json status() const { return json_file(run() / "status.json"); }
  // Keeps the containers going until `condition` holds.
  bool until(seconds limit, const std::function<bool()>& condition) {
    return eventually(limit, [&] {
      host.update(read_processes());
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return condition();
    });
  }
  bool is_training() const { return status().is_object() && status().value("phase", "") == "training"; }
  std::size_t joined() {
    std::size_t count = 0;
    for (const auto& [id, container] : host.containers()) count += container.had_joined ? 1 : 0;
    return count;
  }
  // Waits for the end of `up`, with living containers.
  Outcome end(Program& up, seconds limit) {
    until(limit, [&] { return !up.running(); });
    return up.wait(seconds(1));
  }

  provisioner::VastServer server;
  TemporaryFolder folder;
  FakeHost host{server, folder.path() / "host", ECHOLINE_PROGRAM, kVastRolloutsPerSecond, [](const std::string&) {}};
  json run_file;
};

// Fails the creates that follow, as the service does for an account without credit.
void refuse_for_credit(provisioner::VastServer& server) {
  server.credit(0);
  server.fault({.kind = "create",
                .status = 400,
                .body = R"({"success": false, "error": "insufficient_credit", "msg": "Your account lacks credit"})",
                .type = "application/json",
                .times = 1000});
}

std::ptrdiff_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST_F(VastStates, ARevokedKeyWhileRunning) {
  Program up({"up", file()});
  ASSERT_TRUE(until(seconds(90), [&] { return joined() >= 2 && is_training(); }));
  server.expire_key();
  ASSERT_TRUE(until(seconds(60), [&] { return !status().value("account_trouble", "").empty(); })) << status();
  const Outcome table = run_program({"status", run()});
  EXPECT_THAT(table.out,
              HasSubstr("vast: the key is refused: nothing can be rented or returned; start with a valid one"));
  const auto step = status().at("step").get<int>();
  EXPECT_TRUE(until(seconds(30), [&] { return status().at("step").get<int>() > step; }));  // the machines work on
  up.signal(SIGINT);
  const Outcome ended = end(up, seconds(90));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("run: echoline down " + run().string()));
  EXPECT_FALSE(json_file(run() / "report.json").at("fleet").at("unreturned").empty());
  const Outcome down = run_program({"down", run()}, seconds(120));
  EXPECT_EQ(down.status, 1);
  EXPECT_THAT(down.err, HasSubstr("the key was refused"));
  EXPECT_EQ(lines_of(down.err), 1) << down.err;
}

TEST_F(VastStates, AWrongKeyAndNoCreditBeforeTheRun) {
  setenv("VAST_API_KEY", "wrong", 1);
  const Outcome wrong = run_program({"doctor", file()});
  EXPECT_EQ(wrong.status, 1);
  EXPECT_THAT(wrong.out, HasSubstr("refuses the key; check VAST_API_KEY or fleet.vast.key_file\n"));
  const Outcome refused = run_program({"up", file()});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("refuses the key; check VAST_API_KEY or fleet.vast.key_file\n"));
  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  server.credit(7.5);
  EXPECT_THAT(run_program({"doctor", file()}).out, HasSubstr("vast accepts the key, credit $7.50, 6.2 h of the plan"));
  refuse_for_credit(server);
  EXPECT_THAT(run_program({"doctor", file()}).out, HasSubstr("the account of vast has no credit ($0.00)"));
  Program up({"up", file()});
  const Outcome ended = end(up, seconds(90));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("start fleet: vast: the account has no credit left"));
}

// The rented machines work on. The table has credit and hours.
TEST_F(VastStates, NoCreditWhileRunning) {
  server.credit(9);
  Program up({"up", file()});
  ASSERT_TRUE(until(seconds(90), [&] { return joined() >= 1; }));
  EXPECT_TRUE(until(seconds(10), [&] { return status().value("credit_hours", json()).is_number(); }));
  EXPECT_THAT(run_program({"status", run()}).out, ::testing::ContainsRegex("credit \\$9.00 \\([0-9.]+ h\\)"));
  refuse_for_credit(server);
  ASSERT_TRUE(until(seconds(60), [&] { return !status().value("account_trouble", "").empty(); })) << status();
  EXPECT_THAT(run_program({"status", run()}).out, HasSubstr("vast: the account has no credit left"));
  EXPECT_TRUE(until(seconds(60), [&] { return is_training(); }));
  up.signal(SIGINT);
  end(up, seconds(90));
  EXPECT_TRUE(json_file(run() / "report.json").is_object());
  EXPECT_TRUE(server.rented().empty());
}

// The learner is killed, and the machines are gone when the user comes back.
TEST_F(VastStates, MachinesThatAreGoneBlockNeitherDownNorANewRun) {
  server.bill_rentals();
  Program up({"up", file()});
  ASSERT_TRUE(until(seconds(90), [&] { return joined() >= 2 && is_training(); }));
  ::kill(status().at("pid").get<pid_t>(), SIGKILL);
  end(up, seconds(10));
  const json known = json_file(run() / "status.json");
  // The service's words for an instance that it does not know, which is gone.
  server.fault({.kind = "destroy",
                .status = 404,
                .body = R"({"success": false, "error": "not_found", "msg": "Instance not found"})",
                .type = "application/json",
                .acts = true,
                .times = 100});
  // The new run first releases what the earlier one has.
  Program again({"up", file()});
  ASSERT_TRUE(until(seconds(120), [&] { return is_training() && status().at("pid") != known.at("pid"); }));
  again.signal(SIGINT);
  const Outcome ended = end(again, seconds(90));
  EXPECT_TRUE(json_file(run() / "report.json").is_object()) << ended.err;
  EXPECT_TRUE(server.rented().empty());
  const Outcome down = run_program({"down", run().string() + ".1"}, seconds(120));
  EXPECT_EQ(down.status, 0) << down.err;
}

TEST_F(VastStates, ACorruptLedger) {
  {
    Program up({"up", file()});
    ASSERT_TRUE(until(seconds(90), [&] { return joined() >= 2 && is_training(); }));
    ::kill(status().at("pid").get<pid_t>(), SIGKILL);
    end(up, seconds(10));
  }
  for (const char* suffix : {"", "-wal", "-shm"})
    std::filesystem::remove(run() / (std::string("ledger.sqlite") + suffix));
  std::ofstream(run() / "ledger.sqlite") << std::string(8192, 'x');
  const std::vector<std::vector<std::string>> commands{
      {"ledger", "show", run()}, {"down", run()}, {"up", file(), "--resume"}, {"up", file()}, {"up", file()}};
  for (const auto& command : commands) {
    const Outcome refused = run_program(command, seconds(60));
    EXPECT_NE(refused.status, 0);
    EXPECT_THAT(refused.err, HasSubstr("file is not a database; `echoline down night --by-label` releases"))
        << command[0];
  }
  EXPECT_FALSE(std::filesystem::exists(run().string() + ".1"));  // a new run tries again, as long as it is not released
  const Outcome down = run_program({"down", "night", "--by-label"}, seconds(120));
  EXPECT_EQ(down.status, 0) << down.err;
  EXPECT_TRUE(server.rented().empty());
}

TEST_F(VastStates, ADeletedRunFolder) {
  Program up({"up", file()});
  ASSERT_TRUE(until(seconds(90), [&] { return joined() >= 2 && is_training(); }));
  std::error_code busy;  // the learner may write at the same time
  while (std::filesystem::exists(run())) std::filesystem::remove_all(run(), busy);
  const Outcome ended = end(up, seconds(120));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err,
              HasSubstr("was deleted or moved during the run, so the run ends and its machines are released"));
  EXPECT_TRUE(server.rented().empty());
  const Outcome down = run_program({"down", run()}, seconds(120));
  EXPECT_NE(down.status, 0);
  EXPECT_THAT(down.err, HasSubstr("`echoline down night --by-label`"));
}

// The reason is then hardly a machine, so the run ends instead of trying the whole market.
TEST_F(VastStates, NoWorkerReachesTheLearner) {
  run_file["fleet"].update({{"pull_timeout", "30 s"}, {"boot_timeout", "6 s"}, {"join_timeout", "2 s"}});
  std::ofstream(folder.path() / "host" / "bin" / "echoline") << "#!/bin/sh\nexec sleep 1000\n";
  Program up({"up", file()});
  const Outcome ended = end(up, seconds(120));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err,
              HasSubstr("the containers of 3 machines ran, and no worker has joined. Can other machines reach "
                        "this learner at "));
  EXPECT_TRUE(server.rented().empty());
  for (const json& machine : json::parse(run_program({"ledger", "hosts", run(), "--json"}).out))
    EXPECT_FALSE(machine.at("lost").get<bool>()) << machine;
}

TEST_F(VastStates, TheEndOfTheBudget) {
  // $0.0413 of it are the reserve for returning two machines. The plan itself takes $0.02.
  run_file["fleet"].update({{"usd_max", 0.047}, {"join_timeout", "5 s"}});
  run_file["run"]["steps"] = 60;
  Program up({"up", file()});
  const Outcome ended = end(up, seconds(120));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("to continue, use --resume with a larger fleet.usd_max"));
  EXPECT_TRUE(server.rented().empty());
  const json report = json_file(run() / "report.json");
  ASSERT_TRUE(report.is_object()) << ended.err;
  EXPECT_EQ(report.at("ended"), "out of budget");
}

}  // namespace
}  // namespace echoline::testing
