// The reward of a response as a weighted sum of named parts. Private to data_plane/adapters/.
#pragma once
#include <string_view>

#include "base/config.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/maths/rules.hpp"

namespace echoline::data_plane::maths {

// The parts, each from 0 to 1:
//   correct      the verdict
//   format       there is an answer where the rule looks for one, and fewer than 50 characters follow it
//   thinking     the response closes its thoughts: it contains "</think>", upper or lower case
//   no_trailing  1 if nothing follows the answer, 0.005 less for every character that does
// reward = (correct or wrong) + format + thinking + no_trailing, each times its weight. PULSE trains with 0.7, 0, 0.15,
// 0.1 and 0.05 (Miahi and Belilovsky 2026, arXiv:2602.03839).
struct RewardWeights {
  double correct = 1, wrong = 0, format = 0, thinking = 0, no_trailing = 0;

  void read(ConfigSection section);
  Score score(const Verdict& verdict, std::string_view response) const;
};

}  // namespace echoline::data_plane::maths
