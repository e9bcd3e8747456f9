// Many questions for one model, for ask_all(). This header does not need libtorch.
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
  // Returns the next question, or nothing if there is none now. ask_all() ends if that happens while no question is in
  // progress.
  std::function<std::optional<Question>()> next;
  // Optional. Called after every token. Returns true to end the response, for example at a stop string.
  std::function<bool(std::span<const Token> response)> ends;
  // Called once per question, when it ends, with its response or its error. If on_answer() returns an error, ask_all()
  // ends with that error.
  std::function<Status(std::uint64_t id, Result<Generation>)> on_answer;
  std::string device = "cpu";
  int threads = 1;
  std::size_t in_flight_max = 64;  // questions that are in progress at a time
};

}  // namespace echoline::model
