// Functions that many subcommands use: errors, --set, and the folder of a run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "cli/json_errors.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {

std::filesystem::path own_program() {
  // `echoline bundle` packs the program with its libraries. The bundle's launcher starts it through the packed dynamic
  // loader, which /proc/self/exe then names, and sets this variable to the program's path.
  const char* bundled_program = std::getenv("ECHOLINE_PROGRAM");
  return bundled_program ? std::filesystem::path(bundled_program) : std::filesystem::read_symlink("/proc/self/exe");
}

namespace {

bool json_errors_enabled = false;

}  // namespace

void set_json_errors(bool enabled) { json_errors_enabled = enabled; }

int report_error(std::string_view verb, const Error& error) {
  print_error_if_json(error);
  print_stderr("echoline{}{}: {}\n", verb.empty() ? "" : " ", verb, error.message());
  return exit_code(error.code);
}

void print_error_if_json(const Error& error) {
  if (!json_errors_enabled) return;
  nlohmann::json problems = nlohmann::json::array();  // one for each line of the message
  const std::string message = error.message();
  for (std::size_t start = 0; start < message.size();) {
    const std::size_t end = std::min(message.find('\n', start), message.size());
    problems.push_back(message.substr(start, end - start));
    start = end + 1;
  }
  nlohmann::json object = {{"schema_version", 2}, {"error", {{"code", to_string(error.code)}, {"problems", problems}}}};
  // A plan's JSON has "feasible" too, so a script tests one key whether planning succeeds or not.
  if (error.code == Code::kInfeasible) object["feasible"] = false;
  // The message may contain a path that is not UTF-8.
  fmt::print("{}\n", object.dump(2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace));
}

Result<std::vector<std::pair<std::string, std::string>>> parse_overrides(const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> overrides;
  for (const std::string& text : texts) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      return fail(Code::kInvalid, "--set", "expected key=value such as run.steps=50, found '{}'", text);
    overrides.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return overrides;
}

Result<std::filesystem::path> find_run(const std::string& name_or_path) {
  namespace fs = std::filesystem;
  const auto is_run = [](const fs::path& folder) {
    return fs::exists(folder / "status.json") || fs::exists(folder / "report.json") ||
           fs::exists(folder / "metrics.jsonl");
  };
  if (!name_or_path.empty()) {
    for (const fs::path& folder : {fs::path(name_or_path), fs::path("runs") / name_or_path})
      if (is_run(folder)) return folder;
    return fail(Code::kInvalid, "find run", "neither '{}' nor 'runs/{}' is the folder of a run", name_or_path,
                name_or_path);
  }
  std::optional<fs::path> newest;
  std::error_code ignored;  // without a folder ./runs there is no run
  for (const fs::directory_entry& entry : fs::directory_iterator("runs", ignored)) {
    if (!entry.is_directory() || !is_run(entry.path())) continue;
    if (!newest || entry.last_write_time() > fs::last_write_time(*newest)) newest = entry.path();
  }
  if (!newest)
    return fail(Code::kInvalid, "find run", "no run below ./runs; name one, or start one with `echoline up`");
  return *newest;
}

}  // namespace echoline::cli
