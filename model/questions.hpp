// Many questions to one model, a running batch of them at a time; for those who know no tensor.
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
  std::uint64_t id = 0;  // another one for each that is inside
  std::vector<Token> prompt;
  Sampling sampling;
};
struct Questions {
  std::function<std::optional<Question>()> next;  // nothing: none now, and once none is under way, those were all
  std::function<bool(std::span<const Token> response)>
      ends;  // or empty; after every token: true ends it (a stop string)
  // Every one once, in the order in which they end; one that fails, fails alone. An error ends it all.
  std::function<Status(std::uint64_t id, Result<Generation>)> hear;
  std::string device = "cpu";
  int threads = 1;
  std::size_t at_once = 64;
};

}  // namespace echoline::model
