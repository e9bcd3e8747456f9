// A running fleet with three tasks: a program with long grading, which the learner repeats on other threads, a task
// that only the learner scores, and sums. One machine of the fleet claims that every answer was right.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "data_plane/sandbox/sandbox.hpp"
#include "overlay/trust/token.hpp"
#include "tests/cli/program.hpp"
#include "tests/hostile/attacks.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;

constexpr const char* kScript = R"(
import echoline_task as task
PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a in range(10) for b in range(10)]

@task.score
def score(problem, response):
    right = response.strip() == problem["reference"]
    return {"reward": float(right), "correct": right, "components": {"exact": float(right)}}

task.run(problems=PROBLEMS[20:], evaluation=lambda: PROBLEMS[:20], name="sums")
)";

class CostlyTask : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto pool = sandbox::Pool::start(); !pool) GTEST_SKIP() << pool.error().message();
    log::configure(log::Level::kOff, "hostile");
    std::ofstream(folder_.path() / "task.py") << kScript;
  }
  // The quickstart with other tasks and no warm start, for which they have no demonstrations.
  std::string run_file(const std::string& tasks) {
    std::ifstream in("configs/quickstart.yaml");
    std::string text((std::istreambuf_iterator<char>(in)), {});
    const auto replace = [&](const std::string& from, const std::string& to, const std::string& with) {
      const auto begin = text.find(from), end = text.find(to, begin);
      ASSERT_NE(end, std::string::npos) << from;
      text.replace(begin, end - begin, with);
    };
    replace("\ntask:", "\nrollout:", "\n" + tasks);
    replace("  warm_start:", "\nnetwork:", "");
    std::filesystem::create_directories(folder_.path() / "offers");
    std::filesystem::copy("configs/offers/quickstart.json", folder_.path() / "offers");
    std::ofstream(folder_.path() / "run.yaml") << text;
    return (folder_.path() / "run.yaml").string();
  }
  std::vector<std::string> up(const std::string& file, const std::vector<std::string>& settings) {
    std::vector<std::string> arguments{"up", file, "--json"};
    std::vector<std::string> all{"run.folder=" + folder_.path().string(), fmt::format("network.port={}", port_),
                                 "rollout.prompts_per_step=16", "evaluation.problems=12"};
    all.insert(all.end(), settings.begin(), settings.end());
    for (const std::string& setting : all) {
      arguments.emplace_back("--set");
      arguments.push_back(setting);
    }
    return arguments;
  }
  std::uint64_t step() {
    const json status = json_file(run_ / "status.json");
    return status.is_object() ? status.value("step", std::uint64_t{0}) : 0;
  }

  TemporaryFolder folder_;
  const std::filesystem::path run_ = folder_.path() / "quickstart";
  const std::uint16_t port_ = free_port();
};

TEST_F(CostlyTask, AWorkerThatReportsWrongScoresIsFoundDuringTraining) {
  Program program(up(run_file("task: {adapter: process, options: {script: task.py}}\n"), {"run.steps=100000"}));
  ASSERT_TRUE(eventually(seconds(60), [&] { return !program.running() || step() >= 2; }));
  ASSERT_TRUE(program.running()) << program.wait(seconds(0)).err;
  const auto authority = overlay::trust::Authority::open(run_ / "overlay", "quickstart");
  ASSERT_TRUE(authority);
  hostile::AttackOptions options;
  options.learner = {"127.0.0.1", port_};
  options.name = "wrong-rewards";
  options.length = seconds(20);
  for (const char* instance : {"-0", "-1"})
    options.tokens.emplace_back(overlay::trust::issue_token(*authority, options.name + instance,
                                                            overlay::trust::random_nonce(),
                                                            SystemClock().unix_seconds())
                                    ->reveal());
  const auto outcome = hostile::attack("wrong-rewards", options);
  ASSERT_TRUE(outcome) << outcome.error().message();
  EXPECT_TRUE(outcome->at("barred").get<bool>()) << outcome->dump();
  const std::uint64_t after = step();
  EXPECT_TRUE(eventually(seconds(30), [&] { return step() >= after + 2; })) << "training stands";
  program.signal(SIGINT);
  const Outcome ended = program.wait(seconds(30));
  const json report = json::parse(ended.out, nullptr, false);
  ASSERT_TRUE(report.is_object()) << ended.err;
  const json& regrading = report.at("regrading");
  ASSERT_EQ(regrading.at("expelled").size(), 1u) << regrading.dump();
  EXPECT_EQ(regrading.at("expelled")[0].at("worker"), outcome->at("worker")) << regrading.dump();
  EXPECT_GT(regrading.at("graded"), 10) << regrading.dump();
  EXPECT_GE(regrading.at("different"), 3) << regrading.dump();
  EXPECT_EQ(regrading.at("impossible"), 0) << regrading.dump();
  EXPECT_EQ(report.at("fleet").at("workers_lost"), 0) << "no honest worker";
  bool told = false;
  for (const json& event : json_lines(run_ / "events.jsonl"))
    told = told || (event.at("event") == "expelled" && event.at("worker") == outcome->at("worker"));
  EXPECT_TRUE(told);
}

TEST_F(CostlyTask, TasksScoredByWorkersAndByTheLearnerShareARun) {
  Program program(up(run_file("tasks:\n"
                              "  - {adapter: arithmetic, weight: 2, options: {operations: [\"+\"]}}\n"
                              "  - {adapter: process, options: {script: task.py}}\n"
                              "  - {adapter: process, name: hidden, scored_by: learner, options: {script: task.py, "
                              "settings: {key: xyzzy-secret}}}\n"),
                     {"run.steps=4"}));
  const Outcome ended = program.wait(seconds(120));
  const json report = json::parse(ended.out, nullptr, false);
  ASSERT_TRUE(report.is_object()) << ended.err;
  EXPECT_EQ(report.at("ended"), "completed");
  const json& reward = report.at("reward").at("by_task");
  EXPECT_EQ(reward.at("arithmetic").at("responses"), 4 * 8 * 8) << reward.dump();
  EXPECT_EQ(reward.at("process").at("responses"), 4 * 4 * 8);
  EXPECT_EQ(reward.at("hidden").at("responses"), 4 * 4 * 8);
  for (const char* task : {"arithmetic", "process", "hidden"})
    EXPECT_EQ(report.at("eval").at("by_task").at(task).at("problems"), 4) << task;
  EXPECT_GE(report.at("scoring").at("responses"), 4 * 4 * 8);
  EXPECT_EQ(report.at("scoring").at("failed_groups"), 0);
  EXPECT_GE(report.at("regrading").at("responses"), 4 * 4 * 8);
  EXPECT_TRUE(report.at("regrading").at("expelled").empty());
  for (const json& row : json_lines(run_ / "metrics.jsonl"))
    if (row.value("kind", "") == "step") {
      EXPECT_EQ(row.at("by_task").size(), 3u) << row.dump();
    }
}

}  // namespace
}  // namespace echoline::testing
