// echoline adapter new: writes a first version of the user's own task and a run file for it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "cli/adapter_verbs.hpp"
#include "cli/c_task.hpp"
#include "cli/output.hpp"
#include "cli/verbs.hpp"

namespace echoline::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "adapter new";

struct Arguments {
  std::string name, folder = ".";
  bool python = false, c = false, turns = false, as_json = false;
};

// The texts of the new files. files_to_write() replaces the words in braces that it lists, such as {name}; other braces
// are part of the file.
constexpr std::string_view kPythonTask =
    R"("""{name}: a task for echoline. Try it with: echoline adapter check {name}.yaml"""
import echoline_task as task

# Fields for score() beside the prompt: reference (a text), metadata (any JSON value).
PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a in range(20) for b in range(20)]


@task.score
def score(problem, response):
    """Returns the reward of a response, which may be any text. An exception counts as an error of the task."""
    right = response.strip() == problem["reference"]
    number = response.strip().isdecimal()
    return {"reward": 1.0 if right else 0.0, "components": {"number": float(number)}, "correct": right}


# The held-out problems (evaluation) must not be among the training problems.
task.run(problems=PROBLEMS[40:], evaluation=PROBLEMS[:40], name="{name}")
)";

constexpr std::string_view kPythonTaskOfSeveralTurns =
    R"("""{name}: a task of several turns for echoline. Try it with: echoline adapter check {name}.yaml"""
import echoline_task as task

# The policy guesses a number between low and low + 9. After each guess the task answers + (the number is higher),
# - (it is lower) or ? (no number).
PROBLEMS = [{"prompt": f"{low}-{low + 9}=", "reference": str(low + n)} for low in range(40) for n in range(10)]


class Episode:
    """One episode of a problem. It takes all random numbers from `seed`, so that it can be repeated."""

    def __init__(self, problem, seed, settings):
        self.wanted, self.left = int(problem["reference"]), 4

    def step(self, response):
        """Returns the result of a response, which may be any text."""
        self.left -= 1
        text = response.strip()
        guess = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
        right = guess == self.wanted
        hint = "?" if guess is None else "+" if guess < self.wanted else "-"
        return {"reward": 1.0 if right else 0.0, "correct": right, "done": right or self.left == 0, "observation": hint}


task.run(episode=Episode, problems=PROBLEMS[40:], evaluation=PROBLEMS[:40], name="{name}")
)";

constexpr std::string_view kRunFile =
    R"(# A run of the task in {script}. `echoline config reference --yaml` has every key.
run: {name: {name}, seed: 1, steps: 20}
model: {preset: tiny-64}         # path: a Hugging Face directory instead
task:
  adapter: {adapter}
  options:
{options}
    # deadline: 30 s             # for each answer of the task's process
rollout: {prompts_per_step: 16, group_size: 8, response_tokens_max: {limits}}
staleness: {budget: 3}
fleet: {offers: {name}.offers.json, provider: local, step_time_expected: 1 s}
)";

constexpr std::string_view kPythonOptions =
    R"(    script: {name}.py            # sent to the workers together with `files`
    # settings: {level: 1}       # the task reads them as echoline_task.settings)";
constexpr std::string_view kCOptions =
    R"(    library: {name}.so           # sent to the workers, which need the same architecture
    settings: {largest: 99}      # an argument of open_task())";

// Replacements in examples/sums_task.c, which names the files of echoline's sources, for the user's folder.
const std::vector<std::pair<std::string, std::string>> kExampleReplacements = {
    {"-I clients/c -o libsums.so examples/sums_task.c", "-o {name}.so {name}.c"},
    {"library: libsums.so", "library: {name}.so"},
    {"\"sums\"", "\"{name}\""}};

// One offer: this computer as a local worker, with placeholder figures.
constexpr std::string_view kOffers =
    R"({"schema_version": 1, "offers": [
  {"id": "here", "provider": "local", "host": "here", "gpu": "none", "gpu_count": 1, "vram_gb": 8, )"
    R"("up_mbit_per_s": 100, "down_mbit_per_s": 100,
   "reliability": 0.99, "duration_days_max": 1, "rollouts_per_s": 500, "rollouts_source": "profile", )"
    R"("gpu_usd_per_hour": 0.01,
   "storage_usd_per_hour": 0, "upload_usd_per_gb": 0, "download_usd_per_gb": 0}
]}
)";

using Replacements = std::vector<std::pair<std::string, std::string>>;  // a word and its new text, in order

std::string with_replacements(std::string_view text, const Replacements& replacements) {
  std::string replaced(text);
  for (const auto& [word, new_text] : replacements)
    for (std::size_t position = 0; (position = replaced.find(word, position)) != std::string::npos;
         position += new_text.size())
      replaced.replace(position, word.size(), new_text);
  return replaced;
}

struct NewFile {
  fs::path path;
  std::string text;
};

// The task, its run file and its offers, in this order.
std::vector<NewFile> files_to_write(const Arguments& args) {
  const std::string source = args.name + (args.c ? ".c" : ".py");
  const auto fill_in = [&](std::string_view text) {
    return with_replacements(text, {{"{options}", std::string(args.c ? kCOptions : kPythonOptions)},
                                    {"{adapter}", args.c ? "library" : "process"},
                                    {"{script}", source},
                                    {"{limits}", args.turns ? "32, turn_tokens_max: 4" : "6"},
                                    {"{name}", args.name}});
  };
  const fs::path folder = args.folder;
  const std::string example = args.c ? with_replacements(kCExample, kExampleReplacements)
                                     : std::string(args.turns ? kPythonTaskOfSeveralTurns : kPythonTask);
  std::vector<NewFile> files = {{folder / source, fill_in(example)},
                                {folder / (args.name + ".yaml"), fill_in(kRunFile)},
                                {folder / (args.name + ".offers.json"), std::string(kOffers)}};
  if (args.c) files.push_back({folder / "echoline_task.h", std::string(kCHeader)});
  return files;
}

constexpr std::size_t kNameBytesMax = 64;

bool is_usable_name(const std::string& name) {
  return !name.empty() && name.size() <= kNameBytesMax && name.front() >= 'a' && name.front() <= 'z' &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string::npos;
}

// Creates a file. kInvalid if it exists.
Status write_new_file(const NewFile& file) {
  const int fd = ::open(file.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0)
    return fail(errno == EEXIST ? Code::kInvalid : Code::kIo, "", "{}: {}", file.path.string(), std::strerror(errno));
  const bool is_written = ::write(fd, file.text.data(), file.text.size()) == static_cast<ssize_t>(file.text.size());
  const int write_errno = errno;
  const bool is_closed = ::close(fd) == 0;
  if (is_written && is_closed) return ok();
  return fail(Code::kIo, "", "{}: {}", file.path.string(), std::strerror(is_written ? errno : write_errno));
}

Status create_task(const Arguments& args) {
  if (!is_usable_name(args.name))
    return fail(Code::kInvalid, "",
                "expected a name that begins with a letter and has only lowercase letters, digits, '_' and '-', such "
                "as sums; found '{}'",
                args.name.substr(0, 80));
  if (args.python == args.c)
    return fail(Code::kInvalid, "", "expected --python or --c, found {}", args.c ? "both" : "neither");
  if (args.c && args.turns)
    return fail(Code::kInvalid, "",
                "--turns is only for --python; echoline_task.h describes libraries with several turns");
  const std::vector<NewFile> files = files_to_write(args);
  std::string existing;
  std::error_code ignored;
  for (const NewFile& file : files)
    if (fs::exists(fs::symlink_status(file.path, ignored)))
      existing += (existing.empty() ? "" : ", ") + file.path.string();
  if (!existing.empty())
    return fail(Code::kInvalid, "", "{} exists and is not replaced; choose another name or --dir", existing);
  ECHO_TRY(make_folders(args.folder));
  nlohmann::json names = nlohmann::json::array();
  for (const NewFile& file : files) {
    ECHO_TRY(write_new_file(file));
    names.push_back(file.path.string());
    if (!args.as_json) fmt::print("{}\n", file.path.string());
  }
  if (args.as_json)
    fmt::print("{}\n", nlohmann::json{{"schema_version", 1}, {"files", names}}.dump(
                           2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace));
  const std::string run_file = shell_word(files[1].path.string());
  if (args.c)
    print_stderr("first: cc -shared -fPIC -O2 -o {} {}\n",
                 shell_word((fs::path(args.folder) / (args.name + ".so")).string()),
                 shell_word(files[0].path.string()));
  print_stderr("next: echoline adapter check {0}\n      echoline adapter play {0}\n      echoline up {0}\n", run_file);
  return ok();
}

}  // namespace

void add_adapter_new(Verb& adapter, int& exit_code) {
  auto* verb = adapter.add_verb("new", "Write a first version of your own task and a run file for it");
  auto args = std::make_shared<Arguments>();
  verb->add_option("name", args->name, "name of the task and its files")->required();
  verb->add_flag("--python", args->python, "write the task in Python, with echoline_task");
  verb->add_flag("--c", args->c, "write the task in C, as a shared library");
  verb->add_flag("--turns", args->turns, "write a task with several turns per episode");
  verb->add_option("--dir", args->folder, "where the files go")->show_default();
  verb->add_flag("--json", args->as_json, "print the names of the files as JSON");
  verb->footer("Existing files are never replaced.");
  verb->callback([args, &exit_code] {
    const Status done = create_task(*args);
    exit_code = done ? 0 : report_error(kOperation, done.error());
  });
}

}  // namespace echoline::cli
