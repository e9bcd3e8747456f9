// echoline up: starts the learner of a run, shows its progress and ends with the report.
#include "cli/up.hpp"

#include <sys/stat.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/child_process.hpp"
#include "base/clock.hpp"
#include "base/files.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/signals.hpp"
#include "cli/verbs.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/report.hpp"
#include "learner/run_config.hpp"
#include "learner/run_record.hpp"

namespace echoline::cli {
namespace {

constexpr Duration kRedrawInterval = std::chrono::milliseconds(250);

}  // namespace

std::string next_step_advice(const std::filesystem::path& folder, const std::string& config,
                             const std::vector<std::string>& overrides, const std::string& restart_command) {
  const std::string resume = resume_command(config, overrides);
  if (learner::find_policy(folder / "checkpoints")) return "go on with: " + resume;
  const std::string without_resume = resume.substr(0, resume.rfind(' '));  // --resume is its last word
  return "the run has no checkpoint to go on from; start it again with: " +
         (restart_command.empty() ? without_resume : restart_command);
}

int run_up(const UpArguments& args) {
  const std::atomic<bool>& stop = stop_on_signals();
  const auto overrides = parse_overrides(args.overrides);
  const auto report_failure = [](const Error& error) { return report_error("up", error); };
  if (!overrides) return report_failure(overrides.error());
  const auto config = learner::load_run_config(args.config, *overrides);
  if (!config) return report_failure(config.error());

  // The learner checks the run and plans. It prints its plan before it rents machines.
  std::vector<std::string> argv{own_program().string(), "learner", args.config};
  for (const std::string& text : args.overrides) argv.insert(argv.end(), {"--set", text});
  if (!args.plan.empty()) argv.insert(argv.end(), {"--plan", args.plan});
  if (args.resume) argv.emplace_back("--resume");
  if (args.json) argv.emplace_back("--json");  // the learner prints the report or the errors to this program's stdout
  auto child = ChildProcess::start(argv, /*shares_stdout=*/args.json);
  if (!child) return report_failure(child.error());

  const SystemClock clock;
  LiveTable table;
  const std::filesystem::path folder = config->run_folder();
  const double started_unix_s = clock.unix_seconds();
  // Files of an earlier run do not count. The kernel stamps files with the time of its last clock tick.
  const auto written_since_start = [&](const std::filesystem::path& path) {
    constexpr double kTickSecondsMax = 0.02;
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return false;
    const double written_unix_s =
        static_cast<double>(info.st_mtim.tv_sec) + static_cast<double>(info.st_mtim.tv_nsec) / 1e9;
    return written_unix_s + kTickSecondsMax >= started_unix_s;
  };
  bool stop_sent = false;
  std::optional<ProcessEnd> end;
  while (!end) {
    end = child->pump(kRedrawInterval, [&](const std::string& line) { table.print(line); });
    if (stop && !stop_sent) {
      stop_sent = true;
      table.print("stopping: finishing the step, writing a checkpoint and the report, returning the fleet");
      child->signal(SIGTERM);
    }
    if (!written_since_start(folder / "status.json")) continue;
    const auto text = read_file(folder / "status.json");
    const auto status = text ? nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false) : nlohmann::json();
    if (status.is_object()) table.show(status, clock.now());
  }
  table.finish();

  const auto advice = [&] { return next_step_advice(folder, args.config, args.overrides, args.restart_command); };
  if (end->signal)
    return report_failure(fail(Code::kUnavailable, "", "the learner was ended by signal {} ({}); {}", *end->signal,
                               ::strsignal(*end->signal), advice()));
  const std::filesystem::path report_file = folder / "report.json";
  if (!written_since_start(report_file))
    return *end->status == 0 ? 1 : *end->status;  // the learner has given the reason on stderr
  const auto report = learner::read_json_object(report_file);
  if (!report) return report_failure(report.error());
  if (!args.json) fmt::print("\n{}\nreport: {}\n", learner::report_text(*report), report_file.string());
  if (stop_sent) print_stderr("stopped; {}\n", advice());
  return *end->status;
}

void add_up(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("up", "Plan, rent, train and report: the whole run, with a live table");
  auto args = std::make_shared<UpArguments>();
  verb->add_option("config", args->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", args->overrides, "override a key of the run file, e.g. --set run.steps=50")
      ->one_value_each();
  verb->add_flag("--resume", args->resume, "continue from the last checkpoint of this run");
  verb->add_flag("--json", args->json, "print the report as JSON");
  verb->footer(
      "Ctrl-C finishes the step, writes a checkpoint and the report, and returns the fleet; a second one ends at "
      "once.\n"
      "All files are written into <run.folder>/<run.name>/; an earlier run of that name is moved and kept.");
  verb->callback([args, &exit_code] { exit_code = run_up(*args); });
}

}  // namespace echoline::cli
