// The results of a sweep, also from malformed reports: numbers, tables, files and pages.
#include "study/sweep_results.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "pages/html_page.hpp"
#include "pages/run_page.hpp"
#include "study/run_rows.hpp"
#include "study/sweep_page.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::study {

using namespace pages;

namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(Estimates, AreStudents) {
  EXPECT_FALSE(estimate({}));
  const auto one = estimate({3});
  EXPECT_EQ(one->mean, 3);
  EXPECT_FALSE(one->interval);
  const auto three = estimate({1, 2, 3});
  EXPECT_DOUBLE_EQ(three->mean, 2);
  EXPECT_NEAR(three->interval->high - 2, 4.30265 / std::sqrt(3), 1e-4);  // t of 2 degrees of freedom at 0.975
  EXPECT_NEAR(2 - three->interval->low, 4.30265 / std::sqrt(3), 1e-4);
  EXPECT_EQ(estimate_text({1, 0.12345, {}}), "0.123");
  const auto around = [](double mean, double half_width) {
    return estimate_text({.n = 3, .mean = mean, .interval = Interval{mean - half_width, mean + half_width}});
  };
  EXPECT_EQ(around(0.12345, 0.0123), "0.123 ± 0.012");
  EXPECT_EQ(around(1234.5, 20.0), "1234 ± 20");
  EXPECT_EQ(around(0, 0), "0 ± 0");
  EXPECT_EQ(around(23.0 / 6, 1e-16), "3.83 ± 0.00");
  EXPECT_EQ(estimate_text({1, 5e-9, {}}), "5e-09");
  EXPECT_EQ(around(-1e300, 1e299), "-1e+300 ± 1e+299");
}

TEST(Estimates, SayNothingImpossible) {
  const auto accuracy = estimate({0.93, 0.97}, range_of("eval.after"));
  EXPECT_NEAR(accuracy->interval->low, 0.95 - 12.7062 * 0.02, 1e-4);
  EXPECT_EQ(accuracy->interval->high, 1);
  EXPECT_EQ(estimate_text(*accuracy), "0.95 (0.70 to 1.00)");
  const auto dollars = estimate({0.1, 0.3}, range_of("cost.usd_total"));
  EXPECT_EQ(dollars->interval->low, 0);
  EXPECT_NEAR(dollars->interval->high, 0.2 + 12.7062 * 0.1, 1e-4);
  EXPECT_LT(estimate({-0.9, 0.1}, range_of("reward.last"))->interval->low, -1);
  EXPECT_EQ(estimate({0.7, 0.7}, range_of("learner.idle_fraction"))->interval->high, 0.7);
  EXPECT_EQ(estimate({-3, -1}, range_of("wall_seconds"))->interval->low, -2);  // the mean stays inside
  for (const char* share : {"learner.idle_fraction", "learning.clip_fraction_mean", "eval.by_task.maths.before",
                            "regrading.share", "broadcast.density_mean"})
    EXPECT_EQ(range_of(share).max, 1) << share;
  for (const char* more : {"steps_per_s", "eval.problems", "cost.usd_total", "staleness.mean"}) {
    EXPECT_EQ(range_of(more).min, 0) << more;
    EXPECT_FALSE(range_of(more).max) << more;
  }
}

TEST(Reports, AreReadWithSuspicion) {
  const json report =
      json::parse(R"({"steps": 10, "wall_seconds": 30, "warm_start": {"seconds": 10}, "learner": {"idle_fraction": 0.5},
                                      "eval": {"after": null}, "reward": "high", "cost": {"usd_total": true}})");
  EXPECT_EQ(measure_value(report, "steps_per_s"), 0.5);
  EXPECT_EQ(measure_value(report, "learner.idle_fraction"), 0.5);
  for (const char* field :
       {"eval.after", "reward.last", "cost.usd_total", "none", "learner", "learner.idle_fraction.x", ""})
    EXPECT_FALSE(measure_value(report, field)) << field;
  for (const char* text : {"null", "[]", "3", "{\"steps\": 1}", "{\"steps\": 1, \"wall_seconds\": 0}",
                           "{\"steps\": 1, \"wall_seconds\": -5}"})
    EXPECT_FALSE(measure_value(json::parse(text), "steps_per_s")) << text;
}

// A plan of four cells with two seeds whose reports the test writes.
class Results : public testing::Test {
 protected:
  Results() {
    plan_.config = "a <b> & 'c'.yaml";
    plan_.out = folder_.path();
    plan_.keys = {"staleness.budget", "network.topology"};
    plan_.seeds = 2;
    for (const char* budget : {"1", "3"})
      for (const char* topology : {"trees", "</script><script>alert(1)</script>"}) {
        const KeyValues values{{"staleness.budget", budget}, {"network.topology", topology}};
        SweepCell cell{values, {values}, {}};
        for (std::uint64_t seed = 1; seed <= 2; ++seed) {
          const std::string digest = fmt::format("{:032x}", 100 * plan_.cells.size() + seed);
          cell.runs.push_back({seed, digest, folder_.path() / "cells" / digest, ""});
        }
        plan_.cells.push_back(std::move(cell));
      }
  }

  void report(std::size_t cell, std::size_t run, const std::string& text) {
    const SweepRun& r = plan_.cells[cell].runs[run];
    std::filesystem::create_directories(r.folder);
    std::ofstream(r.folder / "report.json") << text;
    outcomes_[r.digest].end = SweepEnd::kDone;
  }
  void report(std::size_t cell, std::size_t run, double wall, double usd) {
    report(cell, run,
           json{{"schema_version", 1},
                {"ended", "completed"},
                {"steps", 10},
                {"wall_seconds", wall},
                {"cost", {{"usd_total", usd}}}}
               .dump());
  }
  void fill() {
    report(0, 0, 10, 1.0), report(0, 1, 12, 1.2);  // fast and dear
    report(1, 0, 20, 0.5), report(1, 1, 20, 0.5);  // slow and cheap
    report(2, 0, 25, 2.0), report(2, 1, 25, 2.0);  // beaten
    outcomes_[plan_.cells[3].runs[0].digest] = {SweepEnd::kFailed, "exit code 1: <img src=x onerror=alert(1)>",
                                                folder_.path() / "logs/x.log"};
  }

  overlay::TemporaryFolder folder_;
  SweepPlan plan_;
  SweepOutcomes outcomes_;
};

TEST_F(Results, OneRowPerCell) {
  fill();
  const SweepResults r = collect(plan_, outcomes_);
  ASSERT_EQ(r.rows.size(), 4u);
  ASSERT_EQ(r.measures.size(), 3u);  // those that were measured
  EXPECT_EQ(r.measures[0].field, "steps_per_s");
  EXPECT_NEAR(r.rows[0].estimates[1]->mean, 11, 1e-12);
  EXPECT_FALSE(r.rows[3].estimates[0]);
  EXPECT_THAT(r.pareto, ElementsAre(0, 1));
  const std::string table = to_table(r, 200);
  EXPECT_THAT(table, HasSubstr("S"));
  EXPECT_THAT(table, HasSubstr("20.0 ± 0.0"));
  EXPECT_THAT(table, HasSubstr("0 of 2"));
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 5);
  const std::string narrow = to_table(r, 60);  // what has no room follows below
  EXPECT_GT(std::count(narrow.begin(), narrow.end(), '\n'), 10);
}

TEST_F(Results, CsvQuotesSpecialFields) {
  plan_.cells[0].values[1].second = "=HYPERLINK(\"x\"),1";
  fill();
  const std::string csv = to_csv(collect(plan_, outcomes_));
  EXPECT_THAT(
      csv, HasSubstr("staleness.budget,network.topology,runs,runs_done,steps_per_s,steps_per_s.low,steps_per_s.high,"));
  EXPECT_THAT(csv, HasSubstr("1,\"'=HYPERLINK(\"\"x\"\"),1\",2,2,"));
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 5);
}

TEST_F(Results, JsonHasEverything) {
  fill();
  const json j = json::parse(to_json(collect(plan_, outcomes_)).dump());
  EXPECT_EQ(j.at("schema_version"), kSweepSchemaVersion);
  EXPECT_EQ(j.at("failed"), 1);
  EXPECT_EQ(j.at("not_run"), 1);
  EXPECT_EQ(j.at("pareto"), json::parse(R"({"x": "wall_seconds", "y": "cost.usd_total", "cells": [0, 1]})"));
  const json& cell = j.at("cells").at(0);
  EXPECT_EQ(cell.at("values").at("staleness.budget"), "1");
  EXPECT_EQ(cell.at("measures").at("cost.usd_total").at("n"), 2);
  EXPECT_EQ(cell.at("measures").at("cost.usd_total").at("low"), 0);  // 1.1 less 1.27
  EXPECT_GT(cell.at("measures").at("cost.usd_total").at("high"), 2);
  EXPECT_EQ(cell.at("runs").at(1).at("measures").at("wall_seconds"), 12);
  EXPECT_EQ(j.at("cells").at(3).at("runs").at(0).at("state"), "failed");
  EXPECT_EQ(j.at("cells").at(3).at("runs").at(1).at("state"), "not run");
}

TEST_F(Results, HostileReportsAreOnlyData) {
  report(0, 0,
         "{\"schema_version\": 1, \"steps\": 1e308, \"wall_seconds\": 1e-308, \"reward\": {\"last\": [[[[]]]]}, "
         "\"cost\": {\"usd_total\": -0.0}}");
  report(0, 1, "not json");
  report(1, 0, "[1, 2");
  report(1, 1, "{\"learner\": {\"idle_fraction\": 1e400}}");
  report(2, 0, std::string(100'000, '['));
  report(2, 1, "{\"run\": \"</script><script>alert(1)</script>\", \"reward\": {\"last\": 1e308}}");
  report(3, 0, "{\"reward\": {\"last\": 1.7e308}}"), report(3, 1, "{\"reward\": {\"last\": -1.7e308}}");
  const SweepResults r = collect(plan_, outcomes_);
  for (const ChartLibrary& charts : {ChartLibrary{}, built_in_charts()})
    EXPECT_THAT(sweep_page(r, charts), HasSubstr("</html>"));
  EXPECT_THAT(to_table(r, 80), Not(HasSubstr("inf")));
  EXPECT_FALSE(json::parse(to_json(r).dump(), nullptr, false).is_discarded());
}

// Every "<script" of a page, including the page's own.
std::size_t scripts_of(const std::string& page) {
  std::size_t count = 0;
  for (std::size_t at = 0; (at = page.find("<script", at)) != std::string::npos; ++at) ++count;
  return count;
}

constexpr ChartLibrary kCharts{"/* a library */", "Licence <of> it"};

TEST_F(Results, ThePageEscapesItsTexts) {
  fill();
  const SweepResults r = collect(plan_, outcomes_);
  const std::string page = sweep_page(r, kCharts);
  EXPECT_EQ(scripts_of(page), 3u);  // the data, the library, what hands it over
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  EXPECT_THAT(page, HasSubstr("&lt;img src=x onerror=alert(1)&gt;"));
  EXPECT_THAT(page, HasSubstr("Sweep of a &lt;b&gt; &amp; &#39;c&#39;.yaml"));
  EXPECT_THAT(page, HasSubstr("Licence &lt;of&gt; it"));
  EXPECT_THAT(page, HasSubstr("\\u003c/script\\u003e"));
  EXPECT_THAT(page, HasSubstr("cells/" + plan_.cells[0].runs[0].digest + "/"));
  EXPECT_THAT(page, Not(HasSubstr("http:")));  // nothing is fetched
  EXPECT_THAT(page, Not(HasSubstr("src=\"")));
  // The page's data is the plot: a line for each value of the second key.
  const std::size_t begin = page.find("id='plots'>") + 11;
  const json plots = json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  ASSERT_EQ(plots.size(), 4u);  // the front and three measures
  EXPECT_EQ(plots[0].at("series").at(0).at("points").size(), 2u);
  EXPECT_EQ(plots[1].at("x"), "S");
  ASSERT_EQ(plots[1].at("series").size(), 2u);
  EXPECT_EQ(plots[1].at("series").at(0).at("name"), "network.topology=trees");
  EXPECT_TRUE(plots[1].at("series").at(0).at("points").at(0).contains("low"));
}

TEST_F(Results, WithoutALibraryThePageDrawsItself) {
  fill();
  const std::string page = sweep_page(collect(plan_, outcomes_), {});
  EXPECT_EQ(scripts_of(page), 0u);
  EXPECT_THAT(page, HasSubstr("<svg"));
  EXPECT_THAT(page, HasSubstr("<title>network.topology=trees: S 1, "));
}

TEST(Svg, DrawsAnyNumbers) {
  Plot plot{"p", "x", "y", {}, {{"a", {{1, 2, {}, {}, "", ""}}, true}}};
  EXPECT_THAT(plot_svg(plot), HasSubstr("<circle"));
  plot.series[0].points = {{0, 0, {}, {}, "", ""}, {0, 0, {}, {}, "", ""}};
  EXPECT_THAT(plot_svg(plot), Not(HasSubstr("nan")));
  plot.series[0].points = {{-1e308, -1e308, {}, {}, "", ""}, {1e308, 1e308, {}, {}, "", ""}};
  EXPECT_EQ(plot_svg(plot), "");
  plot.series[0].points.clear();
  EXPECT_EQ(plot_svg(plot), "");
}

TEST(Pages, LinkOnlyBelowThemselves) {
  Page page("links");
  page.add_table({"a"}, {{{"ok", "cells/1/", false}},
                         {{"js", "javascript:alert(1)", false}},
                         {{"up", "../../etc", false}},
                         {{"root", "/etc", false}}});
  const std::string html = page.finish({});
  EXPECT_THAT(html, HasSubstr("<a href='cells/1/'>ok</a>"));
  EXPECT_THAT(html, HasSubstr("<td>js</td>"));
  EXPECT_THAT(html, HasSubstr("<td>up</td>"));
  EXPECT_THAT(html, HasSubstr("<td>root</td>"));
}

TEST(RunPages, ShowARun) {
  RunFiles run;
  run.name = "mine";
  run.report = json::parse(
      R"({"run": "mine", "ended": "completed", "steps": 2, "steps_planned": 2, "reward": {"first": 0.1, "last": 0.9},
      "workers": [{"id": 1, "offer": "<script>alert(1)</script>", "price_usd_per_hour": 0.1,
       "rollouts": 5, "bytes_in": 1000, "lost": true}]})");
  for (int step = 1; step <= 2; ++step)
    run.metrics.push_back({{"kind", "step"},
                           {"step", step},
                           {"reward_mean", 0.5 * step},
                           {"loss", 0.1},
                           {"wait_seconds", 1.0},
                           {"train_seconds", 3.0},
                           {"step_seconds", 4.0},
                           {"staleness", {{"0", 6}, {"2", 2}}}});
  run.metrics.push_back({{"kind", "step"}, {"step", 2}, {"reward_mean", 0.7}});  // done again
  run.metrics.push_back({{"kind", "broadcast"}, {"version", 1}, {"t_b_seconds", 0.2}, {"lower_bound_seconds", 0.1}});
  run.events = {{{"unix_s", 10}, {"event", "started"}, {"step", 0}},
                {{"unix_s", 12.5}, {"event", "lost"}, {"detail", "</td><b>"}}};
  const std::string page = run_page(run, kCharts);
  EXPECT_EQ(scripts_of(page), 3u);
  EXPECT_THAT(page, HasSubstr("&lt;script&gt;alert(1)"));
  EXPECT_THAT(page, HasSubstr("0.1 to 0.9"));
  EXPECT_THAT(page, HasSubstr("<td class='n'>2.5 s</td><td>lost</td><td>detail: &lt;/td&gt;&lt;b&gt;</td>"));
  const std::size_t begin = page.find("id='plots'>") + 11;
  const json plots = json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  EXPECT_EQ(plots.at(0).at("series").at(0).at("points").at(1).at("y"), 0.7);
  EXPECT_EQ(plots.at(2).at("series").at(0).at("points").at(0).at("y"), 0.5);  // mean staleness of step 1
}

TEST(RunPages, ExpectNothingOfFiles) {
  RunFiles run;
  run.name = "odd";
  EXPECT_THAT(run_page(run, {}), HasSubstr("no report yet"));
  run.report = json::parse(
      R"({"run": ["x"], "workers": [1, "two", null, {"id": {}}], "reward": 3, "broadcast": {"full_bytes": -1e300}})");
  run.metrics = {1,
                 "x",
                 nullptr,
                 {{"kind", 3}},
                 {{"kind", "step"}},
                 {{"kind", "step"}, {"step", "1"}},
                 {{"kind", "step"}, {"step", 1}, {"staleness", 7}},
                 {{"kind", "step"}, {"step", 2}, {"staleness", {{"x", 1}, {"1", "y"}, {"2", -3}}}}};
  run.events = {
      1, "x", json::array(), {{"event", json::object()}}, {{"unix_s", "late"}, {"event", "e"}, {"\"><script>", 1}}};
  const std::string page = run_page(run, kCharts);
  EXPECT_THAT(page, HasSubstr("Run odd"));
  EXPECT_LE(scripts_of(page), 3u);
}

TEST(RunPages, LongRunsAreThinnedOut) {
  RunFiles run;
  for (int step = 1; step <= 50'000; ++step)
    run.metrics.push_back({{"kind", "step"}, {"step", step}, {"reward_mean", 0.5}});
  EXPECT_LT(run_page(run, {}).size(), 1u << 20);
}

TEST(RunPages, TakeAStatedNumberOfRowsFromFilesOfAnyLength) {
  const overlay::TemporaryFolder folder;
  const std::filesystem::path metrics = folder.path() / "metrics.jsonl", events = folder.path() / "events.jsonl";
  {
    std::ofstream rows(metrics);
    rows << json{{"kind", "evaluation"}, {"step", 0}, {"accuracy", 0.1}} << "\n";
    for (int step = 1; step <= 30'001; ++step) {
      rows << json{{"kind", "step"}, {"step", step}, {"reward_mean", 0.5}} << "\n";
      rows << json{{"kind", "broadcast"}, {"version", step}, {"snapshot", step == 1}} << "\n";
    }
    for (int step = 29'990; step <= 30'001; ++step)
      rows << json{{"kind", "step"}, {"step", step}, {"reward_mean", 0.7}} << "\n";  // done again
    std::ofstream happened(events);
    for (int i = 0; i < 1000; ++i) happened << json{{"unix_s", 100 + i}, {"event", "joined"}, {"worker", i}} << "\n";
  }
  const auto rows = plotted_rows(metrics);
  ASSERT_TRUE(rows) << rows.error().message();
  std::map<std::string, std::size_t> kinds;
  for (const json& row : *rows) ++kinds[row.at("kind")];
  EXPECT_EQ(kinds.at("evaluation"), 1u);
  EXPECT_LE(kinds.at("step"), kPlotRowsMax);
  EXPECT_GT(kinds.at("step"), kPlotRowsMax / 2 - 2);
  EXPECT_LE(kinds.at("broadcast"), kPlotRowsMax);
  const json& last = rows->at(kinds.at("step") - 1);
  EXPECT_EQ(last.at("step"), 30'001);
  EXPECT_EQ(last.at("reward_mean"), 0.7);

  const auto found = last_events(events);
  ASSERT_TRUE(found) << found.error().message();
  RunFiles run;
  run.events = found->rows;
  run.events_left_out = found->left_out;
  run.first_event_unix_s = found->first_unix_s;
  const std::string page = run_page(run, {});
  EXPECT_THAT(page, HasSubstr("Shows the last 300 of 1000 events."));
  EXPECT_THAT(page, HasSubstr("<td class='n'>999.0 s</td>"));
  EXPECT_EQ(last_events(folder.path() / "none")->rows.size(), 0u);
}

}  // namespace
}  // namespace echoline::study
