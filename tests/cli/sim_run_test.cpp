// echoline sim run, from the outside: what it prints, what it writes, and what of that is documented.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void expect_documented(const json& object, const std::string& text, const std::string& path) {
  static const std::set<std::string> kVary{"regions", "decisions", "in_flight", "in_queue", "rejected_by_reason", "by_reason", "alarms",
                                           "rollouts_unfinished_by_reason"};
  for (const auto& [key, value] : object.items()) {
    const std::string field = path.empty() ? key : path + "." + key;
    if (value.is_object()) {
      if (!kVary.contains(key)) expect_documented(value, text, field);
      else EXPECT_NE(text.find("`" + field), std::string::npos) << field;
    } else if (!value.is_array()) {
      EXPECT_NE(text.find("`" + field + "`"), std::string::npos) << field << " is documented nowhere";
    }
  }
}

TEST(SimRun, GivesTheSameReportAgainAndAnotherForAnotherSeed) {
  TemporaryFolder folder;
  const auto run = [&](const std::string& name, std::vector<std::string> more = {}) {
    std::vector<std::string> words{"sim", "run", "configs/sim/small.yaml", "--out", (folder.path() / name).string()};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (std::istringstream lines(outcome.out); !lines.eof();) {
      std::string line;
      std::getline(lines, line);
      EXPECT_LE(line.size(), 60u) << line;
    }
    return text_of(folder.path() / name / "report.json") + text_of(folder.path() / name / "metrics.jsonl") +
           text_of(folder.path() / name / "events.jsonl");
  };
  const std::string first = run("a");
  EXPECT_EQ(run("b"), first);
  EXPECT_NE(run("c", {"--seed", "2"}), first);

  const json report = json_file(folder.path() / "a" / "report.json");
  EXPECT_EQ(report.at("steps"), 60);
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("simulation").at("seed"), 1);
  EXPECT_GT(report.at("cost").at("usd_fleet"), 0);
  expect_documented(report, text_of("docs/report.md") + text_of("docs/simulation.md"), "");
  std::size_t steps = 0;
  for (const json& row : json_lines(folder.path() / "a" / "metrics.jsonl")) steps += row.at("kind") == "step" ? 1 : 0;
  EXPECT_EQ(steps, 60u);
  const Outcome printed = run_program({"sim", "run", "configs/sim/small.yaml", "--json"});
  EXPECT_EQ(printed.out, text_of(folder.path() / "a" / "report.json"));
}

TEST(SimRun, KeepsMetricsOfLongRunsShort) {
  TemporaryFolder folder;
  const Outcome outcome = run_program({"sim", "run", "configs/sim/small.yaml", "--set", "run.steps=3000", "--out", folder.path().string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto rows = json_lines(folder.path() / "metrics.jsonl");
  EXPECT_LE(rows.size(), 2000u);
  EXPECT_GT(rows.size(), 1000u);
  EXPECT_EQ(rows.back().at("step"), 3000);
}

TEST(SimRun, SaysWhatIsWrongWithAScenario) {
  const Outcome wrong = run_program({"sim", "run", "configs/sim/small.yaml", "--set", "simulation.churn.per_huor=1"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("did you mean 'per_hour'?"), std::string::npos) << wrong.err;
  EXPECT_EQ(run_program({"sim", "run", "configs/quickstart.yaml"}).status, 2);
  EXPECT_EQ(run_program({"sim", "run", "/nowhere.yaml"}).status, 2);
  const Outcome full = run_program({"sim", "run", "configs/sim/small.yaml", "--out", "/proc/nowhere"});
  EXPECT_EQ(full.status, 1);
  EXPECT_EQ(full.out, "");
  // No plan meets this, and it is simulated all the same: how much the learner waits is the question.
  const Outcome short_of = run_program({"sim", "run", "configs/sim/small.yaml", "--set", "fleet.workers_max=2", "--json"});
  ASSERT_EQ(short_of.status, 0) << short_of.err;
  const json report = json::parse(short_of.out);
  EXPECT_GT(report.at("learner").at("idle_fraction"), 0.5);
  EXPECT_NE(report.at("simulation").at("plan"), "as planned");
}

}  // namespace
}  // namespace echoline::testing
