// Countdown: exact values of expressions, solvable problems, and held-out problems that are never trained on.
#include <gtest/gtest.h>

#include <set>

#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/maths/expression.hpp"

namespace echoline::data_plane {
namespace {

using maths::evaluate;
using maths::ExpressionResult;
using maths::ExpressionRules;

std::unique_ptr<Adapter> make_valid(std::string_view options, std::uint64_t seed = 1,
                                    AdapterUse use = AdapterUse::kProblems) {
  auto adapter = make_adapter("countdown", options, seed, use);
  EXPECT_TRUE(adapter) << adapter.error().message();
  return adapter ? std::move(*adapter) : nullptr;
}

TEST(Expression, ReachesTheTargetWithAllowedNumbersOnly) {
  const std::vector<std::uint32_t> numbers{3, 7, 25, 50, 3};
  const ExpressionRules any{numbers, "+-*/", false};
  const std::vector<std::tuple<const char*, std::uint64_t, ExpressionResult>> cases = {
      {"25", 25, ExpressionResult::kTarget},
      {" ( 7 + 3 ) * 3 ", 30, ExpressionResult::kTarget},
      {"7+3*3", 16, ExpressionResult::kTarget},
      {"50-25-7", 18, ExpressionResult::kTarget},
      {"50-(25-7)", 32, ExpressionResult::kTarget},
      {"50/25/(3-7+3+25)", 1, ExpressionResult::kForbidden},  // 25 twice
      {"50/25*3", 6, ExpressionResult::kTarget},
      {"3/7*7", 3, ExpressionResult::kForbidden},
      {"3/7*(25+3)", 12, ExpressionResult::kTarget},  // by way of a fraction
      {"25/(3-7/3)", 0, ExpressionResult::kOtherValue},
      {"-3+7", 4, ExpressionResult::kTarget},
      {"7--3", 10, ExpressionResult::kTarget},
      {"-(3-7)", 4, ExpressionResult::kTarget},
      {"7\xe2\x88\x92"
       "3",
       4, ExpressionResult::kTarget},
      {"7\xc3\x97"
       "3",
       21, ExpressionResult::kTarget},
      {"50\xc3\xb7"
       "25",
       2, ExpressionResult::kTarget},
      {"((((7))))", 7, ExpressionResult::kTarget},
      {"3+3", 6, ExpressionResult::kTarget},  // there are two
      {"3+3+3", 9, ExpressionResult::kForbidden},
      {"8", 8, ExpressionResult::kForbidden},
      {"37", 37, ExpressionResult::kForbidden},
      {"07", 7, ExpressionResult::kTarget},
      {"7", 8, ExpressionResult::kOtherValue},
      {"3/7", 0, ExpressionResult::kOtherValue},
      {"3-7", 4, ExpressionResult::kOtherValue},
      {"7/(3-3)", 1, ExpressionResult::kOtherValue},
      {"(3-3)/(25/(50-50))", 0, ExpressionResult::kForbidden},
      {"7/(3-3)*25", 0, ExpressionResult::kOtherValue},
      {"18446744073709551619", 3, ExpressionResult::kForbidden},
      {"", 0, ExpressionResult::kNoExpression},
      {"()", 0, ExpressionResult::kNoExpression},
      {"7+", 7, ExpressionResult::kNoExpression},
      {"+7", 7, ExpressionResult::kNoExpression},
      {"7 3", 7, ExpressionResult::kNoExpression},
      {"7=7", 7, ExpressionResult::kNoExpression},
      {"7*3=21", 21, ExpressionResult::kNoExpression},
      {"7**3", 343, ExpressionResult::kNoExpression},
      {"7//3", 2, ExpressionResult::kNoExpression},
      {"7.0", 7, ExpressionResult::kNoExpression},
      {"7)", 7, ExpressionResult::kNoExpression},
      {"(7", 7, ExpressionResult::kNoExpression},
      {"7^3", 343, ExpressionResult::kNoExpression},
      {"seven", 7, ExpressionResult::kNoExpression},
      {"7\xe2\x88", 7, ExpressionResult::kNoExpression},
      {"7(3)", 21, ExpressionResult::kNoExpression},
  };
  for (const auto& [text, target, expected] : cases) EXPECT_EQ(evaluate(text, any, target), expected) << text;

  const std::vector<std::uint32_t> three{2, 3, 4};
  EXPECT_EQ(evaluate("2*3+4", {three}, 10), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate("2*3", {three}, 6), ExpressionResult::kForbidden);  // 4 is left
  EXPECT_EQ(evaluate("2*3+4", {three, "+-"}, 10), ExpressionResult::kForbidden);
  EXPECT_EQ(evaluate("2+3-4", {three, "+-"}, 1), ExpressionResult::kTarget);
}

TEST(Expression, HasLimits) {
  const std::vector<std::uint32_t> numbers{7};
  const auto nested = [](std::size_t depth) {
    std::string text;
    text.append(depth, '(').append("7").append(depth, ')');
    return text;
  };
  const auto led = [](std::size_t count, char by) {
    std::string text;
    text.append(count, by).append("7");
    return text;
  };
  EXPECT_EQ(evaluate(nested(64), {numbers}, 7), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate(nested(65), {numbers}, 7), ExpressionResult::kNoExpression);
  EXPECT_EQ(evaluate(led(64, '-'), {numbers}, 7), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate(led(65, '-'), {numbers}, 7), ExpressionResult::kNoExpression);
  EXPECT_EQ(evaluate(led(1023, ' '), {numbers}, 7), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate(led(1024, ' '), {numbers}, 7), ExpressionResult::kNoExpression);
  EXPECT_EQ(evaluate(std::string(1u << 20, '('), {numbers}, 7), ExpressionResult::kNoExpression);
  // The largest possible values, on both sides of a quotient.
  const std::vector<std::uint32_t> large(8, 10'000);
  EXPECT_EQ(evaluate("10000*10000*10000*10000/10000/10000/10000/10000", {large}, 1), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate("(10000/10000+10000/10000)*(10000/10000+10000/10000)", {large}, 4), ExpressionResult::kTarget);
  EXPECT_EQ(evaluate("10000*10000*10000*10000*10000*10000*10000*10000", {large}, 1), ExpressionResult::kOtherValue);
}

// A random expression with its value, computed independently of the parser.
struct Tree {
  std::string text;
  long double value = 0;  // exact enough to tell values of small numbers apart
  bool defined = true;
};

Tree random_tree(Random& random, std::vector<std::uint32_t>& numbers, std::size_t leaves) {
  if (leaves == 1) {
    const auto number = static_cast<std::uint32_t>(1 + random.below(9));
    numbers.push_back(number);
    return {std::to_string(number), static_cast<long double>(number)};
  }
  const std::size_t left = 1 + random.below(leaves - 1);
  const Tree a = random_tree(random, numbers, left), b = random_tree(random, numbers, leaves - left);
  const char operation = "+-*/"[random.below(4)];
  const char* space = random.below(2) == 0 ? " " : "";
  Tree tree{"(" + a.text + space + operation + space + b.text + ")", 0, a.defined && b.defined};
  const bool zero = std::abs(b.value) < 1e-9L;
  tree.defined = tree.defined && (operation != '/' || !zero);
  if (tree.defined)
    tree.value = operation == '+'   ? a.value + b.value
                 : operation == '-' ? a.value - b.value
                 : operation == '*' ? a.value * b.value
                                    : a.value / b.value;
  return tree;
}

TEST(Expression, AgreesWithAnotherEvaluation) {
  Random random(11);
  int reached = 0, fractions = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::uint32_t> numbers;
    const Tree tree = random_tree(random, numbers, 1 + random.below(6));
    const auto nearest = static_cast<std::int64_t>(std::llround(tree.value));
    const bool whole = tree.defined && std::abs(tree.value - static_cast<long double>(nearest)) < 1e-9L;
    fractions += tree.defined && !whole;
    const std::uint64_t target = whole && nearest >= 0 ? static_cast<std::uint64_t>(nearest) : 5;
    const ExpressionResult expected = whole && nearest >= 0 ? ExpressionResult::kTarget : ExpressionResult::kOtherValue;
    ASSERT_EQ(evaluate(tree.text, {numbers}, target), expected) << tree.text;
    ASSERT_EQ(evaluate(tree.text, {numbers}, target + 1),
              tree.defined && whole && nearest == static_cast<std::int64_t>(target) + 1 ? ExpressionResult::kTarget
                                                                                        : ExpressionResult::kOtherValue)
        << tree.text;
    reached += expected == ExpressionResult::kTarget;
    numbers.back() += 100;
    ASSERT_EQ(evaluate(tree.text, {numbers}, target), ExpressionResult::kForbidden) << tree.text;
  }
  EXPECT_GT(reached, 5'000);
  EXPECT_GT(fractions, 3'000);
}

TEST(Countdown, EveryProblemCanBeSolvedAndNoneIsHeldOutAndTrainedOn) {
  for (const char* options : {R"({"numbers":3,"number_max":12,"target_max":99,"operations":["+","-","*"]})", "{}",
                              R"({"numbers":6,"number_max":100,"target_max":999,"form":"bare","use":"any"})",
                              R"({"numbers":8,"number_max":10000,"target_max":1000000})"}) {
    const auto adapter = make_valid(options);
    const auto key = [](const Problem& problem) {  // target, then the numbers in order
      std::vector<std::uint64_t> values;
      std::istringstream in(problem.reference());
      for (std::uint64_t v; in >> v;) values.push_back(v);
      std::sort(values.begin() + 1, values.end());
      return values;
    };
    std::set<std::vector<std::uint64_t>> held_out;
    for (const Problem& problem : adapter->evaluation()) held_out.insert(key(problem));
    EXPECT_EQ(held_out.size(), 256u);
    std::set<std::vector<std::uint64_t>> trained;
    for (std::uint64_t i = 0; i < 3000; ++i) {
      const Problem problem = *adapter->problem(i);
      ASSERT_FALSE(held_out.contains(key(problem))) << problem.prompt();
      trained.insert(key(problem));
      const auto shown = adapter->demonstration(problem);
      ASSERT_TRUE(shown);
      const Score score = *adapter->score(problem, *shown);
      ASSERT_TRUE(score.correct) << problem.reference() << ": " << *shown;
      ASSERT_EQ(score.reward, 1);
      ASSERT_FALSE(adapter->score(problem, *shown + "-1</answer>")->correct);
    }
    EXPECT_GT(trained.size(), 800u);
    EXPECT_TRUE(adapter->problem(~0ull));
    EXPECT_FALSE(adapter->demonstration(adapter->evaluation()[0]));
  }
}

TEST(Countdown, SameSeedSameProblems) {
  const auto a = make_valid("{}", 5), b = make_valid("{}", 5), c = make_valid("{}", 6);
  int differs = 0;
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(a->problem(i)->SerializeAsString(), b->problem(i)->SerializeAsString());
    EXPECT_EQ(a->evaluation()[i].SerializeAsString(), b->evaluation()[i].SerializeAsString());
    differs += a->problem(i)->reference() != c->problem(i)->reference();
  }
  EXPECT_GT(differs, 95);
}

TEST(Countdown, FormsPromptsAndRewards) {
  Problem problem;
  problem.set_reference("24 3 3 8 8");
  const auto tagged = make_valid(R"({"reward":{"correct":0.7,"format":0.1,"allowed":0.2}})", 1, AdapterUse::kScoring);
  EXPECT_EQ(tagged->problem(0).error().code, Code::kUnavailable);
  EXPECT_TRUE(tagged->evaluation().empty());
  EXPECT_DOUBLE_EQ(tagged->score(problem, "Hm. <answer>3</answer> or <answer>8/(3-8/3)</answer>")->reward, 1);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "<answer>8+8+3+3</answer>")->reward, 0.3);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "<answer>8*3</answer>")->reward, 0.1);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "<answer>twenty-four</answer>")->reward, 0);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "8/(3-8/3)")->reward, 0);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "<answer>8/(3-8/3)")->reward, 0);
  EXPECT_DOUBLE_EQ(tagged->score(problem, "</answer><answer>")->reward, 0);
  const auto bare = make_valid(R"({"form":"bare"})", 1, AdapterUse::kScoring);
  EXPECT_TRUE(bare->score(problem, " 8/(3-8/3)\n")->correct);
  EXPECT_FALSE(bare->score(problem, "<answer>8/(3-8/3)</answer>")->correct);
  const auto any = make_valid(R"({"form":"bare","use":"any","operations":["*"]})", 1, AdapterUse::kScoring);
  EXPECT_TRUE(any->score(problem, "8*3")->correct);
  EXPECT_FALSE(any->score(problem, "8+8+8")->correct);
  for (const char* reference : {"", "24", "24 ", "24 3 x", "24  3", "24 -3", "24 3 3 3 3 3 3 3 3 3",
                                "99999999999999999999 3", "24 10001", "2000000 3"}) {
    problem.set_reference(reference);
    EXPECT_FALSE(any->score(problem, "24")->correct) << reference;
  }

  EXPECT_NE(
      make_valid("{}")->problem(0)->prompt().find(
          "with + - * / and brackets. Use every number exactly once. Write only the expression, between <answer>"),
      std::string::npos)
      << make_valid("{}")->problem(0)->prompt();
  const Problem own = *make_valid(R"({"numbers":3,"prompt":"{numbers}={target}: {target}"})")->problem(3);
  const std::string target = own.reference().substr(0, own.reference().find(' '));
  EXPECT_TRUE(own.prompt().ends_with("=" + target + ": " + target)) << own.prompt();
}

TEST(Countdown, WrongOptionsAreNamed) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"numbers":1})", "numbers: expected 2 to 8"},
      {R"({"number_max":10001})", "number_max: expected"},
      {R"({"operations":["+","%"]})", "holds '%'"},
      {R"({"operations":["+","+"]})", "holds '+' twice"},
      {R"({"operations":[]})", "expected a non-empty list"},
      {R"({"prompt":"{numbers}"})", "expected a text with {target}"},
      {R"({"numbers":2,"number_max":3,"target_max":9})", "different problems to hold out"},
      {R"({"numbers":8,"number_max":10000,"target_max":2,"operations":["+"]})", "different problems to hold out"},
  };
  for (const auto& [options, expected] : cases) {
    const auto adapter = make_adapter("countdown", options, 1);
    ASSERT_FALSE(adapter) << options;
    EXPECT_EQ(adapter.error().code, Code::kInvalid);
    EXPECT_NE(adapter.error().message().find(expected), std::string::npos) << adapter.error().message();
  }
}

}  // namespace
}  // namespace echoline::data_plane
