// The task "countdown": reach a target from given numbers with + - * /. Problems are generated from an expression, so
// every target can be reached. A hash of the problem (its sorted numbers and its target) and the seed decides whether
// it is held out.
#include <algorithm>
#include <charconv>
#include <set>

#include "base/random.hpp"
#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/adapters/maths/expression.hpp"
#include "data_plane/adapters/maths/reward.hpp"
#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane {
namespace {

using maths::ExpressionResult;
using maths::kCountdownNumberMax;
using maths::kCountdownNumbersMax;
using maths::Verdict;

constexpr std::uint64_t kHeldOutDivisor = 8;           // one problem in 8 is held out
constexpr std::uint64_t kDrawsPerProblemMax = 10'000;  // draws per problem, at most
// Further draws for each held-out problem, because many draws repeat a problem if few are possible.
constexpr std::uint64_t kTriesPerHeldOutProblem = 100;
constexpr std::uint64_t kTargetMax = 1'000'000;
constexpr std::size_t kNameBytesShown = 16;
// Intermediate results may exceed the largest target by this factor; their products still fit in 64 bits.
constexpr std::uint64_t kIntermediateFactor = 10;
constexpr std::string_view kOpen = "<answer>", kClose = "</answer>";
constexpr std::string_view kNumbersPlaceholder = "{numbers}", kTargetPlaceholder = "{target}";

enum class ExpressionPlace { kBare, kTagged };  // where a response has its expression
enum class NumbersUse { kAll, kAny };           // whether an expression must use all numbers

struct Options {
  std::uint64_t numbers = 4, number_max = 99, target_max = 100, evaluation_problems = 256;
  std::vector<std::string> operations{"+", "-", "*", "/"};
  NumbersUse use = NumbersUse::kAll;
  ExpressionPlace form = ExpressionPlace::kTagged;
  std::optional<std::string> prompt;
  maths::RewardWeights reward;
  double allowed_reward = 0;

  void read(ConfigSection s, AdapterUse) {
    s.read("numbers", numbers, {.min = 2, .max = kCountdownNumbersMax}, "numbers in a problem");
    s.read("number_max", number_max, {.min = 2, .max = kCountdownNumberMax}, "the largest number; the least is 1");
    s.read("target_max", target_max, {.min = 2, .max = kTargetMax}, "the largest target; the least is 1");
    s.read("operations", operations,
           "operators that expressions may use: \"+\", \"-\", \"*\", \"/\", each at most once");
    std::set<std::string> seen;
    for (const std::string& name : operations) {
      if (name != "+" && name != "-" && name != "*" && name != "/")
        s.error("operations",
                fmt::format("holds '{}', expected \"+\", \"-\", \"*\" or \"/\"", name.substr(0, kNameBytesShown)));
      if (!seen.insert(name).second)
        s.error("operations", fmt::format("holds '{}' twice", name.substr(0, kNameBytesShown)));
    }
    if (operations.empty()) s.error("operations", "expected a non-empty list");
    s.read_choice("use", use, {{"all", NumbersUse::kAll}, {"any", NumbersUse::kAny}},
                  "whether an expression must have every number exactly once, or each at most once");
    s.read_choice("form", form, {{"tagged", ExpressionPlace::kTagged}, {"bare", ExpressionPlace::kBare}},
                  "where the expression is: between the last `<answer>` and `</answer>`, or the whole response");
    s.read("prompt", prompt,
           {"text of a problem; {numbers} and {target} stand for its numbers and its target",
            "a sentence with the rules"});
    for (const std::string_view placeholder : {kNumbersPlaceholder, kTargetPlaceholder})
      if (prompt && prompt->find(placeholder) == std::string::npos)
        s.error("prompt", fmt::format("expected a text with {}", placeholder));
    s.read("evaluation_problems", evaluation_problems, {.min = 50, .max = 100'000},
           "problems held out of training, determined by the seed");
    ConfigSection parts = s.section("reward", "Reward of a response: right or wrong, and more for its form.");
    reward.read(parts);
    parts.read("allowed", allowed_reward, {.min = 0.0, .max = 1.0},
               "added for an expression of the allowed numbers and operations, whatever its value");
  }
};

std::string default_prompt(const Options& options) {
  return fmt::format(
      "Make {} from the numbers {} with {} and brackets. Use every number {} once. Write only the expression{}.",
      kTargetPlaceholder, kNumbersPlaceholder, fmt::join(options.operations, " "),
      options.use == NumbersUse::kAll ? "exactly" : "at most",
      options.form == ExpressionPlace::kTagged ? fmt::format(", between {} and {}", kOpen, kClose) : "");
}

// The data for grading a response. Problem::reference holds it as "target number number ...".
struct Puzzle {
  std::uint64_t target = 0;
  std::vector<std::uint32_t> numbers;

  std::string reference() const { return fmt::format("{} {}", target, fmt::join(numbers, " ")); }

  static std::optional<Puzzle> parse(std::string_view text) {
    std::vector<std::uint64_t> values;
    const char* cursor = text.data();
    const char* const end = cursor + text.size();
    for (;;) {
      std::uint64_t value = 0;
      const auto [stop, error] = std::from_chars(cursor, end, value);
      constexpr std::size_t kValuesMax = 1 + kCountdownNumbersMax;  // the target and the numbers
      if (error != std::errc{} || values.size() == kValuesMax) return std::nullopt;
      values.push_back(value);
      if (stop == end) break;
      if (*stop != ' ') return std::nullopt;
      cursor = stop + 1;
    }
    Puzzle puzzle{.target = values[0], .numbers = {}};
    if (values.size() < 2 || puzzle.target > kTargetMax) return std::nullopt;
    for (std::size_t i = 1; i < values.size(); ++i) {
      if (values[i] > kCountdownNumberMax) return std::nullopt;
      puzzle.numbers.push_back(static_cast<std::uint32_t>(values[i]));
    }
    return puzzle;
  }
};

struct SolvedPuzzle {
  Puzzle puzzle;
  std::string expression;
};

// A node of the expression under construction: a number, or the result of joining two earlier parts.
struct ExpressionNode {
  std::uint64_t value = 0;
  char operation = 0;               // 0: a number
  std::size_t left = 0, right = 0;  // indices of the joined parts
};

// Writes the expression of a part with no more brackets than it needs.
std::string expression_text(const std::vector<ExpressionNode>& parts, std::size_t index) {
  const ExpressionNode& part = parts[index];
  if (part.operation == 0) return std::to_string(part.value);
  const bool is_product = part.operation == '*' || part.operation == '/';
  const auto operand_text = [&](std::size_t operand, bool is_right) {
    const char inner = parts[operand].operation;
    const bool is_sum = inner == '+' || inner == '-';
    const bool is_divisor = is_right && part.operation == '/', is_subtracted = is_right && part.operation == '-';
    const bool needs_brackets = is_product ? is_sum || (is_divisor && inner != 0) : is_sum && is_subtracted;
    const std::string text = expression_text(parts, operand);
    return needs_brackets ? "(" + text + ")" : text;
  };
  return operand_text(part.left, /*is_right=*/false) + part.operation + operand_text(part.right, /*is_right=*/true);
}

class Countdown final : public Adapter {
 public:
  Countdown(Options options, std::uint64_t seed) : options_(std::move(options)), random_key_(mix64(seed)) {
    for (const std::string& operation : options_.operations) operations_ += operation;
    prompt_ = options_.prompt.value_or(default_prompt(options_));
  }

  // Draws the held-out problems, and enough others to know that training problems exist.
  Status draw_held_out() {
    Random random(random_key_, /*stream=*/1);
    std::set<std::pair<std::vector<std::uint32_t>, std::uint64_t>> seen;
    for (std::uint64_t tries = 0; held_out_.size() < options_.evaluation_problems; ++tries) {
      const std::uint64_t tries_max = kDrawsPerProblemMax + kTriesPerHeldOutProblem * options_.evaluation_problems;
      const auto drawn = tries < tries_max ? draw(random, /*held_out=*/true) : std::nullopt;
      if (!drawn)
        return fail(Code::kInvalid, "countdown",
                    "found only {} different problems to hold out, expected evaluation_problems = {}; raise numbers, "
                    "number_max or target_max, or lower evaluation_problems",
                    held_out_.size(), options_.evaluation_problems);
      std::vector<std::uint32_t> sorted = drawn->puzzle.numbers;
      std::sort(sorted.begin(), sorted.end());
      if (seen.emplace(std::move(sorted), drawn->puzzle.target).second)
        held_out_.push_back(to_problem(fmt::format("countdown/test/{}", held_out_.size()), drawn->puzzle));
    }
    // Draws a training problem, so that an error is reported now and not during the run.
    const auto first_problem = problem(0);
    return first_problem ? ok() : Status(first_problem.error());
  }

  std::string_view name() const override { return "countdown"; }

  Result<Problem> problem(std::uint64_t index) const override {
    if (held_out_.empty())
      return fail(Code::kUnavailable, "countdown problem",
                  "this adapter was made for scoring, so it has no held-out problems");
    const auto drawn = training_puzzle(index);
    if (!drawn)
      return fail(Code::kInvalid, "countdown",
                  "no problem in {} draws reaches a target of at most {}; raise target_max", kDrawsPerProblemMax,
                  options_.target_max);
    return to_problem(fmt::format("countdown/train/{}", index), drawn->puzzle);
  }

  std::vector<Problem> evaluation() const override { return held_out_; }

  Result<Score> score(const Problem& problem, std::string_view response) const override {
    Verdict verdict;
    ExpressionResult result = ExpressionResult::kNoExpression;
    const auto puzzle = Puzzle::parse(problem.reference());
    const auto range = expression_range(response);
    if (puzzle && range) {
      const std::string_view expression = response.substr(range->first, range->second - range->first);
      result = maths::evaluate(
          expression,
          {.numbers = puzzle->numbers, .operations = operations_, .use_all = options_.use == NumbersUse::kAll},
          puzzle->target);
      verdict.correct = result == ExpressionResult::kTarget;
      if (result != ExpressionResult::kNoExpression) verdict.answer = expression;
      if (options_.form == ExpressionPlace::kTagged)
        verdict.trailing = maths::count_characters(response.substr(range->second + kClose.size()));
    }
    Score score = options_.reward.score(verdict, response);
    const bool allowed = result == ExpressionResult::kTarget || result == ExpressionResult::kOtherValue;
    score.components["allowed"] = allowed ? 1 : 0;
    if (allowed) score.reward += options_.allowed_reward;
    return score;
  }

  std::optional<std::string> demonstration(const Problem& problem) const override {
    constexpr std::string_view kPrefix = "countdown/train/";
    if (!problem.id().starts_with(kPrefix)) return std::nullopt;
    const char* const end = problem.id().data() + problem.id().size();
    std::uint64_t index = 0;
    const auto [stop, error] = std::from_chars(problem.id().data() + kPrefix.size(), end, index);
    if (error != std::errc{} || stop != end) return std::nullopt;
    const auto drawn = training_puzzle(index);
    if (!drawn || drawn->puzzle.reference() != problem.reference()) return std::nullopt;
    return options_.form == ExpressionPlace::kBare ? drawn->expression
                                                   : fmt::format("{}{}{}", kOpen, drawn->expression, kClose);
  }

 private:
  std::optional<SolvedPuzzle> training_puzzle(std::uint64_t index) const {
    Random random(random_key_ + 1, index);  // not random_key_, from which the held-out problems are drawn
    return draw(random, /*held_out=*/false);
  }

  // Draws puzzles until is_held_out() of one equals `held_out`. Absent after kDrawsPerProblemMax draws.
  std::optional<SolvedPuzzle> draw(Random& random, bool held_out) const {
    for (std::uint64_t tries = 0; tries < kDrawsPerProblemMax; ++tries) {
      std::optional<SolvedPuzzle> drawn = draw_once(random);
      if (drawn && is_held_out(drawn->puzzle) == held_out) return drawn;
    }
    return std::nullopt;
  }

  // Joins two random parts at a time until one is left. Intermediate results are positive whole numbers not much above
  // the target's limit, so that few draws fail.
  std::optional<SolvedPuzzle> draw_once(Random& random) const {
    SolvedPuzzle drawn;
    std::vector<ExpressionNode> parts;
    std::vector<std::size_t> unjoined;  // indices of parts
    for (std::uint64_t i = 0; i < options_.numbers; ++i) {
      const std::uint64_t number = 1 + random.below(options_.number_max);
      drawn.puzzle.numbers.push_back(static_cast<std::uint32_t>(number));
      unjoined.push_back(parts.size());
      parts.push_back({.value = number});
    }
    while (unjoined.size() > 1) {
      const auto take_random_part = [&] {
        const auto it = unjoined.begin() + static_cast<std::ptrdiff_t>(random.below(unjoined.size()));
        const std::size_t part = *it;
        unjoined.erase(it);
        return part;
      };
      const std::size_t a = take_random_part(), b = take_random_part();
      const bool is_last_join = unjoined.empty();  // its result is the target
      const std::uint64_t limit =
          is_last_join ? options_.target_max : kIntermediateFactor * std::max(options_.target_max, options_.number_max);
      const auto joined = join(random, parts, a, b, limit);
      if (!joined) return std::nullopt;
      unjoined.push_back(parts.size());
      parts.push_back(*joined);
    }
    drawn.puzzle.target = parts.back().value;
    drawn.expression = expression_text(parts, parts.size() - 1);
    return drawn;
  }

  // Joins parts `a` and `b` with a random operation that gives a positive whole number up to `limit`. Absent if no
  // operation does.
  std::optional<ExpressionNode> join(Random& random, const std::vector<ExpressionNode>& parts, std::size_t a,
                                     std::size_t b, std::uint64_t limit) const {
    if (parts[a].value < parts[b].value) std::swap(a, b);
    const std::uint64_t large = parts[a].value, small = parts[b].value;
    ExpressionNode possible[4]{};  // one for each operation
    std::size_t count = 0;
    for (const char operation : operations_) {
      if ((operation == '-' && large == small) || (operation == '/' && large % small != 0)) continue;
      const std::uint64_t value = operation == '+'   ? large + small
                                  : operation == '-' ? large - small
                                  : operation == '*' ? large * small
                                                     : large / small;
      if (value > limit) continue;
      const bool swapped = (operation == '+' || operation == '*') && random.below(2) == 0;  // for variety
      possible[count++] = {.value = value, .operation = operation, .left = swapped ? b : a, .right = swapped ? a : b};
    }
    if (count == 0) return std::nullopt;
    return possible[random.below(count)];
  }

  bool is_held_out(const Puzzle& puzzle) const {
    std::vector<std::uint32_t> sorted = puzzle.numbers;
    std::sort(sorted.begin(), sorted.end());
    std::uint64_t hash = mix64(random_key_ ^ puzzle.target);
    for (const std::uint32_t number : sorted) hash = mix64(hash ^ number);
    return hash % kHeldOutDivisor == 0;
  }

  // Offsets of the expression's first character and of its end. Absent if there is no expression in its place.
  std::optional<std::pair<std::size_t, std::size_t>> expression_range(std::string_view response) const {
    if (options_.form == ExpressionPlace::kBare) return std::pair{std::size_t{0}, response.size()};
    const std::size_t close = response.rfind(kClose);
    const std::size_t open = close == std::string_view::npos ? close : response.substr(0, close).rfind(kOpen);
    if (open == std::string_view::npos) return std::nullopt;
    return std::pair{open + kOpen.size(), close};
  }

  Problem to_problem(std::string id, const Puzzle& puzzle) const {
    std::string text = prompt_;
    const auto fill = [&](std::string_view placeholder, const std::string& value) {
      for (std::size_t offset = text.find(placeholder); offset != std::string::npos;
           offset = text.find(placeholder, offset + value.size()))
        text.replace(offset, placeholder.size(), value);
    };
    fill(kNumbersPlaceholder, fmt::format("{}", fmt::join(puzzle.numbers, ", ")));
    fill(kTargetPlaceholder, std::to_string(puzzle.target));
    Problem problem;
    problem.set_id(std::move(id));
    problem.set_prompt(std::move(text));
    problem.set_reference(puzzle.reference());
    return problem;
  }

  Options options_;
  std::string operations_, prompt_;
  std::uint64_t random_key_;  // from the run's seed: selects all random streams
  std::vector<Problem> held_out_;
};

Result<std::unique_ptr<Adapter>> make(std::string_view json, std::uint64_t seed, AdapterUse use) {
  ECHO_ASSIGN(Options options, options_from_json<Options>("countdown", json, use));
  auto countdown = std::make_unique<Countdown>(std::move(options), seed);
  if (use == AdapterUse::kProblems) ECHO_TRY(countdown->draw_held_out());
  return std::unique_ptr<Adapter>(std::move(countdown));
}

}  // namespace

const BuiltIn kCountdown{.name = "countdown",
                         .meaning = "Make a number from others with + - * /; an expression that equals it is worth 1",
                         .read_options = [](ConfigSection s) { Options().read(s, AdapterUse::kProblems); },
                         .make = make};

}  // namespace echoline::data_plane
