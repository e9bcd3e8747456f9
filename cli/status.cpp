// echoline status: shows the state of a run. echoline report: shows its results and cost.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/plot.hpp"
#include "cli/up.hpp"
#include "cli/verbs.hpp"
#include "learner/report.hpp"
#include "learner/run_record.hpp"
#include "pages/run_page.hpp"
#include "study/run_rows.hpp"
#include "study/sim_run_report.hpp"

namespace echoline::cli {
namespace {

using namespace study;
using namespace pages;

struct Arguments {
  std::string run, svg;
  std::optional<std::string> html;
  bool json = false, dot = false;
};

int status(const Arguments& args) {
  const auto folder = find_run(args.run);
  if (!folder) return report_error("status", folder.error());
  if (args.dot) {
    const auto drawing = read_file(*folder / "topology.dot");
    if (!drawing) return report_error("status", drawing.error());
    fmt::print("{}", *drawing);
    return 0;
  }
  auto object = learner::read_json_object(*folder / "status.json");
  if (!object) return report_error("status", object.error());
  const bool running = learner::is_running(*folder);
  if (args.json) {
    (*object)["running"] = running;
    fmt::print("{}\n", object->dump(2));
    return 0;
  }
  fmt::print("{} ({})\n", folder->string(), running ? "running" : "not running");
  constexpr std::size_t kColumnsWithoutTerminal = 100, kAllRows = 1u << 20;
  const std::size_t columns = screen_columns().value_or(kColumnsWithoutTerminal);
  for (const std::string& line : status_lines(*object, {.columns = columns, .rows = kAllRows}))
    fmt::print("{}\n", line);
  const std::string phase = object->value("phase", "");
  if (!running && phase != "completed" && phase != "interrupted")
    fmt::print("the learner ended before the run was complete; {}\n",
               next_step_advice(*folder, (*folder / "config.yaml").string(), {}));
  return 0;
}

Status write_plot(const std::filesystem::path& folder, const std::string& file) {
  ECHO_ASSIGN(const auto metrics, plotted_rows(folder / "metrics.jsonl"));
  return write_file_atomic(file, run_svg(folder.filename().string(), metrics));
}

// Writes the run's HTML page. Works while the run goes on: parts that do not exist yet are left out (last_events()
// returns no rows then).
Result<std::filesystem::path> write_page(const std::filesystem::path& folder, const std::string& file) {
  RunFiles run;
  run.name = std::filesystem::absolute(folder).lexically_normal().filename().string();
  auto report = learner::read_json_object(folder / "report.json");
  if (report)
    run.report = *std::move(report);
  else if (report.error().code != Code::kNotFound)
    return std::move(report).error();
  auto metrics = plotted_rows(folder / "metrics.jsonl");
  if (metrics)
    run.metrics = *std::move(metrics);
  else if (metrics.error().code != Code::kNotFound)
    return std::move(metrics).error();
  ECHO_ASSIGN(LastEvents events, last_events(folder / "events.jsonl"));
  run.events = std::move(events.rows);
  run.events_left_out = events.left_out;
  run.first_event_unix_s = events.first_unix_s;
  return write_run_page(run, file, folder);
}

int report(const Arguments& args) {
  const auto folder = find_run(args.run);
  if (!folder) return report_error("report", folder.error());
  if (args.html) {
    const auto written = write_page(*folder, *args.html);
    if (!written) return report_error("report", written.error());
    fmt::print("{}\n", written->string());
    return 0;
  }
  if (!args.svg.empty()) {
    const Status written = write_plot(*folder, args.svg);
    return written ? 0 : report_error("report", written.error());
  }
  const auto object = learner::read_json_object(*folder / "report.json");
  if (!object && object.error().code == Code::kNotFound)
    return report_error("report", fail(Code::kNotFound, "",
                                       "{} has no report yet; it is written when the run ends. See "
                                       "`echoline status`",
                                       folder->string()));
  if (!object) return report_error("report", object.error());
  if (args.json)
    fmt::print("{}\n", object->dump(2));
  else
    fmt::print("{}", object->contains("simulation") ? sim_run_table(*object) : learner::report_text(*object));
  return 0;
}

}  // namespace

void add_status(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("status", "Show the state of a run");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_flag("--json", args->json, "print JSON");
  verb->add_flag("--dot", args->dot,
                 "print which node sends to which, for Graphviz: echoline status --dot | dot -Tsvg > topology.svg");
  verb->callback([args, &exit_code] { exit_code = status(*args); });
}

void add_report(Verb& program, int& exit_code) {
  auto* verb = program.add_verb("report", "Show what a run did and cost");
  auto args = std::make_shared<Arguments>();
  verb->add_option("run", args->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_flag("--json", args->json, "print report.json");
  verb->add_option("--svg", args->svg, "draw the run into this SVG file instead; also while it is running");
  verb->add_option("--html", args->html,
                   "write the run as a self-contained HTML page into this file; default: report.html in its folder")
      ->value_count(0, 1);
  verb->callback([args, &exit_code] { exit_code = report(*args); });
}

}  // namespace echoline::cli
