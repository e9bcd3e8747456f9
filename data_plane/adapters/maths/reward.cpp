// Weighs a verdict and the form of its response, for the tasks of this folder.
#include "data_plane/adapters/maths/reward.hpp"

#include <algorithm>

namespace echoline::data_plane::maths {
namespace {

constexpr std::uint64_t kTrailingFormatEnd = 50;  // characters after the answer at which `format` is 0
constexpr std::uint64_t kTrailingPartEnd = 200;   // characters after the answer at which `no_trailing` is 0

bool closes_thoughts(std::string_view response) {
  constexpr std::string_view kClose = "</think>";
  const auto equals_ignoring_case = [](char a, char b) {
    return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
  };
  return std::search(response.begin(), response.end(), kClose.begin(), kClose.end(), equals_ignoring_case) !=
         response.end();
}

}  // namespace

void RewardWeights::read(ConfigSection s) {
  s.read("correct", correct, {.min = 0.0, .max = 1.0}, "reward of a right answer");
  s.read("wrong", wrong, {.min = -1.0, .max = 0.0}, "reward of a wrong or missing answer");
  s.read("format", format, {.min = 0.0, .max = 1.0},
         "added if the answer is in its place and fewer than 50 characters follow");
  s.read("thinking", thinking, {.min = 0.0, .max = 1.0}, "added if the response contains `</think>`");
  s.read("no_trailing", no_trailing, {.min = 0.0, .max = 1.0},
         "added if nothing follows the answer; falls with the text that does, to nothing at 200 characters");
}

Score RewardWeights::score(const Verdict& verdict, std::string_view response) const {
  const bool has_format = verdict.answer && verdict.trailing < kTrailingFormatEnd;
  const std::uint64_t trailing = std::min(verdict.trailing, kTrailingPartEnd);
  const double no_trailing_part =
      verdict.answer ? 1 - static_cast<double>(trailing) / static_cast<double>(kTrailingPartEnd) : 0;
  const double thinking_part = closes_thoughts(response) ? 1 : 0;
  const double reward = (verdict.correct ? correct : wrong) + format * (has_format ? 1 : 0) + thinking * thinking_part +
                        no_trailing * no_trailing_part;
  return {.reward = reward,
          .components = {{"correct", verdict.correct ? 1.0 : 0.0},
                         {"format", has_format ? 1.0 : 0.0},
                         {"thinking", thinking_part},
                         {"no_trailing", no_trailing_part}},
          .correct = verdict.correct};
}

}  // namespace echoline::data_plane::maths
