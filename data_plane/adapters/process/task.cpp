// Implements the adapter for tasks that run as programs; process.cpp and library.cpp make it. The program describes the
// task in its first answer, the hello: whether it has many turns, is deterministic, and how many problems it has.
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

constexpr std::size_t kCachedProblemsMax = 4096;   // training problems
constexpr std::size_t kRowsPerRequest = 64;        // the most that the protocol allows
constexpr std::uint64_t kEvaluationMax = 100'000;  // problems, which the learner keeps in memory

// The running programs of a task, and the choice of one for each call.
class Programs {
 public:
  Programs(std::unique_ptr<sandbox::Pool> pool, const ConnectionOptions& options, std::uint32_t count)
      : pool_(std::move(pool)) {
    for (std::uint32_t i = 0; i < count; ++i) connections_.push_back(std::make_unique<Connection>(*pool_, options));
  }
  // Round robin over the programs.
  Connection& next() { return *connections_[next_connection_++ % connections_.size()]; }
  // For the hello and the problems, which are the same in every copy.
  Connection& first() { return *connections_.front(); }
  std::uint64_t new_episode_id() { return ++last_episode_id_; }

 private:
  std::unique_ptr<sandbox::Pool> pool_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::atomic<std::uint64_t> next_connection_ = 0, last_episode_id_ = 0;
};

// Shared by an episode and the handlers of its pending call, which may outlive the episode.
struct CallState {
  std::mutex mutex;
  bool episode_exists = true;  // false: the answer is dropped
  // Start of the program that holds the episode; absent before the first step.
  std::optional<std::uint64_t> start_number;
  Score score_if_cut;  // to add if the token limit cuts the episode off now
};

class TaskEpisode final : public Episode {
 public:
  TaskEpisode(std::shared_ptr<Programs> programs, Problem problem, std::uint64_t seed, bool has_turns)
      : programs_(std::move(programs)),
        connection_(programs_->next()),
        problem_(std::move(problem)),
        seed_(seed),
        has_turns_(has_turns) {}
  ~TaskEpisode() override {
    const std::lock_guard lock(state_->mutex);
    state_->episode_exists = false;
    // The program has already forgotten an episode that it called done.
    if (has_turns_ && state_->start_number && !is_done_) connection_.close(id_, *state_->start_number);
  }

  void step(std::string response, StepHandler on_step) override {
    Connection::Call call;
    call.method = has_turns_ ? Method::kStep : Method::kScore;
    call.repeatable = !has_turns_;  // the program may have played a step of an episode before the batch failed
    call.on_answer = [state = state_, has_turns = has_turns_, episode_done = &is_done_,
                      on_step = std::move(on_step)](Result<json> item) {
      // The destructor waits for this lock, so `episode_done` is valid, and the episode outlives on_step().
      const std::lock_guard lock(state->mutex);
      if (!state->episode_exists) return;
      auto step = parse_step(std::move(item), has_turns, state->score_if_cut);
      if (step && step->done) *episode_done = true;
      on_step(std::move(step));
    };
    {
      const std::lock_guard lock(state_->mutex);
      const bool is_first_step = !state_->start_number;
      call.item = has_turns_ ? step_item(id_, response, is_first_step ? &problem_ : nullptr, seed_)
                             : score_item(problem_, response);
      if (has_turns_) {
        call.start_number = state_->start_number;
        call.on_start_number = [state = state_](std::uint64_t start_number) {
          const std::lock_guard start_lock(state->mutex);
          state->start_number = start_number;
        };
      }
    }
    connection_.ask(std::move(call));
  }
  Score cut() override {
    const std::lock_guard lock(state_->mutex);
    return state_->score_if_cut;
  }

 private:
  // Parses the program's answer. Also sets `score_if_cut`, for a cut after this step.
  static Result<Step> parse_step(Result<json> item, bool has_turns, Score& score_if_cut) {
    if (!item) return std::move(item).error();
    if (has_turns) {
      ECHO_ASSIGN(score_if_cut, read_cut(*item));
      return read_step(*item);
    }
    ECHO_ASSIGN(Score score, read_score(*item));
    return Step{.score = std::move(score), .done = true, .observation = {}};
  }

  const std::shared_ptr<Programs> programs_;
  Connection& connection_;
  const Problem problem_;
  const std::uint64_t seed_;
  const bool has_turns_;
  const std::uint64_t id_ = programs_->new_episode_id();
  const std::shared_ptr<CallState> state_ = std::make_shared<CallState>();
  bool is_done_ = false;  // the program has ended the episode; guarded by state_->mutex
};

class Task final : public Adapter {
 public:
  Task(std::string_view name, std::shared_ptr<Programs> programs, Hello hello, std::vector<Problem> evaluation,
       std::string worker_options, std::uint64_t seed)
      : name_(name),
        programs_(std::move(programs)),
        hello_(std::move(hello)),
        evaluation_(std::move(evaluation)),
        worker_options_(std::move(worker_options)),
        shuffle_key_(mix64(seed)) {}

  std::string_view name() const override { return name_; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (hello_.problem_count == 0) return fail(Code::kUnavailable, "problem", "the task '{}' has none", hello_.name);
    const std::lock_guard lock(mutex_);
    if (const auto it = problems_.find(index); it != problems_.end()) return it->second;
    if (problems_.size() >= kCachedProblemsMax) {
      problems_.clear();  // all at once: the run asks for rising indices, so it rarely needs an old one
      demonstrations_.clear();
    }
    // The run asks for the following indices next, so request them as well. A row is the program's number of a problem.
    // Each index gets a row; shuffled_cycle() goes through all rows in a new order before it repeats one.
    std::vector<std::uint64_t> rows;
    for (std::uint64_t i = 0; i < kRowsPerRequest; ++i)
      rows.push_back(shuffled_cycle(index + i, hello_.problem_count, shuffle_key_));
    ECHO_ASSIGN(auto received, request_problems(*programs_, Method::kProblems, rows, name_of(hello_)));
    for (std::uint64_t i = 0; i < kRowsPerRequest; ++i) {
      if (received[i].demonstration) demonstrations_[received[i].problem.id()] = *std::move(received[i].demonstration);
      problems_[index + i] = std::move(received[i].problem);
    }
    return problems_.at(index);
  }
  std::vector<Problem> evaluation() const override { return evaluation_; }

  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t seed) const override {
    return std::unique_ptr<Episode>(std::make_unique<TaskEpisode>(programs_, problem, seed, hello_.has_turns));
  }
  bool has_one_response() const override { return !hello_.has_turns; }
  Repeatable repeatable(const Problem&) const override {
    return hello_.deterministic ? Repeatable::kCostly : Repeatable::kNot;
  }
  // Known only for recently requested problems, because the cache is cleared when it is full.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    const std::lock_guard lock(mutex_);
    const auto it = demonstrations_.find(problem.id());
    return it == demonstrations_.end() ? std::nullopt : std::optional(it->second);
  }
  std::string options_for_workers(std::string) const override { return worker_options_; }

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
  const std::string worker_options_;
  const std::uint64_t shuffle_key_;
  mutable std::mutex mutex_;
  mutable std::map<std::uint64_t, Problem> problems_;          // by index; guarded by mutex_
  mutable std::map<std::string, std::string> demonstrations_;  // by problem id; guarded by mutex_
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
         "the longest wait for an answer; a program that exceeds it is killed and restarted");
  s.read("start_deadline", start_deadline, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
         "from the program's start to its first answer");
  s.read("memory", memory, {.min = Bytes{16u << 20}, .max = Bytes{std::uint64_t{1} << 40}},
         "of a program with its child processes");
  s.read("threads", threads, {.min = 1, .max = 4096}, "threads and processes of a program");
}

Result<std::unique_ptr<Adapter>> make_task(std::string_view name, sandbox::Command command,
                                           const TaskOptions& task_options, std::string worker_options,
                                           std::uint64_t seed, AdapterUse use) {
  for (const std::string& folder : task_options.readable) command.read_only.emplace_back(folder);
  // The program runs as long as the run does. Connection limits the time of each request instead.
  command.limits.wall.reset();
  command.limits.cpu.reset();
  command.limits.memory = task_options.memory;
  command.limits.processes = task_options.threads;
  ConnectionOptions options;
  options.command = std::move(command);
  options.seed = seed;
  options.settings_json = task_options.settings_json;
  options.start_deadline = task_options.start_deadline;
  options.deadline = task_options.deadline;
  options.batch_max = task_options.batch;
  ECHO_ASSIGN(auto pool, sandbox::Pool::start());
  auto programs = std::make_shared<Programs>(std::move(pool), options, task_options.processes);
  ECHO_ASSIGN(const Hello hello, programs->first().hello());
  std::vector<Problem> evaluation;
  if (use == AdapterUse::kProblems) {
    if (hello.problem_count == 0)
      return fail(Code::kInvalid, "task", "'{}' has no problems to train on: its hello must give their number",
                  Task::name_of(hello));
    if (hello.evaluation_count > kEvaluationMax)
      return fail(Code::kInvalid, "task", "{} evaluation problems, at most {} are allowed", hello.evaluation_count,
                  kEvaluationMax);
    for (std::uint64_t row = 0; row < hello.evaluation_count;) {
      std::vector<std::uint64_t> rows;
      for (; row < hello.evaluation_count && rows.size() < kRowsPerRequest; ++row) rows.push_back(row);
      ECHO_ASSIGN(auto received, Task::request_problems(*programs, Method::kEvaluation, rows, Task::name_of(hello)));
      for (ProblemWithDemonstration& received_problem : received)
        evaluation.push_back(std::move(received_problem.problem));
    }
  }
  return std::unique_ptr<Adapter>(
      std::make_unique<Task>(name, std::move(programs), hello, std::move(evaluation), std::move(worker_options), seed));
}

}  // namespace echoline::data_plane::process
