// echoline sim run, from the outside: its output, its files, and their documentation.
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

// Expects each field of the report, dotted and in backquotes, in the documentation.
void expect_documented(const json& object, const std::string& text, const std::string& path) {
  static const std::set<std::string> kWithVaryingKeys{"regions",   "settings", "decisions",
                                                      "in_flight", "in_queue", "rejected_by_reason",
                                                      "by_reason", "alarms",   "rollouts_unfinished_by_reason"};
  for (const auto& [key, value] : object.items()) {
    const std::string field = path.empty() ? key : path + "." + key;
    if (value.is_object()) {
      if (!kWithVaryingKeys.contains(key))
        expect_documented(value, text, field);
      else
        EXPECT_NE(text.find("`" + field), std::string::npos) << field;
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

TEST(SimRun, IsShownAsARunIs) {
  TemporaryFolder folder;
  const std::string page = (folder.path() / "page.html").string(), out = (folder.path() / "out").string();
  const Outcome ran = run_program({"sim", "run", "configs/sim/small.yaml", "--html", page, "--out", out});
  ASSERT_EQ(ran.status, 0) << ran.err;
  EXPECT_NE(text_of(page).find("Simulated run small"), std::string::npos);
  const Outcome reported = run_program({"report", out});
  EXPECT_EQ(reported.status, 0) << reported.err;
  EXPECT_EQ(reported.out, ran.out);
  ASSERT_EQ(run_program({"report", out, "--html"}).status, 0);
  EXPECT_EQ(text_of(folder.path() / "out" / "report.html"), text_of(page));
}

TEST(SimRun, KeepsMetricsOfLongRunsShort) {
  TemporaryFolder folder;
  const Outcome outcome =
      run_program({"sim", "run", "configs/sim/small.yaml", "--set", "run.steps=3000", "--out", folder.path().string()});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto rows = json_lines(folder.path() / "metrics.jsonl");
  EXPECT_LE(rows.size(), 2000u);
  EXPECT_GT(rows.size(), 1000u);
  EXPECT_EQ(rows.back().at("version"), 3000);  // the last policy's broadcast
}

// A run's files, reduced to those that --like needs.
TEST(SimRun, LikeTakesTheMeasurementsOfAnotherRun) {
  TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) { std::ofstream(folder.path() / name) << text; };
  const std::string offers = std::filesystem::absolute("configs/offers/quickstart.json").string();
  write("config.yaml",
        "run: {name: r, steps: 8}\nmodel: {preset: tiny-64}\ntask: {adapter: arithmetic}\nstaleness: {budget: 3}\n"
        "rollout: {prompts_per_step: 64, group_size: 8}\nnetwork: {uplink: 24 Mbit/s}\n"
        "fleet: {offers: " +
            offers + ", provider: local, step_time_expected: 1 s, delta_ratio_expected: 3}\n");
  std::string metrics =
      R"({"kind":"publication","version":0,"snapshot":true,"state_bytes":400000,"patch_bytes":300000})"
      "\n";
  for (int step = 1; step <= 8; ++step) {
    metrics += R"({"kind":"publication","version":)" + std::to_string(step) +
               R"(,"snapshot":false,"state_bytes":400000,"patch_bytes":250000})"
               "\n";
    metrics += R"({"kind":"step","step":)" + std::to_string(step) +
               R"(,"step_seconds":2.5,"wait_seconds":0.5,"response_tokens":5120,)"
               R"("response_tokens_mean":10,"staleness":{"1":256,"2":256}})"
               "\n";
  }
  write("metrics.jsonl", metrics);
  write("events.jsonl", R"({"event":"rented","offer":"q01","unix_s":100})"
                        "\n"
                        R"({"event":"joined","offer":"q01","unix_s":107})"
                        "\n");
  write("report.json",
        R"({"learner":{"idle_fraction":0.25},"staleness":{"mean":1.5},)"
        R"("workers":[{"install_seconds_mean":0.125},{"install_seconds_mean":0.25},{"install_seconds_mean":0.5},{}]})");
  const auto simulate = [&](std::vector<std::string> more = {}) {
    std::vector<std::string> words{"sim", "run", "--like", folder.path().string(), "--json"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = run_program(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return json::parse(outcome.out);
  };
  const json report = simulate();
  EXPECT_DOUBLE_EQ(report.at("learner").at("train_seconds_median").get<double>(), 2.0);
  EXPECT_NEAR(report.at("broadcast").at("delta_bytes_mean").get<double>(), 250000, 1);
  EXPECT_EQ(report.at("simulation").at("parameters"), 200000);  // a delta may take more than a byte of each
  EXPECT_EQ(report.at("broadcast").at("snapshot_bytes"), 300000);
  const json both = report.at("simulation").at("like");
  EXPECT_EQ(both.at("learner.idle_fraction").at("real"), 0.25);
  EXPECT_EQ(both.at("learner.idle_fraction").at("simulated"), report.at("learner").at("idle_fraction"));
  EXPECT_TRUE(both.at("cost.usd_fleet").at("real").is_null());
  EXPECT_GT(both.at("staleness.total_variation"), 0);
  // The simulation uses the median of the workers' times.
  EXPECT_NEAR(
      report.at("broadcast").at("t_b_seconds_median").get<double>(),
      simulate({"--set", "simulation.install_time=1.25 s"}).at("broadcast").at("t_b_seconds_median").get<double>() - 1,
      1e-3);
  // An explicit value overrides a measured one. The plan uses the values that were expected then.
  EXPECT_EQ(simulate({"--set", "simulation.step_time=4 s"}).at("learner").at("train_seconds_median"), 4.0);
  EXPECT_GT(simulate({"--set", "fleet.step_time_expected=250 ms"}).at("fleet").at("workers_planned"),
            report.at("fleet").at("workers_planned"));
  // The example of `echoline sim run --help`.
  EXPECT_EQ(simulate({"--set", "staleness.budget=1"}).at("staleness").at("lookahead"), 1);
  const Outcome table = run_program({"sim", "run", "--like", folder.path().string()});
  EXPECT_NE(table.out.find("real"), std::string::npos) << table.out;
  for (std::istringstream lines(table.out); !lines.eof();) {
    std::string line;
    std::getline(lines, line);
    EXPECT_LE(line.size(), 60u) << line;
  }
  // Advice for the same world: its first figures are those of the run file, whose seed the simulation had.
  const Outcome advised = run_program(
      {"advise", "--like", folder.path().string(), "--set", "simulation.step_time=4 s", "--jobs", "2", "--json"});
  ASSERT_EQ(advised.status, 0) << advised.err;
  const json figures = json::parse(advised.out).at("given").at("figures");
  EXPECT_EQ(figures.at("possible"), true);
  EXPECT_GT(figures.at("hours").get<double>(), 8 * 4 / 3600.0) << "eight steps of 4 s";
  EXPECT_LT(figures.at("hours").get<double>(), 8 * 60 / 3600.0);
  const Outcome advice = run_program({"advise", "--like", folder.path().string(), "--jobs", "2"});
  EXPECT_NE(advice.out.find("echoline sim run --like " + folder.path().string()), std::string::npos) << advice.out;
  // Malformed files of the run cause no internal error.
  write("events.jsonl", R"({"event":5,"offer":3})"
                        "\n");
  write("metrics.jsonl", metrics + R"({"kind":7})"
                                   "\n"
                                   R"({"kind":"step","staleness":[],"step_seconds":"x"})"
                                   "\n"
                                   R"({"kind":"publication","version":"x","snapshot":3,"patch_bytes":-1})"
                                   "\n");
  write("report.json", R"({"learner":3})");
  EXPECT_EQ(simulate().at("steps"), 8);
  std::filesystem::remove(folder.path() / "report.json");
  const Outcome running = run_program({"sim", "run", "--like", folder.path().string()});
  EXPECT_NE(running.status, 0);
  EXPECT_NE(running.err.find("has not ended"), std::string::npos) << running.err;
  write("report.json", "{}");
  write("metrics.jsonl", metrics.substr(0, 300));
  const Outcome little = run_program({"sim", "run", "--like", folder.path().string()});
  EXPECT_EQ(little.status, 2);
  EXPECT_NE(little.err.find("expected at least"), std::string::npos) << little.err;
}

// The lookahead follows S, so S bounds the ages, and the report shows it.
TEST(SimRun, AWiderBudgetGivesOlderData) {
  const auto staleness = [](const std::string& budget, const std::string& lookahead) {
    const Outcome outcome = run_program({"sim", "run", "configs/sim/small.yaml", "--json", "--set",
                                         "staleness.budget=" + budget, "--set", "staleness.lookahead=" + lookahead});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return json::parse(outcome.out).at("staleness");
  };
  double before = 0;
  for (const char* budget : {"1", "3", "11"}) {
    const json found = staleness(budget, "auto");
    EXPECT_GT(found.at("mean").get<double>(), before) << budget;
    before = found.at("mean");
    EXPECT_EQ(std::to_string(found.at("lookahead").get<int>()), budget);
    if (std::string(budget) != "11") {  // this fleet is never so far ahead
      EXPECT_GT(found.at("steps_bound_by_budget"), 0) << budget << ": S binds";
    }
    EXPECT_EQ(found.at("steps_bound_by_lookahead"), 0) << budget;
  }
  const json two = staleness("11", "2");
  EXPECT_LT(two.at("mean").get<double>(), before);
  EXPECT_GT(two.at("steps_bound_by_lookahead"), 0);
  EXPECT_EQ(two.at("steps_bound_by_budget"), 0);
}

TEST(SimRun, ARunThatDoesNotGetThroughItsStepsIsAFailure) {
  const Outcome outcome =
      run_program({"sim", "run", "configs/sim/small.yaml", "--json", "--set", "fleet.usd_max=0.01"});
  EXPECT_EQ(outcome.status, 1);
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report.at("steps"), 0);
  EXPECT_NE(outcome.err.find("it ended after 0 of 60 steps: " + report.at("ended").get<std::string>()),
            std::string::npos)
      << outcome.err;
}

// The page of `echoline advise` has a row for each field, and the files of --out are scenarios.
TEST(Advise, PrintsDocumentedJsonAndWritesRunFiles) {
  TemporaryFolder folder;
  const std::vector<std::string> words{"advise", "configs/sim/small.yaml", "--out", folder.path().string()};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), words.begin(), words.end());
    return run_program(more);
  };
  const Outcome advised = with({"--json"});
  EXPECT_EQ(advised.status, 0) << advised.err;
  const json advice = json::parse(advised.out);
  expect_documented(advice, text_of("docs/advise.md"), "");
  const std::string file = (folder.path() / "advice-1.yaml").string();
  const Outcome simulated = run_program({"sim", "run", file, "--json"});
  EXPECT_EQ(simulated.status, 0) << simulated.err;
  const json &figures = advice.at("best").at(0).at("figures"),
             usd = json::parse(simulated.out).at("cost").at("usd_total");
  EXPECT_GE(usd, figures.at("usd_min"));
  EXPECT_LE(usd, figures.at("usd_max"));

  const Outcome limited = with({"--deadline", "10 min", "--budget", "3"});
  EXPECT_EQ(limited.status, 1);
  EXPECT_NE(limited.err.find("no combination keeps --deadline '10 min' and --budget 3"), std::string::npos);
  for (std::istringstream lines(limited.out); !lines.eof();) {
    std::string line;
    std::getline(lines, line);
    EXPECT_LE(line.size(), 80u) << line;
  }
  EXPECT_EQ(with({"--deadline", "soon"}).status, 2);
}

TEST(SimRun, ErrorsNameTheFaultOfAScenario) {
  const Outcome wrong = run_program({"sim", "run", "configs/sim/small.yaml", "--set", "simulation.churn.per_huor=1"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_NE(wrong.err.find("did you mean 'per_hour'?"), std::string::npos) << wrong.err;
  EXPECT_EQ(run_program({"sim", "run", "configs/quickstart.yaml"}).status, 2);
  EXPECT_EQ(run_program({"sim", "run", "/nowhere.yaml"}).status, 2);
  EXPECT_EQ(run_program({"sim", "run"}).status, 2);
  EXPECT_EQ(run_program({"sim", "run", "configs/sim/small.yaml", "--like", "x"}).status, 2);
  EXPECT_NE(run_program({"sim", "run", "--like", "/nowhere"}).status, 0);
  EXPECT_EQ(run_program({"advise"}).status, 2);
  EXPECT_EQ(run_program({"advise", "configs/sim/small.yaml", "--like", "x"}).status, 2);
  const Outcome full = run_program({"sim", "run", "configs/sim/small.yaml", "--out", "/proc/nowhere"});
  EXPECT_EQ(full.status, 1);
  EXPECT_EQ(full.out, "");
  // No plan meets this. The simulation runs anyway, because the learner's waiting is the question.
  const Outcome without_plan =
      run_program({"sim", "run", "configs/sim/small.yaml", "--set", "fleet.workers_max=2", "--json"});
  ASSERT_EQ(without_plan.status, 0) << without_plan.err;
  const json report = json::parse(without_plan.out);
  EXPECT_GT(report.at("learner").at("idle_fraction"), 0.5);
  EXPECT_NE(report.at("simulation").at("plan"), "as planned");
}

}  // namespace
}  // namespace echoline::testing
