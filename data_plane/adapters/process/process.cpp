// The task "process": a user's program in any language. It supplies problems to the learner, and scores responses or
// plays episodes on the workers, in a sandbox, over JSON Lines (FORMAT.md). The run sends a script to the workers.
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/process/python_helper.hpp"
#include "data_plane/adapters/process/task.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::string_view kFolder = "/task/";                                // where the script is in the sandbox
constexpr std::uint64_t kFileBytesMax = 1u << 20, kFilesBytesMax = 4u << 20;  // of one file, and of all together
constexpr std::size_t kFilesMax = 64, kNameBytesShown = 80;                   // the latter in an error

struct Options {
  std::filesystem::path script;      // on the learner only: workers get the text in contents_json
  std::vector<std::string> files;    // names beside the script
  std::vector<std::string> command;  // runs the script; empty: Python
  std::string contents_json = "{}";  // the worker's script and files, from worker_options()
  process::TaskOptions task;

  void read(ConfigSection s, AdapterUse use) {
    if (use == AdapterUse::kProblems)
      s.read("script", script,
             {"the program's file; the run sends it to the workers", "the command is a program that the workers have"});
    else
      contents_json = s.json("contents", "contents of the files");
    s.read("files", files, {"more text files to send with it, by their names beside it", "none"});
    s.read("command", command,
           {"the command that runs it, with arguments before the script's name", "`[/usr/bin/python3]` for a script"});
    task.read(s);
    if (use == AdapterUse::kProblems && script.empty() && command.empty())
      s.error("script", "expected a script, or a command that every machine has");
    if (script.empty() && !files.empty() && use == AdapterUse::kProblems)
      s.error("files", "files need a script: set script too");
    if (files.size() > kFilesMax)
      s.error("files", fmt::format("expected at most {} names, found {}", kFilesMax, files.size()));
    for (const std::string& name : files)
      if (name.empty() || name.front() == '/' || name.find("..") != std::string::npos)
        s.error("files",
                fmt::format("expected names beside or below the script, found '{}'", name.substr(0, kNameBytesShown)));
    if (!command.empty() && !command.front().starts_with('/'))
      s.error("command", fmt::format("expected a program by its absolute path, found '{}'",
                                     command.front().substr(0, kNameBytesShown)));
  }
};

// The script and its further files, name to text.
struct Contents {
  std::map<std::string, std::string> files;
  std::string script;  // the script's name; empty: no script
};

// The text is invalid if dropping its invalid bytes and replacing them give different JSON.
bool is_utf8(const std::string& text) {
  const auto dump = [&](json::error_handler_t on_invalid_byte) {
    return json(text).dump(-1, ' ', /*ensure_ascii=*/false, on_invalid_byte);
  };
  return dump(json::error_handler_t::ignore) == dump(json::error_handler_t::replace);
}

Result<Contents> read_contents(const Options& options) {
  Contents contents;
  if (options.script.empty()) return contents;
  contents.script = options.script.filename().string();
  std::vector<std::string> names = options.files;
  names.push_back(contents.script);
  std::uint64_t total_bytes = 0;
  for (const std::string& name : names) {
    const std::filesystem::path path = options.script.parent_path() / name;
    auto text = read_file(path.string(), kFileBytesMax);
    if (!text) return as_user_error(std::move(text).error());
    if (!is_utf8(*text))  // it is sent as JSON, which must be UTF-8
      return fail(Code::kInvalid, "task", "{}: expected a text in UTF-8", path.string());
    total_bytes += text->size();
    if (total_bytes > kFilesBytesMax)
      return fail(Code::kInvalid, "task", "the files of '{}' have more than {} together", options.script.string(),
                  to_text(Bytes{kFilesBytesMax}));
    contents.files[name] = *std::move(text);
  }
  return contents;
}

// Reads the option `contents` that worker_options() wrote.
Result<Contents> parse_contents(const std::string& text) {
  const json parts = json::parse(text, nullptr, /*allow_exceptions=*/false);
  Contents contents;
  // Without a script, as in the default "{}", the command is a program that the worker has.
  if (!parts.is_object() || !parts.contains("files") || !parts["files"].is_object()) return contents;
  for (const auto& [name, file] : parts["files"].items()) {
    // Checked again, because a worker does not trust the learner's names. The script counts beside kFilesMax files.
    if (!file.is_string() || name.empty() || name.front() == '/' || name.find("..") != std::string::npos ||
        contents.files.size() == kFilesMax + 1)
      return fail(Code::kInvalid, "task", "'{}' cannot be a file of a task", name.substr(0, kNameBytesShown));
    contents.files[name] = file.get<std::string>();
  }
  if (parts.contains("script") && parts["script"].is_string()) contents.script = parts["script"].get<std::string>();
  return contents;
}

sandbox::Command command_of(const Options& options, const Contents& contents) {
  sandbox::Command command;
  command.argv = options.command.empty() ? std::vector<std::string>{"/usr/bin/python3"} : options.command;
  if (!contents.script.empty()) command.argv.push_back(std::string(kFolder) + contents.script);
  for (const auto& [name, text] : contents.files) command.files[std::string(kFolder) + name] = text;
  command.files[std::string(kFolder) + "echoline_task.py"] = std::string(process::kPythonHelper);
  command.environment = {{"PYTHONPATH", std::string(kFolder.substr(0, kFolder.size() - 1))},
                         {"PYTHONUNBUFFERED", "1"},  // so that each answer leaves the program at once
                         {"PYTHONDONTWRITEBYTECODE", "1"},
                         {"PYTHONHASHSEED", "0"}};  // the same order of sets on every machine, for equal scores
  return command;
}

// The options for workers, with the files' contents instead of their paths.
std::string worker_options(std::string_view options_json, const Contents& contents) {
  json options = json::parse(options_json, nullptr, /*allow_exceptions=*/false);
  if (!options.is_object()) options = json::object();
  options.erase("script");
  options["contents"] = {{"script", contents.script}, {"files", contents.files}};
  return options.dump();
}

Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("process", options_json, use));
  ECHO_ASSIGN(Contents contents,
              use == AdapterUse::kProblems ? read_contents(options) : parse_contents(options.contents_json));
  return process::make_task("process", command_of(options, contents), options.task,
                            worker_options(options_json, contents), seed, use);
}

}  // namespace

const BuiltIn kProcess{.name = "process",
                       .meaning = "A program of your own, in any language (docs/how-to/write-a-task.md)",
                       .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                       .make = make};

}  // namespace echoline::data_plane
