// echoline sim run: simulates a whole training run.
#include "cli/sim_run.hpp"

#include <algorithm>
#include <cstdio>

#include "base/files.hpp"
#include "base/log.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"
#include "pages/run_page.hpp"
#include "study/sim_run_like.hpp"
#include "study/sim_run_report.hpp"

namespace echoline::cli {
namespace {

using namespace study;
using namespace pages;

struct Arguments {
  std::string scenario, like, out;
  std::vector<std::string> overrides;
  std::optional<std::string> seed, html;
  bool json = false;
};

std::string lines_of(const std::vector<nlohmann::json>& rows) {
  std::string text;
  for (const nlohmann::json& row : rows) text += row.dump() + "\n";
  return text;
}

Status write_all(const std::filesystem::path& folder, const RunFiles& files) {
  ECHO_TRY(make_folders(folder));
  ECHO_TRY(write_file_atomic(folder / "metrics.jsonl", lines_of(files.metrics)));
  ECHO_TRY(write_file_atomic(folder / "events.jsonl", lines_of(files.events)));
  return write_file_atomic(folder / "report.json", files.report.dump(2) + "\n");
}

RunFiles files_of(nlohmann::json report, std::vector<nlohmann::json> metrics, const sim::RunResult& result) {
  RunFiles files;
  files.report = std::move(report);
  files.metrics = thinned(std::move(metrics), result.steps);
  for (const sim::SimDecision& d : result.decisions)
    files.events.push_back({{"unix_s", d.at_s}, {"event", d.what}, {"offer", d.offer}, {"detail", d.why}});
  return files;
}

int run(const Arguments& a) {
  log::configure(log::Level::kError, "sim");
  const auto report_failure = [](const Error& error) { return report_error("sim run", error); };
  auto overrides = parse_overrides(a.overrides);
  if (!overrides) return report_failure(overrides.error());
  if (a.scenario.empty() == a.like.empty())
    return report_failure(fail(Code::kInvalid, "sim run", "expected either a scenario file or --like with a run"));
  std::optional<MeasuredRun> like;
  if (!a.like.empty()) {
    const auto folder = find_run(a.like);
    if (!folder) return report_failure(folder.error());
    auto measured = read_measured_run(*folder);
    if (!measured) return report_failure(measured.error());
    like = std::move(*measured);
    // A step time from the user replaces the step times of the run.
    if (std::ranges::any_of(*overrides, [](const auto& set) { return set.first == "simulation.step_time"; }))
      std::erase_if(like->world, [](const auto& set) { return set.first == "simulation.step_seconds"; });
    overrides->insert(overrides->begin(), like->world.begin(), like->world.end());
  }
  if (a.seed) overrides->emplace_back("simulation.seed", *a.seed);
  auto scenario = load_sim_run(ConfigFile::load(like ? like->config.string() : a.scenario), *overrides);
  if (!scenario) return report_failure(scenario.error());
  const auto result = sim::simulate_run(scenario->scenario);
  if (!result) return report_failure(result.error());
  auto metrics = sim_run_metrics(*result);
  nlohmann::json report = sim_run_report(*scenario, *result, metrics);
  if (like) report["simulation"]["like"] = compare(*like, report, metrics);
  if (!a.out.empty() || a.html) {
    const RunFiles files = files_of(report, std::move(metrics), *result);
    if (!a.out.empty())
      if (const Status written = write_all(a.out, files); !written) return report_failure(written.error());
    if (a.html)
      if (const auto written = write_run_page(files, *a.html, a.out); !written) return report_failure(written.error());
  }
  if (a.json) {
    fmt::print("{}\n", report.dump(2));
  } else {
    fmt::print("{}", sim_run_table(report));
    if (like) fmt::print("{}", comparison_table(report["simulation"]["like"]));
    if (!result->plan_error.empty()) print_stderr("no plan: {}\n", result->plan_error);
  }
  if (result->ended == "completed") return 0;
  print_stderr("echoline sim run: it ended after {} of {} steps: {}\n", result->steps, scenario->config.run.steps,
               result->ended);
  return 1;
}

}  // namespace

void add_sim_run(Verb& sim, int& exit_code) {
  auto* verb = sim.add_verb("run", "Simulate a whole training run: its cost and how long the learner would wait");
  auto a = std::make_shared<Arguments>();
  verb->add_option("scenario", a->scenario, "run file with a section `simulation`, e.g. configs/sim/small.yaml");
  verb->add_option("--like", a->like,
                   "simulate a run that has ended, with its measured values; prints both for comparison");
  verb->add_option("--set", a->overrides,
                   "override a key, e.g. --set staleness.budget=0 or --set simulation.churn.per_hour=0.5")
      ->one_value_each();
  verb->add_option("--seed", a->seed, "replaces simulation.seed; the same seed gives the same report");
  verb->add_option("--out", a->out, "write report.json, metrics.jsonl and events.jsonl into this folder");
  verb->add_option("--html", a->html,
                   "write a self-contained HTML page into this file; default: report.html in the folder of --out")
      ->value_count(0, 1);
  verb->add_flag("--json", a->json, "print the report (docs/report.md) or the errors as JSON");
  verb->footer(
      "The code of a real run decides which offers are rented, which worker gets work and which rollouts are trained "
      "on. The scenario describes machines, market, learner steps and faults (docs/simulation.md). Exit code 1: the "
      "run did not complete its steps.\n"
      "Examples:\n"
      "  echoline sim run configs/sim/small.yaml\n"
      "  echoline sim run --like quickstart --set staleness.budget=1  # another budget\n"
      "  echoline sim run configs/sim/regions.yaml --html regions.html \\\n"
      "    --set simulation.churn.per_hour=0.3\n"
      "What if:\n"
      "  --set network.topology=star         the learner sends to every worker\n"
      "  --set simulation.activation=random  random offers, not the cheapest\n"
      "  --set simulation.publish=snapshot   the whole policy every time\n"
      "  --set staleness.budget=0 --set staleness.lookahead=auto\n"
      "                                      strictly on-policy: every step waits for it");
  verb->callback([a, &exit_code] { exit_code = run(*a); });
}

}  // namespace echoline::cli
