// A running fleet under all attacks of attacks.cpp, most of them at once. The learner survives, honest workers are
// neither lost nor quarantined, training goes on, and a provably misbehaving worker is expelled with a reason.
// threats_bench measures the cost of the attacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <future>
#include <map>
#include <set>
#include <sstream>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "overlay/trust/token.hpp"
#include "tests/cli/program.hpp"
#include "tests/hostile/attacks.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;

// The learner expels the worker for these attacks. For the others it is enough that they do no harm. The have-flood is
// not among them: a child that is not the learner's is barred by its parent.
const std::vector<std::string> kThrownOut = {"bad-heartbeat", "slander", "renew-flood", "wrong-rewards",
                                             "nan",           "talk",    "oversized",   "braggart"};
// These attacks use all cores of a machine, so they run one at a time.
const std::vector<std::string> kFloods = {"renew-flood", "have-flood", "talk", "idle-connections"};

class Threats : public ::testing::Test {
 protected:
  std::uint64_t step() {
    const json status = json_file(run_ / "status.json");
    return status.is_object() ? status.value("step", std::uint64_t{0}) : 0;
  }

  // Runs each attack in its own thread, and returns the outcomes by name.
  std::map<std::string, json> attack(const std::vector<std::string>& names, Duration length) {
    const auto authority = overlay::trust::Authority::open(run_ / "overlay", "quickstart");
    EXPECT_TRUE(authority);
    std::map<std::string, std::future<Result<json>>> running;
    for (const std::string& name : names) {
      hostile::AttackOptions options;
      options.learner = {"127.0.0.1", port_};
      options.name = name;
      options.length = length;
      for (const char* instance : {"-0", "-1"})
        options.tokens.emplace_back(overlay::trust::issue_token(*authority, name + instance,
                                                                overlay::trust::random_nonce(),
                                                                SystemClock().unix_seconds())
                                        ->reveal());
      running[name] = std::async(std::launch::async, [name, options] { return hostile::attack(name, options); });
    }
    std::map<std::string, json> outcomes;
    for (auto& [name, future] : running) {
      const Result<json> outcome = future.get();
      EXPECT_TRUE(outcome) << name << ": " << outcome.error().message();
      if (!outcome) continue;
      outcomes[name] = *outcome;
      fmt::print("{}\n", outcome->dump(-1, ' ', false, json::error_handler_t::replace));
    }
    return outcomes;
  }

  TemporaryFolder folder_;
  const std::filesystem::path run_ = folder_.path() / "quickstart";
  const std::uint16_t port_ = free_port();
};

TEST_F(Threats, NoMachineDecidesOverTheRun) {
  log::configure(log::Level::kOff, "hostile");
  std::vector<std::string> arguments{"up", "configs/quickstart.yaml", "--json"};
  for (const std::string& setting :
       {"run.folder=" + folder_.path().string(), fmt::format("network.port={}", port_), std::string("run.steps=100000"),
        std::string("rollout.prompts_per_step=64"), std::string("learner.warm_start.steps_max=20"),
        std::string("evaluation.problems=16")}) {
    arguments.emplace_back("--set");
    arguments.push_back(setting);
  }
  Program program(arguments);
  ASSERT_TRUE(eventually(seconds(60), [&] { return !program.running() || step() >= 3; }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const pid_t learner = json_file(run_ / "status.json").at("pid");
  std::vector<std::string> honest;
  for (const auto& [offer, pid] : rented_processes(run_)) honest.push_back(offer);
  ASSERT_GE(honest.size(), 2u);

  std::vector<std::string> names = hostile::attack_names();
  std::erase_if(names, [](const std::string& name) { return std::count(kFloods.begin(), kFloods.end(), name) > 0; });
  auto outcomes = attack(names, seconds(8));
  ASSERT_TRUE(alive(learner));
  for (const std::string& flood : kFloods) {
    outcomes.merge(attack({flood}, seconds(3)));
    ASSERT_TRUE(alive(learner)) << flood;
  }
  for (const std::string& name : kThrownOut) {
    if (!outcomes.contains(name)) continue;
    EXPECT_TRUE(outcomes.at(name).at("barred").get<bool>()) << outcomes.at(name).dump();
    EXPECT_NE(outcomes.at(name).at("goodbye"), "") << name;
  }
  EXPECT_EQ(outcomes["unassigned-child"].value("chunk_bytes", 1), 0) << "a parent served a child without a grant";
  const std::uint64_t after = step();
  EXPECT_TRUE(eventually(seconds(30), [&] { return step() >= after + 3; })) << "training stands";
  const auto nobody_away = [&] {
    const json workers = json_file(run_ / "status.json").value("workers", json::array());
    return std::none_of(workers.begin(), workers.end(), [&](const json& worker) {
      return worker.at("away").get<bool>() && std::count(honest.begin(), honest.end(), worker.at("offer")) > 0;
    });
  };
  EXPECT_TRUE(eventually(seconds(20), nobody_away));

  std::set<std::string> seen;
  const json status = json_file(run_ / "status.json");
  for (const json& worker : status.at("workers")) {
    const std::string offer = worker.at("offer");
    if (std::find(honest.begin(), honest.end(), offer) == honest.end()) continue;
    seen.insert(offer);
    EXPECT_FALSE(worker.at("lost").get<bool>()) << offer;
    EXPECT_FALSE(worker.at("quarantined").get<bool>()) << offer;
  }
  EXPECT_EQ(seen.size(), honest.size());
  EXPECT_EQ(rented_processes(run_).size(), honest.size()) << "a machine was replaced";

  program.signal(SIGINT);
  const Outcome outcome = program.wait(seconds(30));
  const json report = json::parse(outcome.out, nullptr, false);
  ASSERT_TRUE(report.is_object()) << outcome.err;
  EXPECT_EQ(report.at("ended"), "interrupted");
  EXPECT_EQ(report.at("fleet").at("workers_lost"), 0);
  // Raw bytes of the attackers reached neither a file nor the log.
  std::istringstream log(outcome.err);
  for (std::string line; std::getline(log, line);) EXPECT_TRUE(is_printable(line)) << printable(line);
  std::ifstream events(run_ / "events.jsonl");
  for (std::string line; std::getline(events, line);) EXPECT_TRUE(json::accept(line)) << printable(line);
}

}  // namespace
}  // namespace echoline::testing
