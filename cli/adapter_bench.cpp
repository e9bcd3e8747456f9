// echoline adapter bench: measures how long a task takes to grade responses, and compares it with the cheapest grader.
#include <nlohmann/json.hpp>

#include "cli/adapter_verbs.hpp"
#include "cli/output.hpp"
#include "cli/task_choice.hpp"
#include "cli/verbs.hpp"
#include "data_plane/adapters/check/speed.hpp"

namespace echoline::cli {
namespace {

using data_plane::Question;
using data_plane::Speed;
using nlohmann::json;

constexpr std::string_view kOperation = "adapter bench";
constexpr const char* kProbablyWrong = "42";

struct Arguments {
  TaskArguments task_args;
  std::size_t batch = 64, problems = 64;
  double time_s = 4;
  bool as_json = false;
};

// Makes two responses for each problem: the demonstration (a correct response, if the task has one) or the reference,
// and one that is probably wrong. Adds the problems that the task does not return to `failed_problems`.
std::vector<Question> make_questions(const data_plane::Adapter& adapter, std::size_t problems,
                                     std::size_t& failed_problems) {
  std::vector<Question> questions;
  for (std::uint64_t i = 0; i < problems; ++i) {
    const auto problem = adapter.problem(i);
    if (!problem) {
      ++failed_problems;
      continue;
    }
    questions.push_back({*problem, adapter.demonstration(*problem).value_or(problem->reference())});
    questions.push_back({*problem, kProbablyWrong});
  }
  return questions;
}

// The smallest task: it only compares the response with the reference. Its time is the cost of the adapter interface.
struct TextComparison final : data_plane::Adapter {
  std::string_view name() const override { return "exact"; }
  Result<data_plane::Problem> problem(std::uint64_t) const override { return data_plane::Problem(); }
  std::vector<data_plane::Problem> evaluation() const override { return {}; }
  std::optional<std::string> demonstration(const data_plane::Problem&) const override { return std::nullopt; }
  Result<data_plane::Score> score(const data_plane::Problem& problem, std::string_view response) const override {
    data_plane::Score score;
    score.correct = response == problem.reference();
    score.reward = score.correct ? 1 : 0;
    return score;
  }
};

json as_json(const Speed& speed) {
  return {{"calls", speed.calls},   {"failed", speed.failed}, {"median_us", speed.median_us},
          {"p99_us", speed.p99_us}, {"max_us", speed.max_us}, {"batched", speed.batched},
          {"per_s", speed.per_s}};
}

Result<json> bench(const Arguments& args, const TaskChoice& choice) {
  const SystemClock clock;
  const TimePoint start = clock.now();
  auto adapter = data_plane::make_adapter(choice.task.adapter, choice.task.options_json, choice.seed);
  if (!adapter) return as_user_error(std::move(adapter).error());
  const double start_s = seconds(clock.now() - start);
  std::size_t failed_problems = 0;
  const auto questions = make_questions(**adapter, args.problems, failed_problems);
  if (questions.empty()) return fail(Code::kUnavailable, "", "the task returned none of {} problems", failed_problems);
  // Divided 3 to 1 between the task and the baseline. Each is warmed up first, for at most a tenth of its time.
  const Duration total_time = from_seconds(args.time_s), task_time = total_time * 3 / 4, baseline_time = total_time / 4;
  (void)data_plane::measure_speed(**adapter, questions, args.batch, total_time / 20, clock);
  const Speed task_speed = data_plane::measure_speed(**adapter, questions, args.batch, task_time, clock);
  const TextComparison text_comparison;
  (void)data_plane::measure_speed(text_comparison, questions, args.batch, baseline_time / 10, clock);
  const Speed baseline_speed = data_plane::measure_speed(text_comparison, questions, args.batch, baseline_time, clock);
  if (task_speed.failed == task_speed.calls + task_speed.batched)
    return fail(Code::kUnavailable, "", "the task failed for every response; see `echoline adapter check`");
  constexpr double kDivisorMin = 1e-6;  // against a division by 0
  json result = as_json(task_speed);
  result.update({{"schema_version", 1},
                 {"task", choice.label},
                 {"seed", choice.seed},
                 {"batch", task_speed.batch},
                 {"start_seconds", start_s},
                 {"baseline", as_json(baseline_speed)},
                 {"median_over_baseline", task_speed.median_us / std::max(baseline_speed.median_us, kDivisorMin)},
                 {"per_s_of_baseline", task_speed.per_s / std::max(baseline_speed.per_s, kDivisorMin)}});
  return result;
}

void print_result(const json& result) {
  const auto print_row = [](const std::string& name, const json& speed) {
    fmt::print("{:<28}{:>10.2f}{:>10.2f}{:>12.2f}{:>14.0f}\n", name, speed.at("median_us").get<double>(),
               speed.at("p99_us").get<double>(), speed.at("max_us").get<double>(), speed.at("per_s").get<double>());
  };
  fmt::print("{}, seed {}: ready after {:.3f} s\n\n", result.at("task").get<std::string>(), result.at("seed").dump(),
             result.at("start_seconds").get<double>());
  fmt::print("{:<28}{:>10}{:>10}{:>12}{:>14}\n", "", "median us", "p99 us", "most us",
             fmt::format("{} a time, /s", result.at("batch").dump()));
  print_row("a step of the task", result);
  print_row("text compared with text", result.at("baseline"));
  fmt::print("{:<28}{:>10.1f}{:>36.4f}\n", "task / comparison", result.at("median_over_baseline").get<double>(),
             result.at("per_s_of_baseline").get<double>());
  if (result.at("failed") != 0)
    fmt::print("\n{} of {} responses made it fail\n", result.at("failed").dump(),
               result.at("calls").get<std::uint64_t>() + result.at("batched").get<std::uint64_t>());
}

}  // namespace

void add_adapter_bench(Verb& adapter, int& exit_code) {
  auto* verb =
      adapter.add_verb("bench", "Measure how long a task takes for a response, and how many it grades per second");
  auto args = std::make_shared<Arguments>();
  args->task_args.add_options(*verb);
  verb->add_option("--batch", args->batch, "responses graded at a time")->range<std::size_t>(1, 65'536)->show_default();
  verb->add_option("--problems", args->problems, "number of training problems to use")
      ->range<std::size_t>(1, 65'536)
      ->show_default();
  verb->add_option("--seconds", args->time_s, "about how long")->range(0.1, 3600.0)->show_default();
  verb->add_flag("--json", args->as_json, "print JSON (docs/reference/task-verbs.md has the fields)");
  verb->footer("For comparison, the report also has the time of a task that only compares two texts.");
  verb->callback([args, &exit_code] {
    const auto choice = choose_task(args->task_args);
    const auto result = choice ? bench(*args, *choice) : Result<json>(choice.error());
    exit_code = result ? 0 : report_error(kOperation, result.error());
    if (!result) return;
    if (args->as_json)
      fmt::print("{}\n", result->dump(2, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
    else
      print_result(*result);
  });
}

}  // namespace echoline::cli
