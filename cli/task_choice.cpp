// Finds the task that a subcommand of `echoline adapter` is about.
#include "cli/task_choice.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/suggest.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/adapter.hpp"

namespace echoline::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

Result<std::uint64_t> parse_number(const std::string& text, const char* name) {
  constexpr std::size_t kDigitsMax = 19;  // always fit into 64 bits
  if (text.empty() || text.size() > kDigitsMax || text.find_first_not_of("0123456789") != std::string::npos)
    return fail(Code::kInvalid, "", "{}: expected a whole number, found '{}'", name, text);
  return std::strtoull(text.c_str(), nullptr, 10);
}

// Returns the absolute path of a program. Searches /usr/bin and /bin before PATH, because workers have these programs
// and a sandbox can read them.
Result<fs::path> find_program(const std::string& word) {
  if (word.find('/') != std::string::npos) return fs::absolute(word).lexically_normal();
  const char* path = std::getenv("PATH");
  std::istringstream folders(std::string("/usr/bin:/bin:") + (path ? path : ""));
  std::error_code ignored;
  for (std::string folder; std::getline(folders, folder, ':');)
    if (!folder.empty() && fs::is_regular_file(fs::path(folder) / word, ignored))
      return fs::absolute(fs::path(folder) / word);
  return fail(Code::kInvalid, "", "there is no program '{}' in PATH", word);
}

bool is_system_path(const fs::path& path) {
  return std::ranges::any_of(std::initializer_list<const char*>{"/usr/", "/bin/", "/lib/", "/lib64/"},
                             [&](const char* folder) { return path.string().starts_with(folder); });
}

// Adds the words of a command to the options of the adapter `process`. The last word is a script if it is a file and
// either follows other words, which are then its interpreter, or ends in .py. Otherwise all words are a program with
// its arguments.
Status add_command(const std::vector<std::string>& words, json& options) {
  if (options.contains("command") || options.contains("script"))
    return fail(Code::kInvalid, "", "expected a command or script in --options or behind --, found both");
  std::error_code ignored;
  const bool has_script =
      fs::is_regular_file(words.back(), ignored) && (words.size() > 1 || words.back().ends_with(".py"));
  if (has_script) options["script"] = fs::absolute(words.back()).lexically_normal().string();
  const std::vector<std::string> command_words(words.begin(), words.end() - (has_script ? 1 : 0));
  if (command_words.empty()) return ok();  // a script alone: the adapter chooses its interpreter
  ECHO_ASSIGN(const fs::path path, find_program(command_words.front()));
  if (!fs::exists(path, ignored)) return fail(Code::kInvalid, "", "the program {} does not exist", path.string());
  json command = json::array({path.string()});
  for (std::size_t i = 1; i < command_words.size(); ++i) command.push_back(command_words[i]);
  options["command"] = std::move(command);
  if (is_system_path(path)) return ok();  // the sandbox shows these folders to every program
  const fs::perms read_and_enter = fs::perms::others_read | fs::perms::others_exec;
  if ((fs::status(path.parent_path(), ignored).permissions() & read_and_enter) != read_and_enter)
    return fail(Code::kInvalid, "",
                "{}: the sandbox's user may not read this folder; chmod o+rx, or use a program in /usr/bin",
                path.parent_path().string());
  options["readable"].push_back(path.parent_path().string());
  return ok();
}

Result<TaskChoice> choose_by_adapter(const TaskArguments& args) {
  TaskChoice choice;
  choice.task.adapter = choice.label = args.task;
  if (!args.overrides.empty())
    return fail(Code::kInvalid, "", "--set changes keys of a run file; use --options for an adapter");
  json options = json::object();
  if (!args.options.empty()) {
    options = json::parse(args.options, nullptr, /*allow_exceptions=*/false);
    if (!options.is_object())
      return fail(Code::kInvalid, "", "--options: expected a JSON object such as '{{\"digits\": 2}}', found '{}'",
                  args.options.substr(0, 200));
  }
  if (!args.command.empty()) {
    if (args.task != "process")
      return fail(Code::kInvalid, "", "only the adapter `process` takes a program behind --, found '{}'", args.task);
    ECHO_TRY(add_command(args.command, options));
    choice.label = fmt::format("process ({})", args.command.back());
  }
  choice.task.options_json = options.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  return choice;
}

Result<TaskChoice> choose_by_run_file(const TaskArguments& args, const fs::path& path) {
  if (!args.options.empty())
    return fail(Code::kInvalid, "",
                "{} contains the options of its task; use --set task.options.NAME=VALUE to change one", path.string());
  if (!args.command.empty())
    return fail(Code::kInvalid, "", "{} names its task; only the adapter `process` takes a program behind --",
                path.string());
  ECHO_ASSIGN(const auto overrides, parse_overrides(args.overrides));
  ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(path, overrides));
  return TaskChoice{config.task, config.prompts, config.run.seed,
                    fmt::format("{} of {}", config.task.adapter, path.string())};
}

}  // namespace

void TaskArguments::add_options(Verb& verb) {
  verb.add_option("task", task, "a run file, the folder of a run, or the name of an adapter")->required();
  verb.add_option("command", command, "the task's program, behind `process --`, such as python3 task.py");
  verb.add_option("--options", options, "options of an adapter, as JSON; `echoline adapter list NAME` shows them");
  verb.add_option("--set", overrides, "override a key of the run file, e.g. --set task.options.digits=2")
      ->one_value_each();
  verb.add_option("--seed", seed, "seed of the problems (default: the run's, otherwise 1)");
}

Result<TaskChoice> choose_task(const TaskArguments& args) {
  std::error_code ignored;
  const auto names = data_plane::adapter_names();
  const bool is_adapter_name = std::ranges::find(names, args.task) != names.end();
  fs::path path = args.task;
  if (fs::is_directory(path, ignored) && !is_adapter_name) path /= "config.yaml";
  Result<TaskChoice> choice = [&]() -> Result<TaskChoice> {
    if (is_adapter_name) return choose_by_adapter(args);
    if (fs::exists(path, ignored)) return choose_by_run_file(args, path);
    return fail(Code::kInvalid, "",
                "'{}' is neither a run file nor an adapter{}; `echoline adapter list` shows the adapters", args.task,
                did_you_mean(args.task, names));
  }();
  if (choice && args.seed) {
    ECHO_ASSIGN(choice->seed, parse_number(*args.seed, "--seed"));
  }
  return choice;
}

}  // namespace echoline::cli
