// A task that is a program of the user's own, in any language: it supplies problems to the learner, and scores responses or
// plays episodes on the workers, in a sandbox, over JSON Lines (FORMAT.md). A script travels to the workers with the run.
#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>

#include "base/files.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/process/connection.hpp"
#include "data_plane/adapters/process/python_helper.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::string_view kFolder = "/task/";  // of the script inside the sandbox
constexpr std::uint64_t kFileBytesMax = 1u << 20, kFilesBytesMax = 4u << 20;
constexpr std::size_t kFilesMax = 64, kRemembered = 4096, kAhead = 64;

struct Options {
  std::filesystem::path script;
  std::vector<std::string> files, command, readable;
  std::string settings_json = "{}", contents_json = "{}";
  std::uint32_t processes = 1, batch = 64;
  Duration deadline = std::chrono::seconds(30), start_deadline = std::chrono::seconds(30);
  Bytes memory{512u << 20};
  std::uint32_t threads = 64;

  void read(ConfigSection s, AdapterUse use) {
    if (use == AdapterUse::kProblems)
      s.read("script", script, {"the program's file; it travels to the workers with the run", "the command is one that they have"});
    else
      contents_json = s.json("contents", "what the files hold");
    s.read("files", files, {"more text files that travel with it, by their names beside it", "none"});
    s.read("command", command, {"what runs it, with arguments before the script's name", "`[/usr/bin/python3]` for a script"});
    s.read("readable", readable, {"folders of the machine that it may read besides the system's, such as a virtual environment", "none"});
    settings_json = s.json("settings", "for the program, which is told them when it starts");
    s.read("processes", processes, {.min = 1, .max = 256}, "how many of it run on a worker, each with one request at a time");
    s.read("batch", batch, {.min = 1, .max = process::kItemsMax}, "the most responses in a request");
    s.read("deadline", deadline, {.min = std::chrono::milliseconds(10), .max = std::chrono::hours(1)},
           "for an answer; a program without one is ended and started anew");
    s.read("start_deadline", start_deadline, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
           "from its start to its first answer");
    s.read("memory", memory, {.min = Bytes{16u << 20}, .max = Bytes{std::uint64_t{1} << 40}}, "of a program with all processes that it starts");
    s.read("threads", threads, {.min = 1, .max = 4096}, "and processes of a program");
    if (use == AdapterUse::kProblems && script.empty() && command.empty()) s.error("script", "expected a script, or a command that every machine has");
    if (script.empty() && !files.empty() && use == AdapterUse::kProblems) s.error("files", "are beside a script: set script as well");
    if (files.size() > kFilesMax) s.error("files", fmt::format("expected at most {} names, found {}", kFilesMax, files.size()));
    for (const std::string& name : files)
      if (name.empty() || name.front() == '/' || name.find("..") != std::string::npos)
        s.error("files", fmt::format("expected names beside or below the script, found '{}'", name.substr(0, 80)));
    if (!command.empty() && !command.front().starts_with('/'))
      s.error("command", fmt::format("expected a program by its absolute path, found '{}'", command.front().substr(0, 80)));
  }
};

// name -> text, of the script and what travels with it; the script is the first of `argv`.
struct Contents {
  std::map<std::string, std::string> files;
  std::string script;  // its name; empty: there is none
};

Result<Contents> read_contents(const Options& o) {
  Contents contents;
  if (o.script.empty()) return contents;
  contents.script = o.script.filename().string();
  std::vector<std::string> names = o.files;
  names.push_back(contents.script);
  std::uint64_t all = 0;
  for (const std::string& name : names) {
    const std::filesystem::path path = o.script.parent_path() / name;
    auto text = read_file(path.string(), kFileBytesMax);
    if (!text) return as_mistake(std::move(text).error());
    // It travels as JSON, which is UTF-8.
    if (json(*text).dump(-1, ' ', false, json::error_handler_t::ignore) != json(*text).dump(-1, ' ', false, json::error_handler_t::replace))
      return fail(Code::kInvalid, "task", "{}: expected a text in UTF-8", path.string());
    all += text->size();
    if (all > kFilesBytesMax) return fail(Code::kInvalid, "task", "the files of '{}' have more than {} together", o.script.string(), to_text(Bytes{kFilesBytesMax}));
    contents.files[name] = *std::move(text);
  }
  return contents;
}

Result<Contents> contents_from(const std::string& text) {
  const json parts = json::parse(text, nullptr, false);
  Contents contents;
  if (!parts.is_object() || !parts.contains("files") || !parts["files"].is_object()) return contents;
  for (const auto& [name, file] : parts["files"].items()) {
    if (!file.is_string() || name.empty() || name.front() == '/' || name.find("..") != std::string::npos || contents.files.size() > kFilesMax)
      return fail(Code::kInvalid, "task", "a file '{}' that cannot be one of a task", name.substr(0, 80));
    contents.files[name] = file.get<std::string>();
  }
  if (parts.contains("script") && parts["script"].is_string()) contents.script = parts["script"].get<std::string>();
  return contents;
}

sandbox::Command command_of(const Options& o, const Contents& contents) {
  sandbox::Command command;
  command.argv = o.command.empty() ? std::vector<std::string>{"/usr/bin/python3"} : o.command;
  if (!contents.script.empty()) command.argv.push_back(std::string(kFolder) + contents.script);
  for (const auto& [name, text] : contents.files) command.files[std::string(kFolder) + name] = text;
  command.files[std::string(kFolder) + "echoline_task.py"] = std::string(process::kPythonHelper);
  command.environment = {{"PYTHONPATH", std::string(kFolder.substr(0, kFolder.size() - 1))}, {"PYTHONUNBUFFERED", "1"},
                         {"PYTHONDONTWRITEBYTECODE", "1"}, {"PYTHONHASHSEED", "0"}};
  for (const std::string& folder : o.readable) command.read_only.emplace_back(folder);
  command.limits.wall.reset();
  command.limits.cpu.reset();
  command.limits.memory = o.memory;
  command.limits.processes = o.threads;
  return command;
}

// The programs of a task, and who asks which.
class Programs {
 public:
  Programs(std::unique_ptr<sandbox::Pool> pool, const process::ConnectionOptions& options, std::uint32_t count) : pool_(std::move(pool)) {
    for (std::uint32_t i = 0; i < count; ++i) all_.push_back(std::make_unique<process::Connection>(*pool_, options));
  }
  process::Connection& next() { return *all_[turn_++ % all_.size()]; }
  process::Connection& first() { return *all_.front(); }
  std::uint64_t new_episode() { return ++episodes_; }

 private:
  std::unique_ptr<sandbox::Pool> pool_;
  std::vector<std::unique_ptr<process::Connection>> all_;
  std::atomic<std::uint64_t> turn_ = 0, episodes_ = 0;
};

// What outlives an episode that is destroyed while its program thinks.
struct Asked {
  std::mutex mutex;
  bool wanted = true;
  std::optional<std::uint64_t> life;
  Score cut;  // due where no room is left now
};

class ProcessEpisode final : public Episode {
 public:
  ProcessEpisode(std::shared_ptr<Programs> programs, Problem problem, std::uint64_t seed, bool turns)
      : programs_(std::move(programs)), connection_(programs_->next()), problem_(std::move(problem)), seed_(seed), turns_(turns) {}
  ~ProcessEpisode() override {
    const std::lock_guard lock(asked_->mutex);
    asked_->wanted = false;
    if (turns_ && asked_->life && !done_) connection_.close(id_, *asked_->life);
  }

  void step(std::string response, Done done) override {
    process::Connection::Call call;
    call.method = turns_ ? process::Method::kStep : process::Method::kScore;
    call.repeatable = !turns_;
    call.done = [asked = asked_, turns = turns_, over = &done_, done = std::move(done)](Result<json> item) {
      const std::lock_guard lock(asked->mutex);
      if (!asked->wanted) return;
      auto step = read(std::move(item), turns, asked->cut);
      if (step && step->done) *over = true;
      done(std::move(step));
    };
    {
      const std::lock_guard lock(asked_->mutex);
      const bool first = !asked_->life;
      call.item = turns_ ? process::step_item(id_, response, first ? &problem_ : nullptr, seed_) : process::score_item(problem_, response);
      if (turns_) {
        call.life = asked_->life;
        call.told_life = [asked = asked_](std::uint64_t life) {
          const std::lock_guard inner(asked->mutex);
          asked->life = life;
        };
      }
    }
    connection_.ask(std::move(call));
  }
  Score cut() override {
    const std::lock_guard lock(asked_->mutex);
    return asked_->cut;
  }

 private:
  static Result<Step> read(Result<json> item, bool turns, Score& cut) {
    if (!item) return std::move(item).error();
    if (turns) {
      ECHO_ASSIGN(cut, process::read_cut(*item));
      return process::read_step(*item);
    }
    ECHO_ASSIGN(Score score, process::read_score(*item));
    return Step{std::move(score), true, {}};
  }

  const std::shared_ptr<Programs> programs_;
  process::Connection& connection_;
  const Problem problem_;
  const std::uint64_t seed_;
  const bool turns_;
  const std::uint64_t id_ = programs_->new_episode();
  const std::shared_ptr<Asked> asked_ = std::make_shared<Asked>();
  bool done_ = false;  // guarded by asked_->mutex
};

class Process final : public Adapter {
 public:
  Process(std::shared_ptr<Programs> programs, process::Hello hello, std::vector<Problem> evaluation, std::string for_workers, std::uint64_t seed)
      : programs_(std::move(programs)), hello_(std::move(hello)), evaluation_(std::move(evaluation)), for_workers_(std::move(for_workers)), key_(mix64(seed)) {}

  std::string_view name() const override { return "process"; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (hello_.problems == 0) return fail(Code::kUnavailable, "problem", "the task '{}' has none", hello_.name);
    const std::lock_guard lock(mutex_);
    if (const auto known = problems_.find(index); known != problems_.end()) return known->second;
    if (problems_.size() >= kRemembered) problems_.clear(), demonstrations_.clear();
    // Those that follow are wanted next.
    std::vector<std::uint64_t> rows;
    for (std::uint64_t i = 0; i < kAhead; ++i) rows.push_back(shuffled_cycle(index + i, hello_.problems, key_));
    ECHO_ASSIGN(auto made, ask_for(*programs_, process::Method::kProblems, rows, name_of(hello_)));
    for (std::uint64_t i = 0; i < kAhead; ++i) {
      if (made[i].demonstration) demonstrations_[made[i].problem.id()] = *std::move(made[i].demonstration);
      problems_[index + i] = std::move(made[i].problem);
    }
    return problems_.at(index);
  }
  std::vector<Problem> evaluation() const override { return evaluation_; }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    return std::unique_ptr<Episode>(std::make_unique<ProcessEpisode>(programs_, problem, seed, hello_.turns));
  }
  Repeatable repeatable() const override { return hello_.deterministic ? Repeatable::kCostly : Repeatable::kNot; }
  // Of a problem that was asked for lately.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const std::lock_guard lock(mutex_);
    const auto known = demonstrations_.find(problem.id());
    return known == demonstrations_.end() ? std::nullopt : std::optional(known->second);
  }
  std::string options_for_workers(std::string) const override { return for_workers_; }

  static std::string name_of(const process::Hello& hello) { return hello.name.empty() ? "task" : hello.name; }

  // Problems by their rows.
  static Result<std::vector<process::OwnProblem>> ask_for(Programs& programs, process::Method method, std::span<const std::uint64_t> rows, const std::string& name) {
    std::vector<process::OwnProblem> problems;
    ECHO_ASSIGN(const json answer, programs.first().ask_and_wait(method, process::rows_item(rows)));
    const auto items = answer.find("problems");
    if (items == answer.end() || !items->is_array() || items->size() != rows.size())
      return fail(Code::kCorrupt, "task's answer", "expected {} 'problems' for as many rows", rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!(*items)[i].is_object()) return fail(Code::kCorrupt, "task's answer", "problem {} is no object", rows[i]);
      ECHO_ASSIGN(auto problem, process::read_problem((*items)[i], fmt::format("{}/{}/{}", name, to_string(method), rows[i])));
      problems.push_back(std::move(problem));
    }
    return problems;
  }

 private:
  const std::shared_ptr<Programs> programs_;
  const process::Hello hello_;
  const std::vector<Problem> evaluation_;
  const std::string for_workers_;
  const std::uint64_t key_;
  mutable std::mutex mutex_;
  mutable std::map<std::uint64_t, Problem> problems_;           // by index; guarded by mutex_
  mutable std::map<std::string, std::string> demonstrations_;  // by problem; guarded by mutex_
};

// The options as workers read them: with what the files hold instead of where they are.
std::string for_workers(std::string_view options_json, const Contents& contents) {
  json options = json::parse(options_json, nullptr, false);
  if (!options.is_object()) options = json::object();
  options.erase("script");
  options["contents"] = {{"script", contents.script}, {"files", contents.files}};
  return options.dump();
}

Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  constexpr std::uint64_t kEvaluationMax = 100'000;
  ECHO_ASSIGN(const Options o, options_from_json<Options>("process", options_json, use));
  ECHO_ASSIGN(Contents contents, use == AdapterUse::kProblems ? read_contents(o) : contents_from(o.contents_json));
  process::ConnectionOptions options;
  options.command = command_of(o, contents);
  options.seed = seed;
  options.settings_json = o.settings_json;
  options.start_deadline = o.start_deadline;
  options.deadline = o.deadline;
  options.batch_max = o.batch;
  ECHO_ASSIGN(auto pool, sandbox::Pool::start());
  auto programs = std::make_shared<Programs>(std::move(pool), options, o.processes);
  ECHO_ASSIGN(const process::Hello hello, programs->first().hello());
  std::vector<Problem> evaluation;
  if (use == AdapterUse::kProblems) {
    if (hello.problems == 0) return fail(Code::kInvalid, "task", "'{}' has no problems to train on: its hello must say how many", Process::name_of(hello));
    if (hello.evaluation > kEvaluationMax)
      return fail(Code::kInvalid, "task", "{} problems to evaluate on, at most {} are allowed", hello.evaluation, kEvaluationMax);
    for (std::uint64_t row = 0; row < hello.evaluation;) {
      std::vector<std::uint64_t> rows;
      for (; row < hello.evaluation && rows.size() < kAhead; ++row) rows.push_back(row);
      ECHO_ASSIGN(auto some, Process::ask_for(*programs, process::Method::kEvaluation, rows, Process::name_of(hello)));
      for (process::OwnProblem& own : some) evaluation.push_back(std::move(own.problem));
    }
  }
  return std::unique_ptr<Adapter>(std::make_unique<Process>(std::move(programs), hello, std::move(evaluation), for_workers(options_json, contents), seed));
}

}  // namespace

const BuiltIn kProcess{"process", "A program of your own, in any language (docs/tasks.md)",
                       [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); }, make};

}  // namespace echoline::data_plane
