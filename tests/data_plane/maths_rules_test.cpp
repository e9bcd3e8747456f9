// The published grading rules: verdicts of the original programs on this project's cases, and properties of every
// answer.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/random.hpp"
#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::data_plane::maths {
namespace {

const std::map<std::string, Rule> kPublished = {
    {"gsm8k_strict", Rule::kGsm8kStrict}, {"gsm8k_flexible", Rule::kGsm8kFlexible},
    {"math_dapo", Rule::kMathDapo},       {"math_dapo_boxed", Rule::kMathDapoBoxed},
    {"math_reward", Rule::kMathReward},   {"hendrycks_math", Rule::kHendrycksMath},
};

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

// tests/data_plane/maths_cases.jsonl: {rule, why, reference, response or response_hex, correct, answer or answered}.
// `correct` is the published program's verdict, and `answer` the answer it extracts.
TEST(MathsRules, AgreeWithThePublishedOnes) {
  std::ifstream file("tests/data_plane/maths_cases.jsonl");
  ASSERT_TRUE(file) << "the tests run in the root of the source tree";
  std::map<std::string, int> correct_cases, wrong_cases;  // number for each rule
  std::size_t line_number = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    const auto row = nlohmann::json::parse(line);
    const std::string rule = row["rule"];
    const std::string response =
        row.contains("response") ? row["response"].get<std::string>() : from_hex(row["response_hex"]);
    const Verdict verdict = grade(kPublished.at(rule), response, row["reference"].get<std::string>());
    EXPECT_EQ(verdict.correct, row["correct"].get<bool>()) << "line " << line_number << ": " << line;
    if (row.contains("answered")) {
      EXPECT_EQ(verdict.answer.has_value(), row["answered"].get<bool>()) << "line " << line_number << ": " << line;
    } else {
      const auto& answer = row["answer"];
      EXPECT_EQ(verdict.answer, answer.is_null() ? std::nullopt : std::optional(answer.get<std::string>()))
          << "line " << line_number << ": " << line;
    }
    ++(row["correct"] ? correct_cases : wrong_cases)[rule];
  }
  for (const auto& [name, rule] : kPublished) {  // enough cases of both verdicts for each rule
    EXPECT_GE(correct_cases[name], 90) << name;
    EXPECT_GE(wrong_cases[name], 75) << name;
  }
}

TEST(MathsRules, LastNumberForgivesPunctuation) {
  for (const char* response : {"1,800.", "it is 1800", "3 of 1,800.", "1800...", "so 1,800, then.", "$1800$"})
    EXPECT_TRUE(last_number(response, "1800").correct) << response;
  for (const char* response : {"", "...,,,", "1800 of 3", "-1800", "18000", "1800.0"})
    EXPECT_FALSE(last_number(response, "1800").correct) << response;
  EXPECT_TRUE(last_number("it is -3.", "-3").correct);
  EXPECT_EQ(last_number("7 apples", "7").trailing, 7u);
}

TEST(MathsRules, ExactAcceptsTheReferenceOnly) {
  EXPECT_TRUE(exact(" Paris\n", "Paris").correct);
  EXPECT_FALSE(exact("Paris.", "Paris").correct);
  EXPECT_FALSE(exact("paris", "Paris").correct);
  EXPECT_FALSE(exact(" ", "Paris").answer);
}

TEST(MathsRules, TrailingCharactersAreCounted) {
  EXPECT_EQ(gsm8k_strict("#### 5 \u00e9\u00e9", "5").trailing, 3u);
  EXPECT_EQ(math_dapo("Answer: 5\nso", "5").trailing, 3u);
  EXPECT_EQ(math_dapo_boxed("\\boxed{5}$.", "5").trailing, 2u);
  EXPECT_EQ(math_reward("\\boxed{5}$.", "5").trailing, 2u);
  EXPECT_EQ(math_reward("\\boxed 5$.", "5").trailing, 2u);
  EXPECT_EQ(hendrycks_math("\\boxed{5}", "5").trailing, 0u);
}

TEST(MathsText, UndecodableBytesBecomeOneCharacterPerPart) {
  const std::vector<std::pair<std::string, Characters>> cases = {
      {"a\u00e9\u20ac\U0001f600", U"a\u00e9\u20ac\U0001f600"},
      {"\xff\xfe", U"\ufffd\ufffd"},
      {"\x80\xbf", U"\ufffd\ufffd"},
      {"\xe2\x82", U"\ufffd"},
      {"\xe2\x82(", U"\ufffd("},
      {"\xf0\x9f\x98", U"\ufffd"},
      {"\xf0\x80\x80\x80", U"\ufffd\ufffd\ufffd\ufffd"},  // longer than needed
      {"\xc0\xaf", U"\ufffd\ufffd"},
      {"\xed\xa0\x80", U"\ufffd\ufffd\ufffd"},            // a surrogate
      {"\xf4\x90\x80\x80", U"\ufffd\ufffd\ufffd\ufffd"},  // above U+10FFFF
      {std::string("\0x", 2), Characters(U"\0x", 2)},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(decode(bytes), text) << encode(text);
    EXPECT_EQ(count_characters(bytes), text.size());
  }
}

TEST(MathsText, SpacesAndDigits) {
  for (const char32_t c : U"\t\n\v\f\r\x1c\x1f \u0085\u00a0\u1680\u2003\u2028\u202f\u205f\u3000")
    EXPECT_TRUE(c == 0 || is_space(c)) << static_cast<unsigned>(c);
  for (const char32_t c : U"x\x1b\u200b\u2060\ufeff\u180e") EXPECT_FALSE(is_space(c)) << static_cast<unsigned>(c);
  for (const char32_t c : U"09\u00b2\u0660\u0669\u2460\U0001d7ff")
    EXPECT_TRUE(c == 0 || is_digit(c)) << static_cast<unsigned>(c);
  for (const char32_t c : U"/:x\u00bd\u2160\u066a\u3007\U0001d800")
    EXPECT_FALSE(is_digit(c)) << static_cast<unsigned>(c);
  EXPECT_EQ(encode(replaced(U"aXXXb", U"XX", U"-")), "a-Xb");
  EXPECT_EQ(occurrences(U"aaaaa", U"aa"), 2u);
}

// Realistic answers: pieces of LaTeX with balanced braces.
class Generated : public testing::Test {
 protected:
  std::string piece(int depth = 0) {
    static constexpr const char* kPieces[] = {
        "0",    "7",      "42",     "1,234", "0.5",     ".5",   "x",       "-3",      "/", "=",   " ",
        "\\pi", "^2",     "\\%",    "\\!",   "\\$",     "$",    "\\text",  "\\ ",     "a", "an ", "cm",
        "\"",   "\u2212", "\u00b2", "\r",    "\\frac1", "frac", "\\sqrt5", "^\\circ", ",", "\\\\"};
    const std::uint64_t kind = random_.below(depth < 3 ? 12 : 6);
    if (kind < 6) return kPieces[random_.below(std::size(kPieces))];
    if (kind < 8) return "\\frac{" + piece(depth + 1) + "}{" + piece(depth + 1) + "}";
    if (kind == 8) return "\\sqrt{" + piece(depth + 1) + "}";
    if (kind == 9) return "\\text{" + piece(depth + 1) + "}";
    if (kind == 10) return "\\left(" + piece(depth + 1) + "\\right)";
    return piece(depth + 1) + piece(depth + 1);
  }
  std::string noise(std::size_t bytes_max) {
    std::string bytes;
    for (std::size_t n = random_.below(bytes_max + 1); n > 0; --n) bytes += static_cast<char>(random_.below(256));
    return bytes;
  }
  Random random_{17};
};

// Inserts a space before each fraction.
std::string with_spaces(std::string text) {
  for (std::size_t position = 0; (position = text.find("\\frac{", position)) != std::string::npos; position += 2)
    text.insert(position, " ");
  return text;
}

TEST_F(Generated, AnAnswerIsItselfAndEqualityHasNoSides) {
  int equal_pairs = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string a = piece(), b = random_.below(2) == 0 ? with_spaces(a) : piece();
    for (const Rule rule : {Rule::kMathReward, Rule::kHendrycksMath}) {
      ASSERT_TRUE(grade(rule, "\\boxed{" + a + "}", a).correct) << a;
      ASSERT_EQ(grade(rule, "\\boxed{" + a + "}", b).correct, grade(rule, "\\boxed{" + b + "}", a).correct)
          << a << " | " << b;
    }
    const auto without_leading_space = [](std::string text) {
      while (!text.empty() && (text.front() == ' ' || text.front() == '\r')) text.erase(0, 1);
      return text;
    };
    const std::string c = without_leading_space(a), d = without_leading_space(b);
    if (c.empty() || d.empty() || c.size() > 250 || d.size() > 250) continue;
    ASSERT_TRUE(math_dapo("Answer: " + c, c).correct) << c;
    ASSERT_EQ(math_dapo("Answer: " + c, d).correct, math_dapo("Answer: " + d, c).correct) << c << " | " << d;
    equal_pairs += math_dapo("Answer: " + c, d).correct;
  }
  EXPECT_GT(equal_pairs, 8'000);
  EXPECT_LT(equal_pairs, 16'000);
}

TEST_F(Generated, WritingItOtherwiseChangesNothing) {
  const std::vector<std::pair<std::string, std::string>> equal_notations = {
      {"\\frac", "\\dfrac"}, {"\\frac", "\\tfrac"}, {"(", "\\left("}, {")", "\\right)"}, {"x", "\\!x"}};
  for (int i = 0; i < 5'000; ++i) {
    const std::string answer = piece();
    for (const auto& [notation, other_notation] : equal_notations) {
      const std::string rewritten = encode(replaced(decode(answer), decode(notation), decode(other_notation)));
      // Two notations of the same are compared only where the normalisation is defined.
      if (!hendrycks_math("\\boxed{" + answer + "\\!}", answer).correct) continue;
      EXPECT_TRUE(hendrycks_math("\\boxed{" + rewritten + "}", answer).correct) << answer << " | " << rewritten;
      EXPECT_TRUE(math_reward("\\boxed{" + rewritten + "}", answer).correct) << answer << " | " << rewritten;
    }
  }
}

TEST_F(Generated, OnlyTheLastCharactersCount) {
  const std::vector<std::pair<Rule, std::size_t>> characters_read = {{Rule::kGsm8kStrict, 300},
                                                                     {Rule::kGsm8kFlexible, 300},
                                                                     {Rule::kLastNumber, 300},
                                                                     {Rule::kMathDapo, 300},
                                                                     {Rule::kMathDapoBoxed, 100}};
  for (int i = 0; i < 3'000; ++i) {
    std::string response = noise(700) + (random_.below(2) == 0 ? "#### " : "Answer: ") + piece() + noise(400);
    for (const auto& [rule, count] : characters_read) {
      const Verdict verdict = grade(rule, response, "7");
      EXPECT_EQ(grade(rule, last_characters(response, count), "7").answer, verdict.answer);
      if (count_characters(response) >= count) {
        EXPECT_EQ(grade(rule, "\\boxed{9} Answer: 9 #### 9 " + response, "7").answer, verdict.answer);
      }
    }
  }
}

TEST_F(Generated, TheNumberAfterTheMarkCounts) {
  for (int i = 0; i < 5'000; ++i) {
    const auto value = static_cast<std::int64_t>(random_.below(10'000'000)) - 5'000'000;
    const std::string plain = std::to_string(value);
    std::string grouped = plain;
    const std::size_t sign_length = value < 0 ? 1 : 0;
    for (std::size_t position = grouped.size(); position > 3 + sign_length;) grouped.insert(position -= 3, ",");
    const std::string response = noise(300) + "#### " + grouped + (random_.below(2) == 0 ? "\n" : " apples");
    EXPECT_TRUE(gsm8k_strict(response, plain).correct) << grouped;
    EXPECT_FALSE(gsm8k_strict(response, plain + "0").correct) << grouped;
    EXPECT_EQ(gsm8k_flexible(response, plain).correct, grouped == plain) << grouped;
    EXPECT_TRUE(last_number(response, plain).correct) << grouped;
  }
}

// Long and hostile answers take linear time. Otherwise this test runs into its timeout.
TEST(MathsRules, LongResponsesAreLinear) {
  for (const char* part :
       {"\\boxed{", "\\frac", "\\sqrt", "\\text{ ", "{", "}", "\\\\", "%",        "Answer: ", "Answer",  "#### ",
        "9",        "-",      ",",      "\\text{",  "$", "=", " ",    "\xe2\x82", "\x80",     "\\boxed "}) {
    std::string long_text;
    while (long_text.size() < 1u << 20) long_text += part;
    for (const Rule rule : {Rule::kGsm8kStrict, Rule::kGsm8kFlexible, Rule::kLastNumber, Rule::kMathDapo,
                            Rule::kMathDapoBoxed, Rule::kMathReward, Rule::kHendrycksMath, Rule::kExact}) {
      const std::string short_reference = "9", long_reference = long_text.substr(0, 1u << 16);
      (void)grade(rule, long_text, short_reference);
      (void)grade(rule, "\\boxed{" + long_text + "}", short_reference);
      (void)grade(rule, "Answer: 5 #### 5 \\boxed{5}", long_reference);
    }
  }
}

TEST_F(Generated, SurvivesSpoiledBytes) {
  for (int i = 0; i < 20'000; ++i) {  // arithmetic expressions, some of them valid
    static constexpr const char* kSigns[] = {"1", "2", "3", "7",     "+", "-",     "*",
                                             "/", "(", ")", "10000", " ", "(7-3)", "\xc3\x97"};
    std::string bytes(1, static_cast<char>(random_.below(2)));
    for (std::uint64_t n = random_.below(9); n > 0; --n) bytes += kSigns[random_.below(std::size(kSigns))];
    test::fuzz_input(bytes);
  }
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes(1, static_cast<char>(random_.below(60)));
    bytes += piece() + (random_.below(2) == 0 ? "\\boxed{" : "Answer: #### ") + piece() +
             (random_.below(2) == 0 ? "}" : "\n") + noise(20);
    for (std::uint64_t n = random_.below(4); n > 0; --n)
      bytes[random_.below(bytes.size())] = static_cast<char>(random_.below(256));
    test::fuzz_input(bytes);
  }
}

}  // namespace
}  // namespace echoline::data_plane::maths
