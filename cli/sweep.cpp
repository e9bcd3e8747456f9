// echoline sweep: runs a file with several values of some keys and compares the results. A cell is one combination of
// values; it is run with several seeds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/state_line.hpp"
#include "cli/verbs.hpp"
#include "learner/run_record.hpp"
#include "study/sweep_page.hpp"
#include "study/sweep_results.hpp"

namespace echoline::cli {
namespace {

using namespace study;
using namespace pages;

constexpr std::size_t kColumnsWithoutTerminal = 160;
constexpr Duration kResultsInterval = std::chrono::minutes(1);  // between two times of writing the results so far
constexpr int kPausePerWritingTime = 20;  // times: writing results then takes at most 1/20 of the sweep's time

struct Arguments {
  std::string config, out, limit = "24 h";
  std::vector<std::string> over, measures;
  unsigned seeds = 0, jobs = 0;
  bool real = false, simulated = false, json = false;
};

Result<SweepPlan> make_plan(const Arguments& args, const std::string& version) {
  if (args.real && args.simulated) return fail(Code::kInvalid, "sweep", "expected --real or --sim, found both");
  SweepArguments sweep;
  sweep.config = args.config;
  sweep.out =
      args.out.empty() ? default_sweep_folder(sweep.config) : std::filesystem::absolute(args.out).lexically_normal();
  sweep.over = args.over;
  sweep.measures = args.measures;
  sweep.seeds = args.seeds;
  if (args.real) sweep.kind = SweepKind::kReal;
  if (args.simulated) sweep.kind = SweepKind::kSimulated;
  sweep.version = version;
  return plan_sweep(sweep);
}

Status write_results(const SweepPlan& plan, const SweepResults& results) {
  ECHO_TRY(write_file_atomic(plan.out / "sweep.csv", to_csv(results)));
  ECHO_TRY(write_file_atomic(plan.out / "sweep.html", sweep_page(results, built_in_charts())));
  return write_file_atomic(plan.out / "sweep.json", learner::json_text(to_json(results), /*indent=*/2) + "\n");
}

int sweep(const Arguments& args, const std::string& version) {
  const std::atomic<bool>& stop = stop_on_signals();
  const auto report_sweep_error = [](const Error& error) { return report_error("sweep", error); };
  SweepRunnerOptions options;
  const auto limit = parse_duration(args.limit);
  if (!limit || *limit <= Duration(0))
    return report_sweep_error(
        fail(Code::kInvalid, "--limit", "{}", limit ? "expected more than nothing" : limit.error().detail));
  const auto planned = make_plan(args, version);
  if (!planned) return report_sweep_error(planned.error());
  const bool is_simulated = planned->kind == SweepKind::kSimulated;
  options.program = own_program();
  options.limit = *limit;
  options.jobs = args.jobs > 0 ? args.jobs : is_simulated ? std::max(1u, std::thread::hardware_concurrency()) : 1;
  StateLine progress;
  options.on_message = [&](const std::string& text) { progress.print_line(text); };
  options.on_status = [&](const std::string& text) { progress.show(text); };
  print_stderr("{} cells, {} seeds each; {}\n", planned->cells.size(), planned->seeds, planned->out.string());
  const SystemClock clock;
  // Results so far are written while the sweep goes on, but not after every run: collect() reads all reports again.
  TimePoint results_due{};
  options.on_run_ended = [&](const SweepOutcomes& outcomes_so_far) {
    const TimePoint writing_begins = clock.now();
    if (writing_begins < results_due) return;
    if (const Status written = write_results(*planned, collect(*planned, outcomes_so_far)); !written)
      progress.print_line(written.error().message());
    results_due =
        clock.now() + std::max<Duration>(kResultsInterval, kPausePerWritingTime * (clock.now() - writing_begins));
  };
  const auto outcomes = run_sweep(*planned, options, clock, stop);
  progress.clear();
  if (!outcomes) return report_sweep_error(outcomes.error());

  const SweepResults results = collect(*planned, *outcomes);
  if (const Status written = write_results(*planned, results); !written) return report_sweep_error(written.error());
  if (args.json)
    fmt::print("{}\n", learner::json_text(to_json(results), /*indent=*/2));
  else
    fmt::print("{}", to_table(results, screen_columns().value_or(kColumnsWithoutTerminal)));
  const auto count = [&](SweepEnd end) {
    return std::count_if(outcomes->begin(), outcomes->end(),
                         [&](const auto& outcome) { return outcome.second.end == end; });
  };
  if (const auto failed = count(SweepEnd::kFailed); failed > 0)
    print_stderr("{} of {} runs failed: {} says why, the same command tries them again\n", failed, outcomes->size(),
                 (planned->out / "sweep.json").string());
  if (const auto not_run = count(SweepEnd::kNotRun); not_run > 0)
    print_stderr("stopped with {} of {} runs to go; the same command goes on\n", not_run, outcomes->size());
  return count(SweepEnd::kFailed) + count(SweepEnd::kNotRun) > 0 ? 1 : 0;
}

}  // namespace

void add_sweep(Verb& program, int& exit_code, const std::string& version) {
  auto* verb = program.add_verb("sweep", "Run a file with several values of some keys and compare the results");
  auto args = std::make_shared<Arguments>();
  verb->add_option("config", args->config,
                   "run file, or scenario of `echoline sim run`; its section `sweep` can list the values")
      ->required();
  verb->add_option("--over", args->over,
                   "KEY=V1,V2,...: a key and its values; each combination of the keys' values is a cell")
      ->one_value_each();
  verb->add_option("--seeds", args->seeds, "runs per cell; their seeds count up from the seed of the file")
      ->range(1u, unsigned(kSweepSeedsMax));
  verb->add_flag("--real", args->real, "run with `echoline up`");
  verb->add_flag("--sim", args->simulated,
                 "run with `echoline sim run`; default for a file with a section `simulation`");
  verb->add_option("--jobs", args->jobs, "runs at a time; default: one real run, or one simulated run for each core")
      ->range(1u, 1024u);
  verb->add_option("--limit", args->limit, "time limit of a run")->show_default();
  verb->add_option("--measure", args->measures, "another field of the report to compare, such as fleet.workers_lost")
      ->one_value_each();
  verb->add_option("-o,--out", args->out,
                   "folder of the results; default: sweeps/<name of the file>, with a number added if another file "
                   "uses that folder");
  verb->add_flag("--json", args->json, "print sweep.json instead of the table");
  verb->footer(
      "Values are written as in a run file. 1..5 is a range, and an expression can use other swept keys. S, kappa and "
      "G are short for staleness.budget, staleness.publish_every and rollout.group_size.\n"
      "The same command continues after Ctrl-C or a crash: complete runs are not repeated. The folder contains "
      "sweep.html, sweep.csv and sweep.json (docs/sweeps.md).");
  verb->callback([args, version, &exit_code] { exit_code = sweep(*args, version); });
}

}  // namespace echoline::cli
