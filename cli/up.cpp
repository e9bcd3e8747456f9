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

constexpr Duration kRedraw = std::chrono::milliseconds(250);

}  // namespace

std::string next_command(const std::filesystem::path& folder, const std::string& config,
                         const std::vector<std::string>& overrides, const std::string& again) {
  const std::string resume = resume_command(config, overrides);
  if (learner::find_policy(folder / "checkpoints")) return "go on with: " + resume;
  // The last word of `resume` is --resume.
  return "it has no checkpoint to go on from; start it again with: " +
         (again.empty() ? resume.substr(0, resume.rfind(' ')) : again);
}

int run_up(const UpArguments& a) {
  const std::atomic<bool>& stop = stop_on_signals();
  const auto overrides = parse_overrides(a.overrides);
  const auto refuse = [](const Error& error) { return complain("up", error); };
  if (!overrides) return refuse(overrides.error());
  const auto config = learner::load_run_config(a.config, *overrides);
  if (!config) return refuse(config.error());

  // The learner checks the run and plans. It first prints the plan that it rents by.
  std::vector<std::string> argv{own_program().string(), "learner", a.config};
  for (const std::string& text : a.overrides) argv.insert(argv.end(), {"--set", text});
  if (!a.plan.empty()) argv.insert(argv.end(), {"--plan", a.plan});
  if (a.resume) argv.emplace_back("--resume");
  if (a.json) argv.emplace_back("--json");  // the learner prints the report or the errors to our stdout
  auto child = ChildProcess::start(argv, a.json);
  if (!child) return complain("up", child.error());

  const SystemClock clock;
  LiveTable table;
  const std::filesystem::path folder = config->run_folder();
  const double started = clock.unix_seconds();
  const auto fresh = [&](const std::filesystem::path& path) {  // written since this process started
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 && static_cast<double>(info.st_mtim.tv_sec) + 1 >= started;
  };
  bool asked = false;
  std::optional<ProcessEnd> end;
  while (!end) {
    end = child->pump(kRedraw, [&](const std::string& line) { table.print(line); });
    if (stop && !asked) {
      asked = true;
      table.print("stopping: finishing the step, writing a checkpoint and the report, returning the fleet");
      child->signal(SIGTERM);
    }
    if (!fresh(folder / "status.json")) continue;
    const auto text = read_file(folder / "status.json");
    const auto status = text ? nlohmann::json::parse(*text, nullptr, false) : nlohmann::json();
    if (status.is_object()) table.show(status, clock.now());
  }
  table.finish();

  const auto next = [&] { return next_command(folder, a.config, a.overrides, a.again); };
  if (end->signal)
    return refuse(fail(Code::kUnavailable, "", "the learner was ended by signal {} ({}); {}", *end->signal,
                       ::strsignal(*end->signal), next()));
  const std::filesystem::path path = folder / "report.json";
  if (!fresh(path)) return *end->status == 0 ? 1 : *end->status;  // the learner has given the reason on stderr
  const auto report = learner::read_json_object(path);
  if (!report) return complain("up", report.error());
  if (!a.json) fmt::print("\n{}\nreport: {}\n", learner::report_text(*report), path.string());
  if (asked) say("stopped; {}\n", next());
  return *end->status;
}

void add_up(Verb& app, int& exit) {
  auto* verb = app.add_verb("up", "Plan, rent, train and report: the whole run, with a live table");
  auto a = std::make_shared<UpArguments>();
  verb->add_option("config", a->config, "run file, e.g. configs/quickstart.yaml")->required();
  verb->add_option("--set", a->overrides, "override a key of the run file, e.g. --set run.steps=50")->one_value_each();
  verb->add_flag("--resume", a->resume, "continue from the last checkpoint of this run");
  verb->add_flag("--json", a->json, "print the report as JSON");
  verb->footer(
      "Ctrl-C finishes the step, writes a checkpoint and the report, and returns the fleet; a second one ends at "
      "once.\n"
      "All files are written into <run.folder>/<run.name>/; an earlier run of that name is moved and kept.");
  verb->callback([a, &exit] { exit = run_up(*a); });
}

}  // namespace echoline::cli
