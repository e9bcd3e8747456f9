// Answers of a task's program, damaged in a thousand ways.
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline {
namespace {

TEST(ProcessAnswers, SpoiltAnswersAreRefusedOrRead) {
  const std::string seeds[] = {
      R"({"id":7,"result":{"protocol":1,"name":"x","turns":true,"deterministic":false,"problems":3,"evaluation":2}})",
      (R"({"id":7,"result":{"items":[{"reward":1e3,"components":{"a":-0.5},"correct":false,"done":false,)"
       R"("observation":"o","cut":{"reward":-1}}]}})"),
      (R"({"id":7,"result":{"items":[{"prompt":"p","id":"i","reference":"r","demonstration":"d",)"
       R"("metadata":{"a":[1]}},{"error":"why"}]}})"),
      (R"({"id":7,"result":{"items":[{"reward":0,"done":false,"observation":[{"role":"tool",)"
       R"("content":[{"type":"text","text":"3"}]},{"role":"user","content":"?"}]}]}})"),
      (R"({"id":7,"result":{"items":[{"prompt":[{"role":"system","content":"s"},)"
       R"({"role":"user","content":"u"}],"reference":"r"}]}})"),
      R"({"id":7,"error":{"message":"no"}})"};
  Random random(5, 0);
  for (int round = 0; round < 20'000; ++round) {
    std::string line = seeds[random.below(std::size(seeds))];
    for (std::uint64_t i = random.below(4); i > 0; --i) {
      const std::size_t position = random.below(line.size());
      switch (random.below(3)) {
        case 0:
          line[position] = static_cast<char>(random.below(256));
          break;
        case 1:
          line.erase(position, 1 + random.below(8));
          break;
        default:
          line.insert(position, line.substr(random.below(line.size()), random.below(12)));
      }
      if (line.empty()) line = "{";
    }
    test::fuzz_input(line);
  }
}

}  // namespace
}  // namespace echoline
