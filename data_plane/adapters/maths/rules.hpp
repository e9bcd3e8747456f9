// The published grading rules for mathematics, reproduced exactly. docs/reference/mathematics.md explains them and how
// the agreement was measured. Private to data_plane/adapters/.
//
// A rule is a pure function of two texts. It accepts any bytes, takes linear time and memory, and does not recurse.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/config.hpp"

namespace echoline::data_plane::maths {

enum class Rule {
  kGsm8kStrict,    // the number after the last "#### "
  kGsm8kFlexible,  // the last text in the form of a number
  kLastNumber,     // the last number, without the punctuation that ends its sentence
  kMathDapo,       // the line after "Answer:", both normalised (verl, math_dapo)
  kMathDapoBoxed,  // the last box of the last 100 characters, unnormalised (verl, math_dapo with strict_box_verify)
  kMathReward,     // the last box, both normalised (verl, math_reward)
  kHendrycksMath,  // like kMathReward, in the variant of MATH's authors
  kExact,          // the whole response without white space around it
};

// The grade of a response.
struct Verdict {
  bool correct = false;
  std::optional<std::string> answer = {};  // the text where the rule looks for an answer, in the compared form
  std::uint64_t trailing = 0;              // characters after `answer`
};

Verdict grade(Rule rule, std::string_view response, std::string_view reference);

Verdict gsm8k_strict(std::string_view response, std::string_view reference);
Verdict gsm8k_flexible(std::string_view response, std::string_view reference);
Verdict last_number(std::string_view response, std::string_view reference);
Verdict math_dapo(std::string_view response, std::string_view reference);
Verdict math_dapo_boxed(std::string_view response, std::string_view reference);
Verdict math_reward(std::string_view response, std::string_view reference);
Verdict hendrycks_math(std::string_view response, std::string_view reference);
Verdict exact(std::string_view response, std::string_view reference);

// The content of the last \boxed{} of a worked solution, for a row that does not state its answer.
std::optional<std::string> boxed_answer(std::string_view solution);

// Reads the key `rule`.
void read_rule(ConfigSection& section, Rule& rule, ConfigDoc doc);

}  // namespace echoline::data_plane::maths
