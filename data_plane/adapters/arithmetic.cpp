// The task "arithmetic": "37+58=" expects "95". Every problem of the configured space has a number. A seeded
// permutation puts the held-out problems first and the training problems after them, so the two sets never overlap.
#include <algorithm>
#include <charconv>

#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::uint64_t kOperandMax = 999'999'999;  // products fit in 63 bits, the number of problems in 64
constexpr std::uint64_t kEvaluationMin = 200;       // a measured accuracy on fewer problems is too noisy to compare
constexpr std::uint64_t kEvaluationMax = 100'000;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const auto begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Equal digits counted from the left, divided by the longer length: 1 only for equal texts.
double correct_digit_share(std::string_view response, std::string_view reference) {
  const std::size_t longer = std::max(response.size(), reference.size());
  if (longer == 0) return 0;
  std::size_t correct_digits = 0;
  for (std::size_t i = 0; i < std::min(response.size(), reference.size()); ++i)
    correct_digits += response[i] == reference[i];
  return static_cast<double>(correct_digits) / static_cast<double>(longer);
}

// Reads the operands of "37+58=". False for any other text.
bool operands_of_sum(std::string_view prompt, std::uint64_t& a, std::uint64_t& b) {
  const char* const end = prompt.data() + prompt.size();
  const auto first = std::from_chars(prompt.data(), end, a);
  if (first.ec != std::errc{} || first.ptr == end || *first.ptr != '+') return false;
  const auto second = std::from_chars(first.ptr + 1, end, b);
  return second.ec == std::errc{};
}

class Arithmetic final : public Adapter {
 public:
  Arithmetic(std::string operations, std::uint64_t operand_max, std::uint64_t evaluation_problems,
             double partial_credit, double carries_forgotten, std::uint64_t seed)
      : operations_(std::move(operations)),
        operand_values_(operand_max + 1),
        problem_count_(operations_.size() * operand_values_ * operand_values_),
        evaluation_problems_(evaluation_problems),
        partial_credit_(partial_credit),
        carries_forgotten_(carries_forgotten),
        random_key_(mix64(seed)) {}

  std::string_view name() const override { return "arithmetic"; }

  Result<Problem> problem(std::uint64_t index) const override {
    return problem_at(evaluation_problems_ +
                      shuffled_cycle(index, problem_count_ - evaluation_problems_, random_key_ + 1));
  }

  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::uint64_t i = 0; i < evaluation_problems_; ++i) problems.push_back(problem_at(i));
    return problems;
  }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    const std::string_view answer = trimmed(response);
    const bool correct = !problem.reference().empty() && answer == problem.reference();
    const double digits = correct_digit_share(answer, problem.reference());
    return Score{.reward = correct ? 1.0 : partial_credit_ * digits,
                 .components = {{"exact", correct ? 1.0 : 0.0}, {"digits", digits}},
                 .correct = correct};
  }

  // The correct result. For a sum, if carries_forgotten > 0: the result of a careless teacher that the policy can
  // surpass.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    std::uint64_t a = 0, b = 0;
    if (carries_forgotten_ == 0 || !operands_of_sum(problem.prompt(), a, b)) return problem.reference();
    Random random(random_key_, mix64(a * operand_values_ + b));  // the same mistakes each time
    std::uint64_t sum = 0, carry = 0;
    // Adds column by column, from the right; a forgotten carry is lost.
    for (std::uint64_t place_value = 1; a > 0 || b > 0 || carry > 0; a /= 10, b /= 10, place_value *= 10) {
      const std::uint64_t column = a % 10 + b % 10 + carry;
      sum += column % 10 * place_value;
      carry = column >= 10 && random.uniform() >= carries_forgotten_ ? 1 : 0;
    }
    return std::to_string(sum);
  }

 private:
  // The problem at a position of the seeded permutation.
  Problem problem_at(std::uint64_t position) const {
    const std::uint64_t number = permuted(position, problem_count_, random_key_);
    const auto a = static_cast<std::int64_t>(number / operand_values_ % operand_values_);
    const auto b = static_cast<std::int64_t>(number % operand_values_);
    const char operation = operations_[number / (operand_values_ * operand_values_)];
    const std::int64_t answer = operation == '+' ? a + b : operation == '-' ? a - b : a * b;
    Problem problem;
    problem.set_id(fmt::format("arithmetic/{}{}{}", a, operation, b));
    problem.set_prompt(fmt::format("{}{}{}=", a, operation, b));
    problem.set_reference(std::to_string(answer));
    return problem;
  }

  std::string operations_;
  std::uint64_t operand_values_;  // number of values of an operand: 0 .. operand_max
  std::uint64_t problem_count_;
  std::uint64_t evaluation_problems_;
  double partial_credit_;
  double carries_forgotten_;
  std::uint64_t random_key_;  // chooses the permutation of all problems; plus 1, the order of the training problems
};

struct Options {
  std::vector<std::string> operations{"+", "-", "*"};
  std::uint64_t operand_max = 99;
  std::uint64_t evaluation_problems = 256;
  double partial_credit = 0;
  double carries_forgotten = 0;

  void read(ConfigSection s, AdapterUse) {
    s.read("operations", operations, "operators of the problems: \"+\", \"-\", \"*\", each at most once");
    for (std::size_t i = 0; i < operations.size(); ++i) {
      const std::string& name = operations[i];
      if (name != "+" && name != "-" && name != "*")
        s.error("operations", fmt::format("holds '{}', expected \"+\", \"-\" or \"*\"", name.substr(0, 16)));
      const auto earlier_end = operations.begin() + static_cast<std::ptrdiff_t>(i);
      if (std::find(operations.begin(), earlier_end, name) != earlier_end)
        s.error("operations", fmt::format("holds '{}' twice", name));
    }
    if (operations.empty()) s.error("operations", "expected a non-empty list");
    const bool has_digits = s.has("digits");
    if (has_digits && s.has("operand_max"))
      s.error("digits", "expected 'operand_max' or 'digits' (10^digits - 1), not both");
    std::uint64_t digits = 2;
    s.read("digits", digits, {.min = 1, .max = 9},
           {"instead of `operand_max`: operands have up to this many digits", "`operand_max` counts"});
    // 10^digits - 1, which `operand_max` overrides.
    for (operand_max = 10; digits > 1; --digits) operand_max *= 10;
    --operand_max;
    s.read("operand_max", operand_max, {.min = 1, .max = kOperandMax}, {"the largest operand; the least is 0", "`99`"});
    s.read("evaluation_problems", evaluation_problems, {.min = kEvaluationMin, .max = kEvaluationMax},
           "problems held out of training, determined by the seed; at most half of all problems");
    s.read("partial_credit", partial_credit, {.min = 0.0, .max = 1.0},
           "reward of a wrong answer, times its share of correct digits; a right answer has 1");
    s.read("carries_forgotten", carries_forgotten, {.min = 0.0, .max = 1.0},
           "probability that the warm start's teacher forgets a carry, so that the policy can surpass it");
    const std::uint64_t problem_count = operations.size() * (operand_max + 1) * (operand_max + 1);
    if (!operations.empty() && evaluation_problems > problem_count / 2)
      s.error("evaluation_problems", fmt::format("{} evaluation problems out of {} problems leave too few to train on; "
                                                 "raise operand_max or lower evaluation_problems (at least {})",
                                                 evaluation_problems, problem_count, kEvaluationMin));
  }
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(const Options options, options_from_json<Options>("arithmetic", json, use));
  std::string operations;
  for (const std::string& name : options.operations) operations += name;
  return std::unique_ptr<Adapter>(std::make_unique<Arithmetic>(operations, options.operand_max,
                                                               options.evaluation_problems, options.partial_credit,
                                                               options.carries_forgotten, seed));
}

}  // namespace

const BuiltIn kArithmetic{.name = "arithmetic",
                          .meaning = "Sums, differences and products such as \"37+58=\"; a right answer is worth 1",
                          .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                          .make = make};

}  // namespace echoline::data_plane
