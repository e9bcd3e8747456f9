// Implements Grader: passes lines between a candidate (candidate.py, which runs the response's program) and an examiner
// (examiner.py, which runs the tests), each in a sandbox.
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
constexpr std::size_t kLineBytesMax = 4u << 20, kTestsMax = 10'000;
constexpr std::size_t kCacheBytesMax = 32u << 20;
constexpr std::size_t kCacheEntryOverheadBytes = 64;  // what the map adds per entry, about
constexpr std::size_t kFailureBytesShown = 200, kLineBytesShown = 100;
constexpr Duration kCpuMargin = std::chrono::seconds(10);  // of the sandbox's CPU limit above GraderOptions::time
constexpr auto kStartTimeout = std::chrono::seconds(60);   // for an interpreter to start on a busy machine

using sandbox::Process;

TimePoint now() { return SystemClock().now(); }

// The number in a message of the examiner. It follows a letter, the message's kind.
std::size_t number_after_letter(std::string_view line) {
  std::size_t value = 0;
  std::from_chars(line.data() + std::min<std::size_t>(1, line.size()), line.data() + line.size(), value);
  return value;
}

// The text as a JSON string, which is one line.
std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

// A cache of grades in two generations: it keeps at least the newer half of the grades that fit. One thread at a time.
class GradeCache {
 public:
  std::optional<Grade> find(const std::string& key) const {
    for (const auto* generation : {&newer_, &older_})
      if (const auto it = generation->find(key); it != generation->end()) return it->second;
    return std::nullopt;
  }
  void insert(std::string key, const Grade& grade) {
    const std::size_t bytes = key.size() + grade.first_failure.size() + sizeof(Grade) + kCacheEntryOverheadBytes;
    if (bytes_ + bytes > kCacheBytesMax / 2) {
      older_ = std::exchange(newer_, {});
      bytes_ = 0;
    }
    if (bytes <= kCacheBytesMax / 2 && newer_.emplace(std::move(key), grade).second) bytes_ += bytes;
  }

 private:
  std::unordered_map<std::string, Grade> newer_, older_;
  std::size_t bytes_ = 0;  // size of newer_
};

}  // namespace

struct Grader::Impl {
  GraderOptions options;
  GradeCache cache;
  std::unique_ptr<sandbox::Pool> pool;

  std::mutex mutex;
  std::condition_variable slot_is_free_or_stopping;
  std::size_t grading_count = 0;
  bool stopping = false;
  std::vector<Process> candidates, examiners;  // started in advance, idle

  sandbox::Command command(const char* script) const {
    sandbox::Command python{.argv = {options.python.string(), "-s", "-B", "/grading/main.py"},
                            .environment = {{"PYTHONHASHSEED", "0"}, {"LC_ALL", "C.UTF-8"}},
                            .files = {{"/grading/main.py", script}, {"/grading/values.py", kValuesScript}},
                            .read_only = {},
                            .limits = {}};
    // Below /usr, the sandbox shows the interpreter anyway. Elsewhere its whole prefix is needed: PREFIX/bin/python3
    // uses PREFIX/lib.
    if (const auto prefix = options.python.parent_path().parent_path();
        !prefix.empty() && !options.python.string().starts_with("/usr/"))
      python.read_only = {prefix};
    python.limits = {.wall = std::nullopt,
                     .cpu = std::nullopt,
                     .memory = options.memory,
                     .scratch = {16u << 20},
                     .file = {16u << 20},
                     .output = {4096},
                     .processes = 16,
                     .open_files = 64};
    return python;
  }

  Result<Process> launch_candidate() {
    sandbox::Command candidate = command(kCandidateScript);
    // This process enforces the time limits; the sandbox's limit applies if it cannot.
    candidate.limits.cpu = options.time + kCpuMargin;
    return pool->launch(std::move(candidate));
  }

  // Waits for the interpreter's first line, "hello". A failure is an error, not a grade: no program has run yet.
  Status await_hello(Process& process) {
    const auto line = process.read_line(kLineBytesMax, kStartTimeout);
    if (line && *line == "hello") return ok();
    return fail(Code::kUnavailable, kOperation, "{} did not start in its sandbox: {}: {}", options.python.string(),
                line ? "it said " + printable(*line, kLineBytesShown) : line.error().detail,
                printable(process.wait().err));
  }

  // Takes a sandbox that was started in advance, or starts one. Also starts another one for the next caller, because
  // starting takes longer than many gradings.
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
      ECHO_ASSIGN(Process process, launch_candidate());
      ready = std::move(process);
    }
    if (auto next = launch_candidate()) {
      const std::lock_guard lock(mutex);
      if (candidates.size() < options.parallel && !stopping) candidates.push_back(std::move(*next));
    }
    ECHO_TRY(await_hello(*ready));
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
    ECHO_TRY(await_hello(process));
    return process;
  }

  void return_examiner(Process examiner) {
    const std::lock_guard lock(mutex);
    if (!stopping) examiners.push_back(std::move(examiner));
  }

  bool acquire_slot() {
    std::unique_lock lock(mutex);
    slot_is_free_or_stopping.wait(lock, [&] { return stopping || grading_count < options.parallel; });
    if (stopping) return false;
    ++grading_count;
    return true;
  }
  void release_slot() {
    {
      const std::lock_guard lock(mutex);
      --grading_count;
    }
    slot_is_free_or_stopping.notify_all();
  }
};

namespace {

// The grading of one program. `Impl` is Grader::Impl, which is private.
class Grading {
 public:
  template <class Impl>
  Grading(Impl& impl, const GraderOptions& options, std::string_view program)
      : options_(options),
        program_(json_text(program)),
        take_candidate_([&impl] { return impl.take_candidate(); }),
        take_examiner_([&impl] { return impl.take_examiner(); }),
        return_examiner_([&impl](Process process) { impl.return_examiner(std::move(process)); }) {}

  Result<Grade> run(std::string_view task) {
    all_tests_deadline_ = now() + options_.time;
    ECHO_ASSIGN(const bool loaded, load());
    if (!loaded) return grade_;
    std::size_t next_test = 0;
    do {
      ECHO_ASSIGN(next_test, examine(task, next_test));
    } while (next_test < grade_.tests);
    return grade_;
  }

 private:
  // Loads the program in a fresh sandbox, until its functions can be called. False if it fails to load.
  Result<bool> load() {
    ECHO_ASSIGN(Process process, take_candidate_());
    candidate_ = std::move(process);
    test_deadline_ = now() + options_.test_time;
    const auto compiled = ask(program_);
    grade_.compiles = compiled && *compiled == "compiled";
    if (!grade_.compiles) return stop_candidate("syntax error", !compiled);
    const auto loaded = ask("run");
    if (loaded && *loaded == "loaded") return true;
    return stop_candidate(
        loaded ? "the program fails before the first test" : "before the first test: " + loaded.error().detail,
        !loaded);
  }

  // Ends the program and records its first failure. `may_change`: another run may end differently, so the grade is not
  // cached. Returns false, which load() returns in turn.
  bool stop_candidate(std::string what, bool may_change = false) {
    grade_.may_change |= may_change;
    if (grade_.first_failure.empty()) grade_.first_failure = printable(what, kFailureBytesShown);
    candidate_.reset();
    return false;
  }

  // Asks the program, within the deadlines of this test and of all tests.
  Result<std::string> ask(std::string_view line) {
    const auto time_left = [&] {
      return std::max(Duration::zero(), std::min(test_deadline_, all_tests_deadline_) - now());
    };
    Status sent = candidate_->write(std::string(line) + "\n", time_left());
    auto answer =
        sent ? candidate_->read_line(kLineBytesMax, time_left()) : Result<std::string>(std::move(sent).error());
    if (!answer && answer.error().code == Code::kStale) grade_.late = true;
    return answer;
  }

  // Runs the tests from `first_test` on. Returns the test to continue with. That is the end, or the one after a test
  // that killed the examiner, which only the program's answers can cause.
  Result<std::size_t> examine(std::string_view task, std::size_t first_test) {
    ECHO_ASSIGN(Process examiner, take_examiner_());
    auto request = nlohmann::json::parse(task.begin(), task.end(), nullptr, /*allow_exceptions=*/false);
    if (!request.is_object()) return fail(Code::kInvalid, kOperation, "the task is not a JSON object");
    request["first"] = first_test;
    ECHO_TRY(examiner.write(request.dump() + "\n", kStartTimeout));
    std::optional<std::size_t> current_test;
    for (;;) {
      // Allows the time of a second test, because the examiner itself also works on the program's answers.
      const auto line = examiner.read_line(
          kLineBytesMax, current_test ? std::max(Duration::zero(), test_deadline_ - now()) + options_.test_time
                                      : Duration(kStartTimeout));
      if (!line && current_test) {
        grade_.late = grade_.late || line.error().code == Code::kStale;
        stop_candidate_at(*current_test, "the test ended or hung on the program's answers");
        return *current_test + 1;
      }
      if (!line)
        return fail(Code::kUnavailable, kOperation, "the examiner ended: {}; {}", line.error().detail,
                    printable(examiner.wait().err));
      Status sent = ok();
      // The messages of examiner.py.
      switch (line->empty() ? '\0' : line->front()) {
        case 'N':  // number of tests
          grade_.tests = number_after_letter(*line);
          if (grade_.tests == 0 || grade_.tests > kTestsMax)
            return fail(Code::kInvalid, kOperation, "expected 1 to {} tests, found {}", kTestsMax, grade_.tests);
          break;
        case 'B': {  // a test begins
          current_test = number_after_letter(*line);
          Status ready = prepare_candidate();
          if (!ready) return std::move(ready).error();
          sent = examiner.write("go\n", kStartTimeout);
          break;
        }
        case 'C': {  // a question to the program, such as a call
          const std::optional<std::string> answer =
              current_test ? answer_to(*current_test, std::string_view(*line).substr(1)) : std::nullopt;
          sent = examiner.write(answer ? "R" + *answer + "\n" : "gone\n", options_.test_time);
          break;
        }
        case 'V':  // verdict of the test
          if (*line == "V1")
            ++grade_.passed;
          else if (current_test)
            note_failure_at(*current_test, "failed");
          break;
        case 'E':  // end of the tests
          break;
        case 'd':  // done, ready for another task
          return_examiner_(std::move(examiner));
          return grade_.tests;
        case 'X':  // the tests cannot be read
          return fail(Code::kInvalid, kOperation, "the problem's tests are not Python: {}",
                      printable(*line, kFailureBytesShown));
        default:
          return fail(Code::kCorrupt, kOperation, "the examiner said '{}'", printable(*line, kLineBytesShown));
      }
      if (!sent && current_test) {  // the examiner hangs on the program's answer
        grade_.late = grade_.late || sent.error().code == Code::kStale;
        stop_candidate_at(*current_test, "the test ended or hung on the program's answers");
        return *current_test + 1;
      }
    }
  }

  // Provides a program for the next test: loads it again if the last test killed it. Without time, or if it does not
  // load, there is none, and answer_to() has no answer.
  Status prepare_candidate() {
    if (now() >= all_tests_deadline_) grade_.late = true;
    if (!candidate_ && !load_failed_ && now() < all_tests_deadline_) {
      ECHO_ASSIGN(const bool loaded, load());
      load_failed_ = !loaded;
    }
    test_deadline_ = now() + options_.test_time;
    return ok();
  }

  std::optional<std::string> answer_to(std::size_t test, std::string_view question) {
    if (!candidate_) return std::nullopt;
    auto answer = ask(question);
    if (answer) return std::move(*answer);
    const bool late = answer.error().code == Code::kStale;
    stop_candidate_at(test, late
                                ? fmt::format("took longer than {}",
                                              to_text(now() < all_tests_deadline_ ? options_.test_time : options_.time))
                                : answer.error().detail);
    return std::nullopt;
  }

  void note_failure_at(std::size_t test, std::string_view what) {
    if (grade_.first_failure.empty()) grade_.first_failure = fmt::format("test {}: {}", test + 1, what);
  }
  // The program may not be killed or late next time.
  void stop_candidate_at(std::size_t test, const std::string& what) {
    stop_candidate(fmt::format("test {}: {}", test + 1, what), /*may_change=*/true);
  }

  const GraderOptions& options_;
  const std::string program_;
  std::function<Result<Process>()> take_candidate_, take_examiner_;
  std::function<void(Process)> return_examiner_;
  std::optional<Process> candidate_;
  TimePoint all_tests_deadline_{}, test_deadline_{};
  bool load_failed_ = false;  // when it was loaded again; no further attempt follows
  Grade grade_;
};

}  // namespace

Grader::Grader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Grader>> Grader::start(GraderOptions options) {
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  // Each program that is graded needs a candidate and an examiner, and as many of both may be idle. Four more, because
  // a program that was stopped counts until its processes have ended.
  ECHO_ASSIGN(impl->pool, sandbox::Pool::start({.long_lived_max = 4 * options.parallel + 4}));
  ECHO_ASSIGN(Process examiner, impl->take_examiner());  // checks at once that the interpreter starts
  impl->return_examiner(std::move(examiner));
  return std::unique_ptr<Grader>(new Grader(std::move(impl)));
}

Grader::~Grader() { stop(); }

void Grader::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->slot_is_free_or_stopping.notify_all();
  impl_->pool->stop();
}

Result<Grade> Grader::grade(std::string_view task, std::string_view program) {
  std::string key = fmt::format("{}:{}{}", task.size(), task, program);  // the size tells where the program begins
  {
    const std::lock_guard lock(impl_->mutex);
    if (auto grade = impl_->cache.find(key)) return *std::move(grade);
  }
  if (!impl_->acquire_slot()) return fail(Code::kCancelled, kOperation, "the grader is being shut down");
  auto grade = Grading(*impl_, impl_->options, program).run(task);
  impl_->release_slot();
  if (impl_->options.cache_grades && grade && !grade->late && !grade->may_change) {
    const std::lock_guard lock(impl_->mutex);
    impl_->cache.insert(std::move(key), *grade);
  }
  return grade;
}

}  // namespace echoline::data_plane
