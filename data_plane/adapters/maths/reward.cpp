#include "data_plane/adapters/maths/reward.hpp"

#include <algorithm>

namespace echoline::data_plane::maths {
namespace {

constexpr std::uint64_t kTrailingForFormat = 50, kTrailingForNothing = 200;  // characters

bool closes_thoughts(std::string_view response) {
  constexpr std::string_view kClose = "</think>";
  const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b; };
  return std::search(response.begin(), response.end(), kClose.begin(), kClose.end(), same) != response.end();
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
  const bool tidy = verdict.answer && verdict.trailing < kTrailingForFormat;
  const std::uint64_t trailing = std::min(verdict.trailing, kTrailingForNothing);
  const double ends = verdict.answer ? 1 - static_cast<double>(trailing) / static_cast<double>(kTrailingForNothing) : 0;
  const double thinks = closes_thoughts(response) ? 1 : 0;
  const double reward =
      (verdict.correct ? correct : wrong) + format * (tidy ? 1 : 0) + thinking * thinks + no_trailing * ends;
  return {reward,
          {{"correct", verdict.correct ? 1.0 : 0.0},
           {"format", tidy ? 1.0 : 0.0},
           {"thinking", thinks},
           {"no_trailing", ends}},
          verdict.correct};
}

}  // namespace echoline::data_plane::maths
