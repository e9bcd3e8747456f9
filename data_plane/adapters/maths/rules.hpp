// The published grading rules for mathematics, quirk for quirk; docs/tasks.md says what they do and how the agreement
// was measured. Private to data_plane/adapters/.
//
// A rule is a pure function of two texts: any bytes are allowed, time and memory are linear in them, nothing recurses.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/config.hpp"

namespace echoline::data_plane::maths {

enum class Rule {
  kGsm8kStrict,    // the number after the last "#### "
  kGsm8kFlexible,  // the last thing that looks like a number
  kLastNumber,     // the last number, whatever punctuation ends its sentence
  kMathDapo,       // the line after "Answer:", both normalised (verl, math_dapo)
  kMathDapoBoxed,  // the last box of the last 100 characters, to the letter (verl, math_dapo with strict_box_verify)
  kMathReward,     // the last box, both normalised (verl, math_reward)
  kHendrycksMath,  // the same as the authors of MATH evaluate it
  kExact,          // the whole response without white space around it
};

struct Verdict {
  bool correct = false;
  std::optional<std::string> answer = {};  // what stands where the rule looks for an answer, as it is compared
  std::uint64_t trailing = 0;              // characters after it
};

Verdict grade(Rule rule, std::string_view response, std::string_view reference);

// Each rule by itself.
Verdict gsm8k_strict(std::string_view response, std::string_view reference);
Verdict gsm8k_flexible(std::string_view response, std::string_view reference);
Verdict last_number(std::string_view response, std::string_view reference);
Verdict math_dapo(std::string_view response, std::string_view reference);
Verdict math_dapo_boxed(std::string_view response, std::string_view reference);
Verdict math_reward(std::string_view response, std::string_view reference);
Verdict hendrycks_math(std::string_view response, std::string_view reference);
Verdict exact(std::string_view response, std::string_view reference);

// What is in the last box of a worked solution: the answer of a row that states none.
std::optional<std::string> boxed_answer(std::string_view solution);

// The key `rule`, with the names under which the rules are known.
void read_rule(ConfigSection& section, Rule& rule, ConfigDoc doc);

}  // namespace echoline::data_plane::maths
