// echoline status, echoline report: how a run stands, and what it did.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "cli/live_table.hpp"
#include "cli/output.hpp"
#include "cli/plot.hpp"
#include "cli/verbs.hpp"
#include "learner/report.hpp"
#include "learner/run_record.hpp"

namespace echoline::cli {
namespace {

struct Arguments {
  std::string run, svg;
  bool json = false;
};

int status(const Arguments& a) {
  const auto folder = find_run(a.run);
  if (!folder) return complain("status", folder.error());
  auto object = read_json_object(*folder / "status.json");
  if (!object) return complain("status", object.error());
  const bool running = is_running(*folder);
  if (a.json) {
    (*object)["running"] = running;
    fmt::print("{}\n", object->dump(2));
    return 0;
  }
  fmt::print("{} ({})\n", folder->string(), running ? "running" : "not running");
  const std::size_t columns = screen_of(stdout).value_or(Screen{100, 0}).columns;
  for (const std::string& line : status_lines(*object, {columns, 1u << 20})) fmt::print("{}\n", line);
  const std::string phase = object->value("phase", "");
  if (!running && phase != "completed" && phase != "interrupted")
    fmt::print("its learner ended before the run did; go on with: {}\n",
               resume_command((*folder / "config.yaml").string(), {}));
  return 0;
}

Status write_plot(const std::filesystem::path& folder, const std::string& file) {
  ECHO_ASSIGN(const auto metrics, learner::read_json_lines(folder / "metrics.jsonl"));
  return write_file_atomic(file, run_svg(folder.filename().string(), metrics));
}

int report(const Arguments& a) {
  const auto folder = find_run(a.run);
  if (!folder) return complain("report", folder.error());
  if (!a.svg.empty()) {
    const Status written = write_plot(*folder, a.svg);
    return written ? 0 : complain("report", written.error());
  }
  const auto object = read_json_object(*folder / "report.json");
  if (!object && object.error().code == Code::kNotFound)
    return complain("report", fail(Code::kNotFound, "",
                                   "{} has no report yet: it is written when a run ends. See "
                                   "`echoline status`",
                                   folder->string()));
  if (!object) return complain("report", object.error());
  if (a.json)
    fmt::print("{}\n", object->dump(2));
  else
    fmt::print("{}", learner::report_text(*object));
  return 0;
}

}  // namespace

void add_status(Verb& app, int& exit) {
  auto* verb = app.add_verb("status", "Show how a run stands");
  auto a = std::make_shared<Arguments>();
  verb->add_option("run", a->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_flag("--json", a->json, "print JSON");
  verb->callback([a, &exit] { exit = status(*a); });
}

void add_report(Verb& app, int& exit) {
  auto* verb = app.add_verb("report", "Show what a run did and cost");
  auto a = std::make_shared<Arguments>();
  verb->add_option("run", a->run, "name or folder of the run; default: the newest below ./runs");
  verb->add_flag("--json", a->json, "print report.json");
  verb->add_option("--svg", a->svg, "draw the run into this SVG file instead; works while it runs, too");
  verb->callback([a, &exit] { exit = report(*a); });
}

}  // namespace echoline::cli
