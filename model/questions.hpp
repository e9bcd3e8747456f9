// Sends many questions to one model, as a running batch, for callers without libtorch.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/generation.hpp"

namespace echoline::model {

struct Question {
  std::uint64_t id = 0;  // unique among the questions in progress
  std::vector<Token> prompt;
  Sampling sampling;
};
struct Questions {
  std::function<std::optional<Question>()> next;  // nothing: none now; if also none is in progress, there are no more
  // May be empty; called after every token: true ends the response (a stop string).
  std::function<bool(std::span<const Token> response)> ends;
  // Called once per question, in the order in which they end. A failed question fails alone. An error ends all.
  std::function<Status(std::uint64_t id, Result<Generation>)> hear;
  std::string device = "cpu";
  int threads = 1;
  std::size_t at_once = 64;
};

}  // namespace echoline::model
