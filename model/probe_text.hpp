// A text by which policies can be told apart: the learner computes its log-probabilities under a policy, and a worker
// compares them with those that its inference engine returns.
#pragma once
#include <algorithm>
#include <vector>

#include "base/random.hpp"
#include "model/config.hpp"

namespace echoline::model {

// Tokens from the whole vocabulary, the same on every machine. Their number is 64, or 16 for a model of more than a
// billion parameters, because a CPU takes seconds for more. It is at most half of the model's positions, and at
// least 2.
inline std::vector<Token> probe_text(const ModelConfig& config) {
  const std::int64_t tokens_max = config.parameters() > 1'000'000'000 ? 16 : 64;
  const std::int64_t tokens = std::max<std::int64_t>(2, std::min(tokens_max, config.positions_max / 2));
  std::vector<Token> text;
  for (std::int64_t i = 0; i < tokens; ++i)
    text.push_back(
        static_cast<Token>(mix64(static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(config.vocab_size)));
  return text;
}

}  // namespace echoline::model
