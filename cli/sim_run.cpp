// echoline sim run: simulates a whole training run.
#include "cli/sim_run.hpp"

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

std::string json_lines(const std::vector<nlohmann::json>& rows) {
  std::string text;
  for (const nlohmann::json& row : rows) text += row.dump() + "\n";
  return text;
}

Status write_run_files(const std::filesystem::path& folder, const RunFiles& files) {
  ECHO_TRY(make_folders(folder));
  ECHO_TRY(write_file_atomic(folder / "metrics.jsonl", json_lines(files.metrics)));
  ECHO_TRY(write_file_atomic(folder / "events.jsonl", json_lines(files.events)));
  return write_file_atomic(folder / "report.json", files.report.dump(2) + "\n");
}

RunFiles files_of(nlohmann::json report, std::vector<nlohmann::json> metrics, const sim::RunResult& result) {
  RunFiles files;
  files.report = std::move(report);
  files.metrics = thin_out_metrics(std::move(metrics), result.steps);
  for (const sim::SimDecision& decision : result.decisions)
    files.events.push_back(
        {{"unix_s", decision.at_s}, {"event", decision.what}, {"offer", decision.offer}, {"detail", decision.why}});
  return files;
}

int run(const Arguments& args) {
  log::configure(log::Level::kError, "sim");
  const auto report_failure = [](const Error& error) { return report_error("sim run", error); };
  auto overrides = parse_overrides(args.overrides);
  if (!overrides) return report_failure(overrides.error());
  if (args.scenario.empty() == args.like.empty())
    return report_failure(fail(Code::kInvalid, "sim run", "expected either a scenario file or --like with a run"));
  std::optional<MeasuredRun> measured_run;
  if (!args.like.empty()) {
    const auto folder = find_run(args.like);
    if (!folder) return report_failure(folder.error());
    auto measured = read_measured_run(*folder);
    if (!measured) return report_failure(measured.error());
    measured_run = std::move(*measured);
    *overrides = overrides_like(*measured_run, *overrides);
  }
  if (args.seed) overrides->emplace_back("simulation.seed", *args.seed);
  auto loaded =
      load_sim_run(ConfigFile::load(measured_run ? measured_run->config.string() : args.scenario), *overrides);
  if (!loaded) return report_failure(loaded.error());
  const auto result = sim::simulate_run(loaded->scenario);
  if (!result) return report_failure(result.error());
  auto metrics = sim_run_metrics(*result);
  nlohmann::json report = sim_run_report(*loaded, *result, metrics);
  if (measured_run) report["simulation"]["like"] = compare(*measured_run, report, metrics);
  if (!args.out.empty() || args.html) {
    const RunFiles files = files_of(report, std::move(metrics), *result);
    if (!args.out.empty())
      if (const Status written = write_run_files(args.out, files); !written) return report_failure(written.error());
    if (args.html)
      if (const auto written = write_run_page(files, *args.html, args.out); !written)
        return report_failure(written.error());
  }
  if (args.json) {
    fmt::print("{}\n", report.dump(2));
  } else {
    fmt::print("{}", sim_run_table(report));
    if (measured_run) fmt::print("{}", comparison_table(report["simulation"]["like"]));
    if (!result->plan_error.empty()) print_stderr("no plan: {}\n", result->plan_error);
  }
  if (result->ended == "completed") return 0;
  print_stderr("echoline sim run: it ended after {} of {} steps: {}\n", result->steps, loaded->config.run.steps,
               result->ended);
  return 1;
}

}  // namespace

void add_sim_run(Verb& sim, int& exit_code) {
  auto* verb = sim.add_verb("run", "Simulate a whole training run: its cost and how long the learner would wait");
  auto args = std::make_shared<Arguments>();
  verb->add_option("scenario", args->scenario, "run file with a section `simulation`, e.g. configs/sim/small.yaml");
  verb->add_option("--like", args->like,
                   "simulate a run that has ended, with its measured values; prints both for comparison");
  verb->add_option("--set", args->overrides,
                   "override a key, e.g. --set staleness.budget=0 or --set simulation.churn.per_hour=0.5")
      ->one_value_each();
  verb->add_option("--seed", args->seed, "replaces simulation.seed; the same seed gives the same report");
  verb->add_option("--out", args->out, "write report.json, metrics.jsonl and events.jsonl into this folder");
  verb->add_option("--html", args->html,
                   "write a self-contained HTML page into this file; default: report.html in the folder of --out")
      ->value_count(0, 1);
  verb->add_flag("--json", args->json, "print the report (docs/report.md) or the errors as JSON");
  verb->footer(
      "The code of a real run decides which offers are rented, which worker gets work and which rollouts are trained "
      "on. The scenario describes machines, market, learner steps and faults (docs/simulation.md). Exit code 1: the "
      "run did not complete its steps.\n"
      "Variations:\n"
      "  --set network.topology=star         the learner sends to every worker\n"
      "  --set simulation.activation=random  random offers, not the cheapest\n"
      "  --set simulation.publish=snapshot   the whole policy every time\n"
      "  --set staleness.budget=0 --set staleness.lookahead=auto\n"
      "                                      strictly on-policy: every step waits for it");
  verb->callback([args, &exit_code] { exit_code = run(*args); });
}

}  // namespace echoline::cli
