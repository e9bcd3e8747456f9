// Sweeps of processes: finished runs are not repeated after SIGKILL, failures are reported, and the page works in a
// browser.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kScenario = R"(run: {name: small, seed: 1, steps: 60}
rollout: {prompts_per_step: 64, group_size: 8, response_tokens_max: 4096}
staleness: {budget: 3}
learner: {usd_per_hour: 2.5}
network: {uplink: 1 Gbit/s}
fleet: {step_time_expected: 40 s}
simulation:
  parameters: 1.7e9
  density: 0.03
  tokens: {median: 600}
  market:
    - {count: 40, usd_per_hour: 0.25, tokens_per_s: 900, up: 200 Mbit/s, down: 500 Mbit/s}
)";

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// A fake echoline for `sim run CELL --seed N --out DIR`: it records the call, runs `body`, and leaves a report with
// numbers that follow from the cell.
class SimulatedSweep : public ::testing::Test {
 protected:
  SimulatedSweep() { std::ofstream(folder_.path() / "s.yaml") << kScenario; }
  ~SimulatedSweep() override { ::unsetenv("ECHOLINE_PROGRAM"); }

  void install_fake_program(const std::string& body) {
    const std::filesystem::path path = folder_.path() / "echoline";
    std::ofstream(path)
        << "#!/bin/sh\nseed=$5 out=$7\n[ \"$1 $2 $4 $6\" = 'sim run --seed --out' ] || exit 2\necho \"$out $seed\" >> "
        << (folder_.path() / "starts").string() << "\nbudget=$(sed -n 's/.*budget: *//p' \"$3\")\n"
        << body << "\nprintf '{\"schema_version\": 1, \"ended\": \"completed\", \"steps\": 60, \"wall_seconds\": %s, "
        << "\"learner\": {\"idle_fraction\": 0.%s}, \"cost\": {\"usd_total\": %s}}' $((100 / budget + seed)) $seed "
           "$budget > \"$out/new\"\n"
        << "mv \"$out/new\" \"$out/report.json\"\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    ::setenv("ECHOLINE_PROGRAM", path.c_str(), 1);
  }
  std::vector<std::string> sweep_words(std::vector<std::string> more = {}) const {
    std::vector<std::string> words{"sweep",   (folder_.path() / "s.yaml").string(),
                                   "--over",  "S=1,2,4,5",
                                   "--seeds", "2",
                                   "--jobs",  "2",
                                   "--out",   out().string()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::filesystem::path out() const { return folder_.path() / "out"; }
  // Number of starts of each run, by its folder.
  std::map<std::string, int> starts() const {
    std::map<std::string, int> count;
    std::istringstream in(read(folder_.path() / "starts"));
    for (std::string folder, seed; in >> folder >> seed;) ++count[folder];
    return count;
  }
  std::vector<std::string> reports() const {
    std::vector<std::string> found;
    std::error_code ec;
    for (const auto& cell : std::filesystem::directory_iterator(out() / "cells", ec))
      if (std::filesystem::exists(cell.path() / "report.json")) found.push_back(cell.path().string());
    return found;
  }

  TemporaryFolder folder_;
};

TEST_F(SimulatedSweep, AKilledSweepResumesWithTheMissingRuns) {
  install_fake_program("sleep 0.3");
  std::vector<std::string> done;
  {
    Program sweep(sweep_words());
    ASSERT_TRUE(eventually(seconds(60), [&] { return reports().size() >= 3; }));
    sweep.signal(SIGKILL);
    EXPECT_EQ(sweep.wait(seconds(10)).status, 128 + SIGKILL);
    done = reports();
    ASSERT_LT(done.size(), 8u);
  }
  const auto before = starts();
  const Outcome outcome = run_program(sweep_words());
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(reports().size(), 8u);
  const auto after = starts();
  EXPECT_EQ(after.size(), 8u);
  for (const std::string& folder : done) EXPECT_EQ(after.at(folder), 1) << folder << " was done already";
  std::size_t again = 0;
  for (const auto& [folder, count] : after) again += count > 1;
  EXPECT_LE(again, 2u) << "the runs in progress";
  const Outcome third = run_program(sweep_words());
  EXPECT_EQ(third.status, 0);
  EXPECT_EQ(third.out, outcome.out);
  EXPECT_EQ(starts(), after);
  EXPECT_THAT(third.err, HasSubstr("8 of 8 runs are complete from an earlier sweep"));
  EXPECT_THAT(read(out() / "sweep.csv"), HasSubstr("staleness.budget,runs,runs_done,"));
  EXPECT_EQ(json_file(out() / "sweep.json").at("cells").size(), 4u);
}

TEST_F(SimulatedSweep, ATornReportIsReplaced) {
  install_fake_program("");
  ASSERT_EQ(run_program(sweep_words()).status, 0);
  const std::string torn_run = reports().front();
  std::ofstream(torn_run + "/report.json") << "{\"schema_version\": 1, \"ste";
  EXPECT_EQ(run_program(sweep_words()).status, 0);
  EXPECT_EQ(starts().at(torn_run), 2);
  EXPECT_EQ(json_file(torn_run + "/report.json").at("steps"), 60);
}

TEST_F(SimulatedSweep, FailuresAreReportedAndRetried) {
  install_fake_program("[ $seed = 2 ] && [ $budget = 4 ] && { echo 'no <b>luck</b> today' >&2; exit 3; }");
  const Outcome outcome = run_program(sweep_words({"--json"}));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("S=4 seed 2: failed: exit code 3: no <b>luck</b> today"));
  EXPECT_THAT(outcome.err, HasSubstr("log: " + (out() / "logs").string()));
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result.at("failed"), 1);
  const json& run = result.at("cells").at(2).at("runs").at(1);
  EXPECT_EQ(run.at("state"), "failed");
  EXPECT_THAT(read(run.at("log").get<std::string>()), HasSubstr("no <b>luck</b> today"));
  EXPECT_THAT(read(out() / "sweep.html"), Not(HasSubstr("<b>luck")));
  EXPECT_EQ(result.at("cells").at(2).at("measures").at("wall_seconds").at("n"), 1);
  install_fake_program("");
  EXPECT_EQ(run_program(sweep_words()).status, 0);
  for (const auto& [folder, count] : starts()) EXPECT_EQ(count, folder == run.at("folder") ? 2 : 1);
}

TEST_F(SimulatedSweep, CtrlCEndsCurrentRunsAndKeepsFinishedOnes) {
  install_fake_program("[ $seed = 2 ] && exec sleep 1000");
  Program sweep(sweep_words());
  ASSERT_TRUE(eventually(seconds(60), [&] { return reports().size() == 4 && starts().size() == 6; }));
  const Outcome busy = run_program(sweep_words(), seconds(180));  // a second sweep may not work there meanwhile
  EXPECT_EQ(busy.status, 1);
  EXPECT_THAT(busy.err, HasSubstr("another echoline sweep uses"));
  sweep.signal(SIGINT);
  const Outcome outcome = sweep.wait(seconds(120));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("stopped with 4 of 8 runs to go; the same command goes on"));
  EXPECT_THAT(outcome.out, HasSubstr("1 of 2"));
  EXPECT_TRUE(std::filesystem::exists(out() / "sweep.html"));
}

TEST_F(SimulatedSweep, ARunThatTakesTooLongIsEnded) {
  install_fake_program("[ $seed = 2 ] && [ $budget = 1 ] && exec sleep 1000");
  const Outcome outcome = run_program(sweep_words({"--limit", "1 s"}));
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("S=1 seed 2: failed: not done within 1 s"));
  EXPECT_EQ(reports().size(), 7u);
}

TEST_F(SimulatedSweep, TheCommandLineIsChecked) {
  install_fake_program("");
  for (const auto& [more, text] :
       std::vector<std::pair<std::vector<std::string>, std::string>>{{{"--limit", "5"}, "unit"},
                                                                     {{"--real", "--sim"}, "--real or --sim"},
                                                                     {{"--over", "S"}, "KEY=VALUE"},
                                                                     {{"--measure", "<b>"}, "--measure"}}) {
    const Outcome outcome = run_program(sweep_words(more));
    EXPECT_EQ(outcome.status, 2) << text;
    EXPECT_THAT(outcome.err, HasSubstr(text));
  }
  EXPECT_EQ(run_program({"sweep", "nosuch.yaml", "--seeds", "2"}).status, 2);
  EXPECT_FALSE(std::filesystem::exists(out()));
}

std::string browser() {
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
    for (const char* folder : {"/usr/bin/", "/usr/local/bin/"})
      if (std::filesystem::exists(std::string(folder) + name)) return std::string(folder) + name;
  return "";
}

TEST_F(SimulatedSweep, ThePageWorksInABrowser) {
  const std::string chromium = browser();
  if (chromium.empty()) GTEST_SKIP() << "no chromium here";
  install_fake_program("");
  std::ofstream(folder_.path() / "s.yaml", std::ios::app) << "# </script><script>document.title = 'broken'</script>\n";
  ASSERT_EQ(run_program(sweep_words({"--over", "fleet.image='</script><script>document.title=1</script>',b"})).status,
            0);
  const std::string dom = (folder_.path() / "dom.html").string(), log = (folder_.path() / "browser.log").string();
  const std::string command = fmt::format(
      "timeout 60 {} --headless --no-sandbox --disable-gpu --user-data-dir={} --enable-logging=stderr "
      "--virtual-time-budget=3000 "
      "--dump-dom file://{} > {} 2> {}",
      chromium, (folder_.path() / "profile").string(), (out() / "sweep.html").string(), dom, log);
  ASSERT_EQ(std::system(command.c_str()), 0) << read(log);
  const std::string text = read(dom);
  EXPECT_THAT(text, HasSubstr("<title>Sweep of s.yaml</title>"));
  EXPECT_THAT(read(log), Not(HasSubstr("Uncaught")));
  EXPECT_THAT(read(log), Not(HasSubstr("Refused to")));
  if (text.find("<svg") != std::string::npos) return;  // drawn without Chart.js
  // The style that Chart.js sets on a canvas that it draws on.
  EXPECT_NE(text.find("style=\"display: block; box-sizing: border-box"), std::string::npos) << "no plot was drawn";
}

TEST(RealSweep, RunsRunFilesAndResumesThem) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  TemporaryFolder folder;
  std::string text = read("configs/quickstart.yaml");
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"steps: 120", "steps: 2"},
                                                        {"steps_max: 1100", "steps_max: 5"},
                                                        {"prompts_per_step: 256", "prompts_per_step: 16"},
                                                        {"checkpoint_every: 10", "checkpoint_every: 1"}})
    text.replace(text.find(from), from.size(), to);
  std::ofstream(folder.path() / "run.yaml") << text << "\nsweep:\n  over: {learner.learning_rate: [1e-4, 2e-4]}\n";
  std::filesystem::copy("configs/offers", folder.path() / "offers", std::filesystem::copy_options::recursive);
  const std::vector<std::string> words{"sweep", (folder.path() / "run.yaml").string(), "-o",
                                       (folder.path() / "out").string(), "--json"};
  {
    Program sweep(words);
    const auto a_run_has_begun = [&] {
      std::error_code ec;
      for (const auto& cell : std::filesystem::directory_iterator(folder.path() / "out/cells", ec))
        if (std::filesystem::exists(cell.path() / "metrics.jsonl")) return true;
      return false;
    };
    ASSERT_TRUE(eventually(seconds(60), a_run_has_begun));
    sweep.signal(SIGKILL);
    sweep.wait(seconds(10));
  }
  const Outcome outcome = run_program(words, seconds(180));  // waits for the run that the first sweep left behind
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json result = json::parse(outcome.out);
  ASSERT_EQ(result.at("cells").size(), 2u);
  for (const json& cell : result.at("cells")) {
    EXPECT_EQ(cell.at("runs").at(0).at("state"), "done");
    EXPECT_GT(cell.at("measures").at("steps_per_s").at("mean").get<double>(), 0);
    const std::filesystem::path run = cell.at("runs").at(0).at("folder").get<std::string>();
    EXPECT_EQ(json_file(run / "report.json").at("steps"), 2);
    const std::filesystem::path page = folder.path() / "run.html";
    EXPECT_EQ(run_program({"report", run.string(), "--html", page.string()}).status, 0);
    EXPECT_THAT(read(page), HasSubstr("Reward and accuracy"));
    EXPECT_EQ(run_program({"report", run.string(), "--html"}).out, (run / "report.html").string() + "\n");
  }
}

// docs/papers.md contains their output: T_b of every cell, as in its tables.
TEST(Papers, TheTablesMatchTheSweeps) {
  TemporaryFolder folder;
  const std::string page = read("docs/papers.md");
  const auto swept = [&](const std::string& name, const char* measure) {
    const Outcome outcome =
        run_program({"sweep", "configs/papers/" + name + ".yaml", "--out", (folder.path() / name).string(), "--json"});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    std::vector<double> values;
    const json result = json::parse(outcome.out, nullptr, false);
    if (result.is_object())
      for (const json& cell : result.at("cells")) values.push_back(cell.at("measures").at(measure).at("mean"));
    return values;
  };
  const auto t_b = [&](const std::string& name) { return swept(name, "broadcast.t_b_seconds_median"); };
  std::vector<std::string> rows;
  const auto bandwidth = t_b("sparrowrl-bandwidth");
  ASSERT_EQ(bandwidth.size(), 8u);
  rows.push_back(fmt::format("| 100 Gbit/s | 1.3 | {:.2f} | | {:.2f} |", bandwidth[0], bandwidth[1]));
  rows.push_back(fmt::format("| 10 Gbit/s | 17.3 | {:.1f} | 0.25 | {:.2f} |", bandwidth[2], bandwidth[3]));
  rows.push_back(fmt::format("| {:.0f} | 4.71, in several streams 2.90 | {:.2f} |", bandwidth[4], bandwidth[5]));
  rows.push_back(fmt::format("| 250 Mbit/s | 566 | {:.0f} | | {:.2f} |", bandwidth[6], bandwidth[7]));
  const auto decoupled = t_b("decoupled-publication");
  ASSERT_EQ(decoupled.size(), 6u);
  for (const auto& [seconds, told] :
       {std::pair(decoupled[0], "6,120"), std::pair(decoupled[1], "2,076"), std::pair(decoupled[2], "615")}) {
    std::string digits = told;
    std::erase(digits, ',');
    EXPECT_NEAR(seconds, std::stod(digits), 0.5);
    rows.push_back(fmt::format("| {} |", told));
  }
  const auto decoupled_by = [&](const char* measure) {
    return swept("decoupled-publication", measure);
  };  // the sweep is complete already, so this only reads its results
  const auto p50 = decoupled_by("simulation.staleness.handed_in.p50"),
             p90 = decoupled_by("simulation.staleness.handed_in.p90"),
             fresh = decoupled_by("simulation.staleness.admissible_fraction"),
             waiting = decoupled_by("simulation.idle_fraction_after_first_step");
  const auto percent = [](double share) {
    return share == 0 ? std::string("0") : share == 1 ? std::string("100 %") : fmt::format("{:.1f} %", 100 * share);
  };
  for (std::size_t i = 0; i < 3; ++i) {  // as theirs hand out work, and as it is here
    std::string row;
    for (const std::size_t cell : {i + 3, i})
      row += fmt::format("| {:.0f}, {:.0f} | {} | {} ", p50[cell], p90[cell], percent(fresh[cell]),
                         percent(waiting[cell]));
    rows.push_back(row + "|");
  }
  const auto faults = swept("echo2-one-fault", "broadcast.t_b_seconds_p95");
  ASSERT_EQ(faults.size(), 5u);
  rows.push_back(fmt::format("| those after it | | {:.0f} s | {:.0f} s | {:.0f} s | {:.0f} s |", faults[1], faults[2],
                             faults[3], faults[4]));
  const auto deltas = t_b("fireworks-deltas");
  ASSERT_EQ(deltas.size(), 2u);
  rows.push_back(fmt::format("| {:.0f} s | {:.0f} s |", deltas[0], deltas[1]));
  // By link: whole policies with either coding, which makes no difference, then deltas with the paper's coding and
  // echoline's.
  const auto waits = swept("pulse-bandwidth", "simulation.idle_fraction_after_first_step");
  ASSERT_EQ(waits.size(), 16u);
  for (std::size_t link = 0; link < 4; ++link) {
    EXPECT_EQ(waits[4 * link], waits[4 * link + 1]);
    rows.push_back(fmt::format("{:.1f} % | {:.1f} % | {:.1f} % |", 100 - 100 * waits[4 * link],
                               100 - 100 * waits[4 * link + 2], 100 - 100 * waits[4 * link + 3]));
  }
  for (const std::string& row : rows) EXPECT_NE(page.find(row), std::string::npos) << row;
}

}  // namespace
}  // namespace echoline::testing
