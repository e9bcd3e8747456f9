#include "data_plane/adapters/code/grader.hpp"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "base/clock.hpp"
#include "base/text.hpp"
#include "data_plane/adapters/code/scripts.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::string_view kOperation = "grade code";
constexpr std::size_t kLineMax = 4u << 20, kTestsMax = 10'000;
constexpr std::size_t kRememberedBytes = 32u << 20;
constexpr auto kStart = std::chrono::seconds(60);  // for an interpreter to start on a busy machine

using sandbox::Process;

TimePoint now() { return SystemClock().now(); }

std::size_t number_after_letter(std::string_view line) {
  std::size_t value = 0;
  std::from_chars(line.data() + std::min<std::size_t>(1, line.size()), line.data() + line.size(), value);
  return value;
}

std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

// A cache of grades in two generations: it keeps at least the newer half of the grades that fit. One thread at a time.
class Memory {
 public:
  std::optional<Grade> find(const std::string& key) const {
    for (const auto* half : {&young_, &old_})
      if (const auto it = half->find(key); it != half->end()) return it->second;
    return std::nullopt;
  }
  void keep(std::string key, const Grade& grade) {
    const std::size_t bytes = key.size() + grade.trouble.size() + sizeof(Grade) + 64;
    if (bytes_ + bytes > kRememberedBytes / 2) {
      old_ = std::exchange(young_, {});
      bytes_ = 0;
    }
    if (bytes <= kRememberedBytes / 2 && young_.emplace(std::move(key), grade).second) bytes_ += bytes;
  }

 private:
  std::unordered_map<std::string, Grade> young_, old_;
  std::size_t bytes_ = 0;  // of young_
};

}  // namespace

struct Grader::Impl {
  GraderOptions options;
  Memory memory;
  std::unique_ptr<sandbox::Pool> pool;

  std::mutex mutex;
  std::condition_variable changed;
  std::size_t grading = 0;
  bool stopping = false;
  std::vector<Process> candidates, examiners;  // started in advance

  sandbox::Command command(const char* script) const {
    sandbox::Command c{{options.python.string(), "-s", "-B", "/grading/main.py"},
                       {{"PYTHONHASHSEED", "0"}, {"LC_ALL", "C.UTF-8"}},
                       {{"/grading/main.py", script}, {"/grading/values.py", kValuesScript}},
                       {},
                       {}};
    // Below /usr, the sandbox shows the interpreter anyway. Elsewhere its whole prefix is needed: PREFIX/bin/python3
    // uses PREFIX/lib.
    if (const auto prefix = options.python.parent_path().parent_path();
        !prefix.empty() && !options.python.string().starts_with("/usr/"))
      c.read_only = {prefix};
    c.limits = {.wall = std::nullopt,
                .cpu = std::nullopt,
                .memory = options.memory,
                .scratch = {16u << 20},
                .file = {16u << 20},
                .output = {4096},
                .processes = 16,
                .open_files = 64};
    return c;
  }

  Result<Process> begin_candidate() {
    sandbox::Command c = command(kCandidateScript);
    // This process enforces the time limits; the sandbox's limit applies if it cannot.
    c.limits.cpu = options.time + std::chrono::seconds(10);
    return pool->launch(std::move(c));
  }

  // Waits for the interpreter to start. A failure is an error, not a grade: no program has run yet.
  Status greet(Process& process) {
    const auto line = process.read_line(kLineMax, kStart);
    if (line && *line == "hello") return ok();
    return fail(Code::kUnavailable, kOperation, "{} did not start in its sandbox: {}: {}", options.python.string(),
                line ? "it said " + printable(*line, 100) : line.error().detail, printable(process.wait().err));
  }

  // Takes a sandbox started in advance, or starts one, and starts another for the next caller.
  Result<Process> take_candidate() {
    std::optional<Process> ready;
    {
      const std::lock_guard lock(mutex);
      if (!candidates.empty()) {
        ready = std::move(candidates.back());
        candidates.pop_back();
      }
    }
    if (!ready) {
      ECHO_ASSIGN(Process process, begin_candidate());
      ready = std::move(process);
    }
    if (auto next = begin_candidate()) {
      const std::lock_guard lock(mutex);
      if (candidates.size() < options.parallel && !stopping) candidates.push_back(std::move(*next));
    }
    ECHO_TRY(greet(*ready));
    return std::move(*ready);
  }

  Result<Process> take_examiner() {
    {
      const std::lock_guard lock(mutex);
      if (!examiners.empty()) {
        Process process = std::move(examiners.back());
        examiners.pop_back();
        return process;
      }
    }
    ECHO_ASSIGN(Process process, pool->launch(command(kExaminerScript)));
    ECHO_TRY(greet(process));
    return process;
  }

  void give_back(Process examiner) {
    const std::lock_guard lock(mutex);
    if (!stopping) examiners.push_back(std::move(examiner));
  }

  bool take_turn() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return stopping || grading < options.parallel; });
    if (stopping) return false;
    ++grading;
    return true;
  }
  void end_turn() {
    {
      const std::lock_guard lock(mutex);
      --grading;
    }
    changed.notify_all();
  }
};

namespace {

// The grading of one program.
class Grading {
 public:
  template <class Impl>
  Grading(Impl& impl, const GraderOptions& options, std::string_view program)
      : options_(options),
        program_(json_text(program)),
        take_candidate_([&impl] { return impl.take_candidate(); }),
        take_examiner_([&impl] { return impl.take_examiner(); }),
        give_back_([&impl](Process process) { impl.give_back(std::move(process)); }) {}

  Result<Grade> run(std::string_view task) {
    end_ = now() + options_.time;
    ECHO_ASSIGN(const bool loaded, load());
    if (!loaded) return grade_;
    std::size_t first = 0;
    do {
      ECHO_ASSIGN(first, examine(task, first));
    } while (first < grade_.tests);
    return grade_;
  }

 private:
  // Loads the program in a fresh sandbox, until its functions can be called. False if it fails to load.
  Result<bool> load() {
    ECHO_ASSIGN(Process process, take_candidate_());
    candidate_ = std::move(process);
    deadline_ = now() + options_.test_time;
    const auto compiled = ask(program_);
    grade_.compiles = compiled && *compiled == "compiled";
    if (!grade_.compiles) return trouble("syntax error", !compiled);
    const auto loaded = ask("run");
    if (loaded && *loaded == "loaded") return true;
    return trouble(
        loaded ? "the program fails before the first test" : "before the first test: " + loaded.error().detail,
        !loaded);
  }

  bool trouble(std::string what, bool again = false) {
    grade_.again |= again;
    if (grade_.trouble.empty()) grade_.trouble = printable(what, 200);
    candidate_.reset();
    return false;
  }

  // Asks the program, within the deadlines of this test and of all tests.
  Result<std::string> ask(std::string_view line) {
    const auto left = [&] { return std::max(Duration::zero(), std::min(deadline_, end_) - now()); };
    Status sent = candidate_->write(std::string(line) + "\n", left());
    auto answer = sent ? candidate_->read_line(kLineMax, left()) : Result<std::string>(std::move(sent).error());
    if (!answer && answer.error().code == Code::kStale) grade_.late = true;
    return answer;
  }

  // Runs the tests from `first` on. Returns the test to continue with: the end, or the one after a test that killed the
  // examiner, which only the program's answers can cause.
  Result<std::size_t> examine(std::string_view task, std::size_t first) {
    ECHO_ASSIGN(Process examiner, take_examiner_());
    auto request = nlohmann::json::parse(task.begin(), task.end(), nullptr, /*allow_exceptions=*/false);
    if (!request.is_object()) return fail(Code::kInvalid, kOperation, "the task is not a JSON object");
    request["first"] = first;
    ECHO_TRY(examiner.write(request.dump() + "\n", kStart));
    std::optional<std::size_t> current;  // current test
    for (;;) {
      const auto line = examiner.read_line(
          kLineMax, current ? std::max(Duration::zero(), deadline_ - now()) + options_.test_time : Duration(kStart));
      if (!line && current) {
        grade_.late = grade_.late || line.error().code == Code::kStale;
        trouble_at(*current, "the test ended or hung on the program's answers");
        return *current + 1;
      }
      if (!line)
        return fail(Code::kUnavailable, kOperation, "the examiner ended: {}; {}", line.error().detail,
                    printable(examiner.wait().err));
      Status taken = ok();
      switch (line->empty() ? '\0' : line->front()) {
        case 'N':
          grade_.tests = number_after_letter(*line);
          if (grade_.tests == 0 || grade_.tests > kTestsMax)
            return fail(Code::kInvalid, kOperation, "expected 1 to {} tests, found {}", kTestsMax, grade_.tests);
          break;
        case 'B': {
          current = number_after_letter(*line);
          Status ready = prepare(*current);
          if (!ready) return std::move(ready).error();
          taken = examiner.write("go\n", kStart);
          break;
        }
        case 'C': {
          const std::optional<std::string> answer =
              current ? answer_to(*current, std::string_view(*line).substr(1)) : std::nullopt;
          taken = examiner.write(answer ? "R" + *answer + "\n" : "gone\n", options_.test_time);
          break;
        }
        case 'V':
          if (*line == "V1")
            ++grade_.passed;
          else if (current)
            note_at(*current, "failed");
          break;
        case 'E':
          break;
        case 'd':
          give_back_(std::move(examiner));
          return grade_.tests;
        case 'X':
          return fail(Code::kInvalid, kOperation, "the problem's tests are not Python: {}", printable(*line, 200));
        default:
          return fail(Code::kCorrupt, kOperation, "the examiner said '{}'", printable(*line, 100));
      }
      if (!taken && current) {  // the examiner hangs on the program's answer
        grade_.late = grade_.late || taken.error().code == Code::kStale;
        trouble_at(*current, "the test ended or hung on the program's answers");
        return *current + 1;
      }
    }
  }

  // Provides a program for the next test, reloaded if the last test killed it.
  Status prepare(std::size_t) {
    if (now() >= end_) grade_.late = true;
    if (!candidate_ && !given_up_ && now() < end_) {
      ECHO_ASSIGN(const bool loaded, load());
      given_up_ = !loaded;
    }
    deadline_ = now() + options_.test_time;
    return ok();
  }

  std::optional<std::string> answer_to(std::size_t test, std::string_view question) {
    if (!candidate_) return std::nullopt;
    auto answer = ask(question);
    if (answer) return std::move(*answer);
    const bool late = answer.error().code == Code::kStale;
    trouble_at(test,
               late ? fmt::format("took longer than {}", to_text(now() < end_ ? options_.test_time : options_.time))
                    : answer.error().detail);
    return std::nullopt;
  }

  void note_at(std::size_t test, std::string_view what) {
    if (grade_.trouble.empty()) grade_.trouble = fmt::format("test {}: {}", test + 1, what);
  }
  // Such a grade is not remembered: the program may not be killed or late next time.
  void trouble_at(std::size_t test, const std::string& what) {
    trouble(fmt::format("test {}: {}", test + 1, what), true);
  }

  const GraderOptions& options_;
  const std::string program_;
  std::function<Result<Process>()> take_candidate_, take_examiner_;
  std::function<void(Process)> give_back_;
  std::optional<Process> candidate_;
  TimePoint end_{}, deadline_{};
  bool given_up_ = false;
  Grade grade_;
};

}  // namespace

Grader::Grader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Grader>> Grader::start(GraderOptions options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  ECHO_ASSIGN(impl->pool, sandbox::Pool::start({.processes_max = 4 * options.parallel + 4}));
  ECHO_ASSIGN(Process examiner, impl->take_examiner());
  impl->give_back(std::move(examiner));
  return std::unique_ptr<Grader>(new Grader(std::move(impl)));
}

Grader::~Grader() { stop(); }

void Grader::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  impl_->pool->stop();
}

Result<Grade> Grader::grade(std::string_view task, std::string_view program) {
  std::string key = fmt::format("{}:{}{}", task.size(), task, program);
  {
    const std::lock_guard lock(impl_->mutex);
    if (auto grade = impl_->memory.find(key)) return *std::move(grade);
  }
  if (!impl_->take_turn()) return fail(Code::kCancelled, kOperation, "the grader is being shut down");
  auto grade = Grading(*impl_, impl_->options, program).run(task);
  impl_->end_turn();
  if (impl_->options.remember && grade && !grade->late && !grade->again) {
    const std::lock_guard lock(impl_->mutex);
    impl_->memory.keep(std::move(key), *grade);
  }
  return grade;
}

}  // namespace echoline::data_plane
