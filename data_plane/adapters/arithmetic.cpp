// Arithmetic: "37+58=" wants "95". Every problem of the configured space has a number; a seeded permutation puts the
// held-out ones first and the training ones after them, so the two can never meet.
#include <algorithm>
#include <charconv>

#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::uint64_t kOperandMax = 999'999'999;  // products stay inside 63 bits, the space inside 64
constexpr std::uint64_t kEvaluationMin = 200;       // fewer make an accuracy too noisy to compare
constexpr std::uint64_t kEvaluationMax = 100'000;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const auto begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Places that agree, counted from the left, over the longer length: 1 only for equal texts.
double digits_right(std::string_view response, std::string_view reference) {
  const std::size_t longer = std::max(response.size(), reference.size());
  if (longer == 0) return 0;
  std::size_t right = 0;
  for (std::size_t i = 0; i < std::min(response.size(), reference.size()); ++i) right += response[i] == reference[i];
  return static_cast<double>(right) / static_cast<double>(longer);
}

// The operands of "37+58="; false for anything else.
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
        operands_(operand_max + 1),
        space_(operations_.size() * operands_ * operands_),
        evaluation_problems_(evaluation_problems),
        partial_credit_(partial_credit),
        carries_forgotten_(carries_forgotten),
        key_(mix64(seed)) {}

  std::string_view name() const override { return "arithmetic"; }

  Result<Problem> problem(std::uint64_t index) const override {
    return at(evaluation_problems_ + shuffled_cycle(index, space_ - evaluation_problems_, key_ + 1));
  }

  std::vector<Problem> evaluation() const override {
    std::vector<Problem> problems;
    for (std::uint64_t i = 0; i < evaluation_problems_; ++i) problems.push_back(at(i));
    return problems;
  }

  Score score(const Problem& problem, std::string_view response) const override {
    const std::string_view answer = trimmed(response);
    const bool correct = !problem.reference().empty() && answer == problem.reference();
    const double digits = digits_right(answer, problem.reference());
    return {correct ? 1.0 : partial_credit_ * digits, {{"exact", correct ? 1.0 : 0.0}, {"digits", digits}}, correct};
  }

  // Right, or (carries_forgotten > 0) the sum of a careless teacher whom a policy has to outgrow.
  std::optional<std::string> demonstration(const Problem& problem) const override {
    std::uint64_t a = 0, b = 0;
    if (carries_forgotten_ == 0 || !operands_of_sum(problem.prompt(), a, b)) return problem.reference();
    Random random(key_, mix64(a * operands_ + b));
    std::uint64_t sum = 0, carry = 0;
    for (std::uint64_t unit = 1; a > 0 || b > 0 || carry > 0; a /= 10, b /= 10, unit *= 10) {
      const std::uint64_t column = a % 10 + b % 10 + carry;
      sum += column % 10 * unit;
      carry = column >= 10 && random.uniform() >= carries_forgotten_ ? 1 : 0;
    }
    return std::to_string(sum);
  }

 private:
  // Problem at `place` of the permuted space.
  Problem at(std::uint64_t place) const {
    const std::uint64_t number = permuted(place, space_, key_);
    const auto a = static_cast<std::int64_t>(number / operands_ % operands_);
    const auto b = static_cast<std::int64_t>(number % operands_);
    const char operation = operations_[number / (operands_ * operands_)];
    const std::int64_t answer = operation == '+' ? a + b : operation == '-' ? a - b : a * b;
    Problem problem;
    problem.set_id(fmt::format("arithmetic/{}{}{}", a, operation, b));
    problem.set_prompt(fmt::format("{}{}{}=", a, operation, b));
    problem.set_reference(std::to_string(answer));
    return problem;
  }

  std::string operations_;
  std::uint64_t operands_;  // how many values an operand takes: 0 .. operand_max
  std::uint64_t space_;     // how many problems there are
  std::uint64_t evaluation_problems_;
  double partial_credit_;
  double carries_forgotten_;
  std::uint64_t key_;
};

}  // namespace

Result<std::unique_ptr<Adapter>> make_arithmetic(std::string_view config_json, std::uint64_t seed, AdapterUse) {
  ECHO_ASSIGN(const AdapterConfig config,
              AdapterConfig::parse("arithmetic", config_json,
                                   {"operations", "operand_max", "digits", "evaluation_problems", "partial_credit",
                                    "carries_forgotten"}));
  ECHO_ASSIGN(const std::vector<std::string> names, config.texts("operations", {"+", "-", "*"}));
  std::string operations;
  for (const std::string& name : names) {
    if (name != "+" && name != "-" && name != "*")
      return config.wrong("'operations' holds '{}', expected \"+\", \"-\" or \"*\"", name.substr(0, 16));
    if (operations.find(name) != std::string::npos) return config.wrong("'operations' holds '{}' twice", name);
    operations += name;
  }
  if (config.has("operand_max") && config.has("digits"))
    return config.wrong("give 'operand_max' or 'digits' (10^digits - 1), not both");
  ECHO_ASSIGN(const std::uint64_t digits, config.integer("digits", 2, 1, 9));
  std::uint64_t operand_max = 1;
  for (std::uint64_t i = 0; i < digits; ++i) operand_max *= 10;
  ECHO_ASSIGN(operand_max, config.integer("operand_max", operand_max - 1, 1, kOperandMax));
  ECHO_ASSIGN(const double partial_credit, config.number("partial_credit", 0, 0, 1));
  ECHO_ASSIGN(const double carries_forgotten, config.number("carries_forgotten", 0, 0, 1));
  ECHO_ASSIGN(const std::uint64_t evaluation_problems,
              config.integer("evaluation_problems", 256, kEvaluationMin, kEvaluationMax));
  const std::uint64_t space = operations.size() * (operand_max + 1) * (operand_max + 1);
  if (evaluation_problems > space / 2)
    return config.wrong(
        "{} evaluation problems of only {} problems in all leave too few to train on; raise operand_max "
        "or lower evaluation_problems (at least {})",
        evaluation_problems, space, kEvaluationMin);
  return std::unique_ptr<Adapter>(std::make_unique<Arithmetic>(operations, operand_max, evaluation_problems,
                                                               partial_credit, carries_forgotten, seed));
}

}  // namespace echoline::data_plane
