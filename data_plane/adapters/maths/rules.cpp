// Chooses the grading rule, and implements the shortest one.
#include "data_plane/adapters/maths/rules.hpp"

#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane::maths {

Verdict exact(std::string_view response, std::string_view reference) {
  const Characters text = decode(response);
  const CharacterView answer = trimmed(text);
  if (answer.empty()) return {.correct = reference.empty()};
  return {.correct = answer == trimmed(decode(reference)), .answer = encode(answer)};
}

Verdict grade(Rule rule, std::string_view response, std::string_view reference) {
  switch (rule) {
    case Rule::kGsm8kStrict:
      return gsm8k_strict(response, reference);
    case Rule::kGsm8kFlexible:
      return gsm8k_flexible(response, reference);
    case Rule::kLastNumber:
      return last_number(response, reference);
    case Rule::kMathDapo:
      return math_dapo(response, reference);
    case Rule::kMathDapoBoxed:
      return math_dapo_boxed(response, reference);
    case Rule::kMathReward:
      return math_reward(response, reference);
    case Rule::kHendrycksMath:
      return hendrycks_math(response, reference);
    case Rule::kExact:
      return exact(response, reference);
  }
  return {};
}

void read_rule(ConfigSection& section, Rule& rule, ConfigDoc doc) {
  section.read_choice("rule", rule,
                      {{"gsm8k_strict", Rule::kGsm8kStrict},
                       {"gsm8k_flexible", Rule::kGsm8kFlexible},
                       {"last_number", Rule::kLastNumber},
                       {"math_dapo", Rule::kMathDapo},
                       {"math_dapo_boxed", Rule::kMathDapoBoxed},
                       {"math_reward", Rule::kMathReward},
                       {"hendrycks_math", Rule::kHendrycksMath},
                       {"exact", Rule::kExact}},
                      doc);
}

}  // namespace echoline::data_plane::maths
