// Implements the adapter for tasks that run as programs; process.cpp and library.cpp make it.
#include "data_plane/adapters/process/task.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <span>

#include "base/random.hpp"
#include "data_plane/adapters/process/connection.hpp"

namespace echoline::data_plane::process {
namespace {

using nlohmann::json;

constexpr std::size_t kCachedProblemsMax = 4096, kPrefetchedRows = 64;
constexpr std::uint64_t kEvaluationMax = 100'000;

// The running programs of a task, and the choice of one for each call.
class Programs {
 public:
  Programs(std::unique_ptr<sandbox::Pool> pool, const ConnectionOptions& options, std::uint32_t count)
      : pool_(std::move(pool)) {
    for (std::uint32_t i = 0; i < count; ++i) connections_.push_back(std::make_unique<Connection>(*pool_, options));
  }
  Connection& next() { return *connections_[next_connection_++ % connections_.size()]; }
  Connection& first() { return *connections_.front(); }
  std::uint64_t new_episode() { return ++episodes_; }

 private:
  std::unique_ptr<sandbox::Pool> pool_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::atomic<std::uint64_t> next_connection_ = 0, episodes_ = 0;
};

// Shared by an episode and its pending call, which may outlive the episode.
struct CallState {
  std::mutex mutex;
  bool episode_exists = true;  // false: the answer is dropped
  std::optional<std::uint64_t> start_number;
  Score cut;  // due if the episode is cut off now
};

class TaskEpisode final : public Episode {
 public:
  TaskEpisode(std::shared_ptr<Programs> programs, Problem problem, std::uint64_t seed, bool turns)
      : programs_(std::move(programs)),
        connection_(programs_->next()),
        problem_(std::move(problem)),
        seed_(seed),
        turns_(turns) {}
  ~TaskEpisode() override {
    const std::lock_guard lock(state_->mutex);
    state_->episode_exists = false;
    if (turns_ && state_->start_number && !done_) connection_.close(id_, *state_->start_number);
  }

  void step(std::string response, Done done) override {
    Connection::Call call;
    call.method = turns_ ? Method::kStep : Method::kScore;
    call.repeatable = !turns_;
    call.done = [state = state_, turns = turns_, episode_done = &done_, done = std::move(done)](Result<json> item) {
      const std::lock_guard lock(state->mutex);
      if (!state->episode_exists) return;
      auto step = read(std::move(item), turns, state->cut);
      if (step && step->done) *episode_done = true;
      done(std::move(step));
    };
    {
      const std::lock_guard lock(state_->mutex);
      const bool first = !state_->start_number;
      call.item =
          turns_ ? step_item(id_, response, first ? &problem_ : nullptr, seed_) : score_item(problem_, response);
      if (turns_) {
        call.start_number = state_->start_number;
        call.on_start_number = [state = state_](std::uint64_t start_number) {
          const std::lock_guard inner(state->mutex);
          state->start_number = start_number;
        };
      }
    }
    connection_.ask(std::move(call));
  }
  Score cut() override {
    const std::lock_guard lock(state_->mutex);
    return state_->cut;
  }

 private:
  static Result<Step> read(Result<json> item, bool turns, Score& cut) {
    if (!item) return std::move(item).error();
    if (turns) {
      ECHO_ASSIGN(cut, read_cut(*item));
      return read_step(*item);
    }
    ECHO_ASSIGN(Score score, read_score(*item));
    return Step{std::move(score), true, {}};
  }

  const std::shared_ptr<Programs> programs_;
  Connection& connection_;
  const Problem problem_;
  const std::uint64_t seed_;
  const bool turns_;
  const std::uint64_t id_ = programs_->new_episode();
  const std::shared_ptr<CallState> state_ = std::make_shared<CallState>();
  bool done_ = false;  // guarded by state_->mutex
};

class Task final : public Adapter {
 public:
  Task(std::string_view name, std::shared_ptr<Programs> programs, Hello hello, std::vector<Problem> evaluation,
       std::string for_workers, std::uint64_t seed)
      : name_(name),
        programs_(std::move(programs)),
        hello_(std::move(hello)),
        evaluation_(std::move(evaluation)),
        for_workers_(std::move(for_workers)),
        key_(mix64(seed)) {}

  std::string_view name() const override { return name_; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (hello_.problems == 0) return fail(Code::kUnavailable, "problem", "the task '{}' has none", hello_.name);
    const std::lock_guard lock(mutex_);
    if (const auto known = problems_.find(index); known != problems_.end()) return known->second;
    if (problems_.size() >= kCachedProblemsMax) problems_.clear(), demonstrations_.clear();
    // The following indices are requested next, so prefetch them.
    std::vector<std::uint64_t> rows;
    for (std::uint64_t i = 0; i < kPrefetchedRows; ++i)
      rows.push_back(shuffled_cycle(index + i, hello_.problems, key_));
    ECHO_ASSIGN(auto received, request_problems(*programs_, Method::kProblems, rows, name_of(hello_)));
    for (std::uint64_t i = 0; i < kPrefetchedRows; ++i) {
      if (received[i].demonstration) demonstrations_[received[i].problem.id()] = *std::move(received[i].demonstration);
      problems_[index + i] = std::move(received[i].problem);
    }
    return problems_.at(index);
  }
  std::vector<Problem> evaluation() const override { return evaluation_; }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    return std::unique_ptr<Episode>(std::make_unique<TaskEpisode>(programs_, problem, seed, hello_.turns));
  }
  bool one_response() const override { return !hello_.turns; }
  Repeatable repeatable(const Problem&) const override {
    return hello_.deterministic ? Repeatable::kCostly : Repeatable::kNot;
  }
  // Known only for recently requested problems.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const std::lock_guard lock(mutex_);
    const auto known = demonstrations_.find(problem.id());
    return known == demonstrations_.end() ? std::nullopt : std::optional(known->second);
  }
  std::string options_for_workers(std::string) const override { return for_workers_; }

  static std::string name_of(const Hello& hello) { return hello.name.empty() ? "task" : hello.name; }

  static Result<std::vector<ProblemWithDemonstration>> request_problems(Programs& programs, Method method,
                                                                        std::span<const std::uint64_t> rows,
                                                                        const std::string& name) {
    std::vector<ProblemWithDemonstration> problems;
    ECHO_ASSIGN(const json answer, programs.first().ask_and_wait(method, rows_item(rows)));
    const auto items = answer.find("problems");
    if (items == answer.end() || !items->is_array() || items->size() != rows.size())
      return fail(Code::kCorrupt, "task's answer", "expected {} 'problems' for as many rows", rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (!(*items)[i].is_object()) return fail(Code::kCorrupt, "task's answer", "problem {} is no object", rows[i]);
      ECHO_ASSIGN(auto problem, read_problem((*items)[i], fmt::format("{}/{}/{}", name, to_string(method), rows[i])));
      problems.push_back(std::move(problem));
    }
    return problems;
  }

 private:
  const std::string_view name_;
  const std::shared_ptr<Programs> programs_;
  const Hello hello_;
  const std::vector<Problem> evaluation_;
  const std::string for_workers_;
  const std::uint64_t key_;
  mutable std::mutex mutex_;
  mutable std::map<std::uint64_t, Problem> problems_;          // by index; guarded by mutex_
  mutable std::map<std::string, std::string> demonstrations_;  // by problem; guarded by mutex_
};

}  // namespace

void TaskOptions::read(ConfigSection& s) {
  s.read(
      "readable", readable,
      {"folders of the machine that the program may read besides the system's, such as a virtual environment", "none"});
  settings_json = s.json("settings", "settings for the program, sent when it starts");
  s.read("processes", processes, {.min = 1, .max = 256},
         "copies of the program on a worker, each with one request at a time");
  s.read("batch", batch, {.min = 1, .max = kItemsMax}, "the most responses in a request");
  s.read("deadline", deadline, {.min = std::chrono::milliseconds(10), .max = std::chrono::hours(1)},
         "for an answer; a program that exceeds it is killed and restarted");
  s.read("start_deadline", start_deadline, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
         "from the program's start to its first answer");
  s.read("memory", memory, {.min = Bytes{16u << 20}, .max = Bytes{std::uint64_t{1} << 40}},
         "of a program with its child processes");
  s.read("threads", threads, {.min = 1, .max = 4096}, "threads and processes of a program");
}

Result<std::unique_ptr<Adapter>> make_task(std::string_view name, sandbox::Command command, const TaskOptions& o,
                                           std::string for_workers, std::uint64_t seed, AdapterUse use) {
  for (const std::string& folder : o.readable) command.read_only.emplace_back(folder);
  command.limits.wall.reset();
  command.limits.cpu.reset();
  command.limits.memory = o.memory;
  command.limits.processes = o.threads;
  ConnectionOptions options;
  options.command = std::move(command);
  options.seed = seed;
  options.settings_json = o.settings_json;
  options.start_deadline = o.start_deadline;
  options.deadline = o.deadline;
  options.batch_max = o.batch;
  ECHO_ASSIGN(auto pool, sandbox::Pool::start());
  auto programs = std::make_shared<Programs>(std::move(pool), options, o.processes);
  ECHO_ASSIGN(const Hello hello, programs->first().hello());
  std::vector<Problem> evaluation;
  if (use == AdapterUse::kProblems) {
    if (hello.problems == 0)
      return fail(Code::kInvalid, "task", "'{}' has no problems to train on: its hello must give their number",
                  Task::name_of(hello));
    if (hello.evaluation > kEvaluationMax)
      return fail(Code::kInvalid, "task", "{} evaluation problems, at most {} are allowed", hello.evaluation,
                  kEvaluationMax);
    for (std::uint64_t row = 0; row < hello.evaluation;) {
      std::vector<std::uint64_t> rows;
      for (; row < hello.evaluation && rows.size() < kPrefetchedRows; ++row) rows.push_back(row);
      ECHO_ASSIGN(auto received, Task::request_problems(*programs, Method::kEvaluation, rows, Task::name_of(hello)));
      for (ProblemWithDemonstration& each : received) evaluation.push_back(std::move(each.problem));
    }
  }
  return std::unique_ptr<Adapter>(
      std::make_unique<Task>(name, std::move(programs), hello, std::move(evaluation), std::move(for_workers), seed));
}

}  // namespace echoline::data_plane::process
