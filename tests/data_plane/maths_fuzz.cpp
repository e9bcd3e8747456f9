// Any bytes as a response and a reference of every rule for mathematics, and as an expression; checks what must hold
// for every input. libFuzzer calls it when ECHOLINE_FUZZ is on, maths_test on spoiled responses in every ordinary test
// run.
#include <cstdint>
#include <string>
#include <string_view>

#include "data_plane/adapters/maths/expression.hpp"
#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"

using namespace echoline;
using namespace echoline::data_plane::maths;

// The first byte gives the length of the reference.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::size_t split = std::min<std::size_t>(data[0], bytes.size());
  const std::string_view reference = bytes.substr(0, split), response = bytes.substr(split);

  const Characters text = decode(response);
  ECHO_CHECK(decode(encode(text)) == text && count_characters(response) == text.size());
  for (const std::size_t count : {0, 1, 5, 300}) {
    const std::string_view ending = last_characters(response, count);
    const std::size_t ending_size = std::min(count, text.size());
    ECHO_CHECK(response.ends_with(ending) && decode(ending) == text.substr(text.size() - ending_size), "{} characters",
               count);
  }

  for (const Rule rule : {Rule::kGsm8kStrict, Rule::kGsm8kFlexible, Rule::kLastNumber, Rule::kMathDapo,
                          Rule::kMathDapoBoxed, Rule::kMathReward, Rule::kHendrycksMath, Rule::kExact}) {
    const Verdict verdict = grade(rule, response, reference);
    ECHO_CHECK(verdict.trailing <= text.size());
    // An empty answer is right only if the reference asks for it.
    if (verdict.correct && !verdict.answer)
      ECHO_CHECK(rule == Rule::kExact || (rule == Rule::kMathDapo && reference.find("[INVALID]") != reference.npos));
  }
  if (const auto boxed = boxed_answer(response)) ECHO_CHECK(response.find(*boxed) != response.npos);

  static constexpr std::uint32_t kNumbers[] = {1, 2, 3, 7, 10'000};
  const ExpressionRules game{kNumbers, "+-*/", split % 2 == 0};
  constexpr std::uint64_t kTarget = 7;
  const ExpressionResult result = evaluate(response, game, kTarget);
  if (response.size() + 2 <= kExpressionBytesMax && result != ExpressionResult::kNoExpression) {
    ECHO_CHECK(evaluate(std::string(response) + " ", game, kTarget) == result);
    ECHO_CHECK(evaluate(std::string(response) + "+", game, kTarget) == ExpressionResult::kNoExpression);
  }
  return 0;
}
