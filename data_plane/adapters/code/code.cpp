// The task "code": MBPP and HumanEval as JSON Lines. A response is scored by the tests its program passes (grader.hpp).
//
// MBPP (Austin et al. 2021, arXiv:2108.07732): {text or prompt, code, test_list, test_setup_code, test_imports}; the
// first three are required. HumanEval (Chen et al. 2021, arXiv:2107.03374): {prompt, test, entry_point,
// canonical_solution}.
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/files.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/code/episodes.hpp"
#include "data_plane/adapters/code/extract.hpp"
#include "data_plane/adapters/code/grader.hpp"
#include "data_plane/limits.hpp"

namespace echoline::data_plane {
namespace {

using nlohmann::json;

constexpr std::string_view kOperation = "code";
constexpr std::uint64_t kFileBytesMax = 256u << 20;
constexpr std::size_t kNameBytesShown = 64;
constexpr std::string_view kTaskPlaceholder = "{task}", kTestsPlaceholder = "{tests}";
constexpr std::string_view kGzipMagic = "\x1f\x8b";
constexpr std::string_view kMbppPrompt =
    "{task}\nThe function must pass these tests:\n```python\n{tests}\n```\nAnswer with the program in one block of "
    "Python.";
constexpr std::string_view kHumanEvalPrompt =
    "Complete this Python function.\n```python\n{task}\n```\nAnswer with the whole function in one block of Python.";

// PULSE, equation 21 (Miahi and Belilovsky 2026, arXiv:2602.03839).
constexpr double kTestsWeight = 0.7, kSyntaxWeight = 0.1, kFormatWeight = 0.1, kThinkingWeight = 0.1;

enum class Reward { kPulse, kFraction };

struct Options {
  std::filesystem::path train;
  std::optional<std::filesystem::path> held_out;
  double held_out_fraction = 0.1;
  std::optional<std::string> prompt;
  Reward reward = Reward::kPulse;
  GraderOptions grader;

  void read(ConfigSection s, AdapterUse use) {
    constexpr const char* kTrainHelp =
        "JSON Lines file to train on, in the form of MBPP or HumanEval (docs/reference/code.md)";
    if (use == AdapterUse::kProblems)
      s.require("train", train, kTrainHelp);
    else
      s.read("train", train, kTrainHelp);
    s.read("held_out", held_out, "the same for evaluation; its problems are never trained on");
    const bool has_both = s.has("held_out") && s.has("held_out_fraction");
    s.read("held_out_fraction", held_out_fraction, {.min = 0.001, .max = 0.9},
           "without `held_out`: share of the problems in `train` to hold out, determined by the seed");
    if (has_both) s.error("held_out_fraction", "expected 'held_out' or 'held_out_fraction', not both");
    s.read("prompt", prompt,
           {"text of a problem: {task} stands for the task's text or the head of its function, {tests} for its tests",
            "asks for one block of Python; `\"{task}\"` for a model that continues text"});
    if (prompt && prompt->find(kTaskPlaceholder) == std::string::npos)
      s.error("prompt", "expected a text with {task} in it");
    s.read_choice("reward", reward, {{"pulse", Reward::kPulse}, {"fraction", Reward::kFraction}},
                  "reward: 0.7 of the tests passed, and 0.1 each for a program that is Python, is in a closed block, "
                  "and follows thinking (pulse), or the fraction of the tests passed (fraction)");
    s.read("python", grader.python,
           "the interpreter on each grading machine, Python 3.8 or newer; programs can read the folder above the "
           "interpreter's");
    s.read("test_time", grader.test_time, {.min = std::chrono::milliseconds(100), .max = std::chrono::minutes(10)},
           "time for one test, and for all the program does before the first");
    s.read("time", grader.time, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
           "time for all tests of a program");
    s.read("memory", grader.memory, {.min = Bytes{64u << 20}, .max = Bytes{1ull << 40}},
           "memory of a program, its files included");
    s.read("parallel", grader.parallel, {.min = 1, .max = 256}, "programs that a worker grades at the same time");
  }
};

// A line of the file as a problem.
struct Row {
  std::string task, tests;  // texts for the prompt
  std::string reference;    // JSON for Grader
  std::string solution;     // a whole program
  bool is_humaneval = false;
};

class RowParser {
 public:
  RowParser(const json& row, std::string_view place_in_file) : row_(row), place_in_file_(place_in_file) {}

  Result<Row> read() const {
    if (!row_.is_object()) return row_error("expected a JSON object in the form of MBPP or HumanEval");
    return row_.contains("entry_point") ? parse_humaneval() : parse_mbpp();
  }

 private:
  Error row_error(std::string_view why) const {
    return fail(Code::kInvalid, "read code", "{}: {}", place_in_file_, why);
  }

  Result<std::string> string_at(const char* key) const {
    const auto it = row_.find(key);
    if (it == row_.end() || !it->is_string()) return row_error(fmt::format("expected a string '{}'", key));
    return it->get<std::string>();
  }

  Result<std::vector<std::string>> strings_at(const char* key) const {
    const auto it = row_.find(key);
    const bool is_list = it != row_.end() && it->is_array();
    std::vector<std::string> strings;
    if (is_list)
      for (const json& item : *it)
        if (item.is_string()) strings.push_back(item.get<std::string>());
    if (!is_list || strings.size() != it->size()) return row_error(fmt::format("expected a list of strings '{}'", key));
    return strings;
  }

  Result<Row> parse_humaneval() const {
    ECHO_ASSIGN(const std::string prompt, string_at("prompt"));
    ECHO_ASSIGN(const std::string test, string_at("test"));
    ECHO_ASSIGN(const std::string entry_point, string_at("entry_point"));
    ECHO_ASSIGN(const std::string solution, string_at("canonical_solution"));
    if (!defines(prompt, entry_point))
      return row_error(
          fmt::format("the prompt does not contain the head of function '{}'", entry_point.substr(0, kNameBytesShown)));
    return Row{.task = prompt,
               .tests = test,
               .reference = text_of({{"prompt", prompt}, {"test", test}, {"entry_point", entry_point}}),
               .solution = prompt + solution,
               .is_humaneval = true};
  }

  Result<Row> parse_mbpp() const {
    ECHO_ASSIGN(const std::string task, string_at(row_.contains("text") ? "text" : "prompt"));
    ECHO_ASSIGN(const std::string code, string_at("code"));
    ECHO_ASSIGN(const std::vector<std::string> tests, strings_at("test_list"));
    std::vector<std::string> imports;
    if (row_.contains("test_imports")) {
      ECHO_ASSIGN(imports, strings_at("test_imports"));
    }
    std::string setup;
    if (row_.contains("test_setup_code")) {
      ECHO_ASSIGN(setup, string_at("test_setup_code"));
    }
    if (tests.empty()) return row_error("'test_list' is empty");
    return Row{.task = task,
               .tests = fmt::format("{}", fmt::join(tests, "\n")),
               .reference = text_of({{"tests", tests}, {"imports", imports}, {"setup", setup}, {"code", code}}),
               .solution = code,
               .is_humaneval = false};
  }

  static std::string text_of(const json& value) {
    return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  }

  const json& row_;
  const std::string_view place_in_file_;
};

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (auto offset = text.find(what); offset != std::string::npos; offset = text.find(what, offset + with.size()))
    text.replace(offset, what.size(), with);
}

Result<std::vector<Row>> read_rows(const std::filesystem::path& path) {
  ECHO_ASSIGN(const std::string content, read_file(path, kFileBytesMax));
  if (content.starts_with(kGzipMagic))
    return fail(Code::kInvalid, "read code", "{}: is compressed; unpack it first: gunzip {}", path.string(),
                path.string());
  std::vector<Row> rows;
  std::size_t line_number = 0;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    const std::string_view line = std::string_view(content).substr(begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string place_in_file = fmt::format("{}:{}", path.string(), line_number);
    ECHO_ASSIGN(
        Row row,
        RowParser(json::parse(line.begin(), line.end(), nullptr, /*allow_exceptions=*/false), place_in_file).read());
    if (row.reference.size() > kReferenceBytesMax)
      return fail(Code::kInvalid, "read code", "{}: the tests with their setup have {} bytes, at most {}",
                  place_in_file, row.reference.size(), kReferenceBytesMax);
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return fail(Code::kInvalid, "read code", "{}: the file has no rows", path.string());
  return rows;
}

class CodeTask final : public Adapter {
 public:
  CodeTask(Options options, std::uint64_t seed)
      : options_(std::move(options)), shuffle_key_(mix64(seed)), threads_(options_.grader.parallel) {}

  ~CodeTask() override {
    if (grader_) grader_->stop();  // otherwise the threads would finish grading first
  }

  Status open() {
    ECHO_ASSIGN(train_, read_rows(options_.train));
    if (options_.held_out) {
      ECHO_ASSIGN(held_out_, read_rows(*options_.held_out));
      std::set<std::string_view> held_out_tasks;
      for (const Row& row : held_out_) held_out_tasks.insert(row.task);
      std::erase_if(train_, [&](const Row& row) { return held_out_tasks.contains(row.task); });
      if (train_.empty())
        return fail(Code::kInvalid, "", "every problem of '{}' is held out in '{}'", options_.train.string(),
                    options_.held_out->string());
    } else {
      ECHO_TRY(split_held_out());
    }
    ECHO_TRY(check_prompts("train", train_));
    return check_prompts("test", held_out_);
  }

  std::string_view name() const override { return "code"; }
  // Nearly always repeatable, although a program may behave differently each time: before the learner accuses a worker,
  // it grades a second time, which rules that out (learner/regrading.hpp).
  Repeatable repeatable(const Problem&) const override { return Repeatable::kCostly; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (train_.empty())
      return fail(Code::kUnavailable, kOperation, "this adapter was made for scoring, so it has no problems");
    const std::uint64_t row = shuffled_cycle(index, train_.size(), shuffle_key_);
    return to_problem("train", row, train_[row]);
  }

  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::size_t i = 0; i < held_out_.size(); ++i) problems.push_back(to_problem("test", i, held_out_[i]));
    return problems;
  }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    const ExtractedProgram extracted = extract_code(response);
    Grade grade;
    if (!extracted.code.empty()) {
      ECHO_ASSIGN(const std::string program, program_of(problem, extracted.code));
      ECHO_ASSIGN(Grader* const grader, this->grader());
      ECHO_ASSIGN(grade, grader->grade(problem.reference(), program));
    }
    const double passed_fraction =
        grade.tests == 0 ? 0 : static_cast<double>(grade.passed) / static_cast<double>(grade.tests);
    const double syntax = grade.compiles, format = extracted.fenced, thinking = extracted.thinking;
    const double pulse =
        kTestsWeight * passed_fraction + kSyntaxWeight * syntax + kFormatWeight * format + kThinkingWeight * thinking;
    return Score{
        .reward = options_.reward == Reward::kPulse ? pulse : passed_fraction,
        .components = {{"tests", passed_fraction}, {"syntax", syntax}, {"format", format}, {"thinking", thinking}},
        .correct = grade.tests > 0 && grade.passed == grade.tests,
        .late = grade.late};
  }

  // Grades on separate threads, so that the caller is not blocked.
  Result<std::unique_ptr<Episode>> begin(const Problem& problem, std::uint64_t) const override {
    return make_graded_episode(threads_,
                               [this, problem](const std::string& response) { return score(problem, response); });
  }

  std::optional<std::string> demonstration(const Problem& problem) const override {
    constexpr std::string_view kPrefix = "code/train/";
    if (!problem.id().starts_with(kPrefix)) return std::nullopt;
    std::size_t row = 0;
    const char* const end = problem.id().data() + problem.id().size();
    const auto parsed = std::from_chars(problem.id().data() + kPrefix.size(), end, row);
    if (parsed.ec != std::errc{} || parsed.ptr != end || row >= train_.size()) return std::nullopt;
    const std::string& solution = train_[row].solution;
    return fmt::format("```python\n{}{}```\n", solution, solution.ends_with('\n') ? "" : "\n");
  }

  // Starts the grader on first use. A failure is retried next time, because the machine may be less busy then.
  Result<Grader*> grader() const {
    const std::lock_guard lock(mutex_);
    if (!grader_) {
      ECHO_ASSIGN(grader_, Grader::start(options_.grader));
    }
    return grader_.get();
  }

 private:
  // Holds out a share of the rows, chosen by the seed.
  Status split_held_out() {
    const auto count = static_cast<std::size_t>(static_cast<double>(train_.size()) * options_.held_out_fraction);
    if (count == 0 || count == train_.size())
      return fail(
          Code::kInvalid, "",
          "{}: held_out_fraction {} of {} problems leaves none to {}; choose another, or name a file in held_out",
          options_.train.string(), options_.held_out_fraction, train_.size(),
          count == 0 ? "evaluate with" : "train on");
    std::vector<Row> rows(train_.size());
    for (std::size_t i = 0; i < rows.size(); ++i) rows[permuted(i, rows.size(), shuffle_key_)] = std::move(train_[i]);
    train_.assign(std::make_move_iterator(rows.begin() + static_cast<std::ptrdiff_t>(count)),
                  std::make_move_iterator(rows.end()));
    rows.resize(count);
    // A task that occurs twice in the file must not be in both sets, so held-out tasks are not trained on.
    std::set<std::string_view> held_out_tasks;
    for (const Row& row : rows) held_out_tasks.insert(row.task);
    std::erase_if(train_, [&](const Row& row) { return held_out_tasks.contains(row.task); });
    held_out_ = std::move(rows);
    if (!train_.empty()) return ok();
    return fail(Code::kInvalid, "", "{}: every problem is also held out; use different files", options_.train.string());
  }

  Status check_prompts(std::string_view split, const std::vector<Row>& rows) const {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const Problem problem = to_problem(split, i, rows[i]);
      if (problem.prompt().size() > kPromptBytesMax)
        return fail(Code::kInvalid, "", "problem '{}' has a prompt of {} bytes, at most {}", problem.id(),
                    problem.prompt().size(), kPromptBytesMax);
    }
    return ok();
  }

  Problem to_problem(std::string_view split, std::uint64_t number, const Row& row) const {
    std::string prompt =
        options_.prompt ? *options_.prompt : std::string(row.is_humaneval ? kHumanEvalPrompt : kMbppPrompt);
    // Replaces {tests} first, so that braces in the task's text stay unchanged.
    replace_all(prompt, kTestsPlaceholder, row.tests);
    if (const auto offset = prompt.find(kTaskPlaceholder); offset != std::string::npos)
      prompt.replace(offset, kTaskPlaceholder.size(), row.task);
    Problem problem;
    problem.set_id(fmt::format("code/{}/{}", split, number));
    problem.set_prompt(std::move(prompt));
    problem.set_reference(row.reference);
    return problem;
  }

  // The program to grade. MBPP: the imports and the response's code. HumanEval: the head of the function and then the
  // response, which is either the whole function or its body.
  static Result<std::string> program_of(const Problem& problem, const std::string& code) {
    const auto task = json::parse(problem.reference(), nullptr, /*allow_exceptions=*/false);
    const auto text = [&](const char* key) {
      return task[key].is_string() ? task[key].get<std::string>() : std::string();
    };
    if (!task.is_object()) return fail(Code::kInvalid, kOperation, "'{}': its reference holds no tests", problem.id());
    if (task.contains("prompt") && task.contains("entry_point")) {
      const std::string prompt = text("prompt");
      return defines(code, text("entry_point")) ? prompt + "\n" + code : prompt + code;
    }
    std::string program;
    if (task.contains("imports") && task["imports"].is_array())
      for (const json& line : task["imports"])
        if (line.is_string()) program += line.get<std::string>() + "\n";
    return program + code;
  }

  const Options options_;
  const std::uint64_t shuffle_key_;  // chooses the permutations of rows
  std::vector<Row> train_, held_out_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<Grader> grader_;
  mutable ThreadPool threads_;  // last, so that its threads end before the members they use
};

Result<std::unique_ptr<Adapter>> make(std::string_view options_json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(Options options, options_from_json<Options>("code", options_json, use));
  // The learner caches no grades, because its second grading of a program must be a new run.
  options.grader.cache_grades = use == AdapterUse::kScoring;
  auto task = std::make_unique<CodeTask>(std::move(options), seed);
  if (use == AdapterUse::kProblems)
    ECHO_TRY(task->open());
  else
    ECHO_TRY(task->grader());  // a worker that cannot grade fails here, before it generates anything
  return std::unique_ptr<Adapter>(std::move(task));
}

}  // namespace

const BuiltIn kCode{
    .name = "code",
    .meaning =
        "Programs in Python for the problems of MBPP, HumanEval or similar files; run in a sandbox, and "
        "rewarded for the tests they pass",
    .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
    .make = make};

}  // namespace echoline::data_plane
