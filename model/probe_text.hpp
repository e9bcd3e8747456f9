// The text that tells policies apart: the learner computes its log-probabilities under a policy, and a worker compares
// them with those of its engine.
#pragma once
#include <algorithm>
#include <vector>

#include "base/random.hpp"
#include "model/config.hpp"

namespace echoline::model {

// Tokens from the whole vocabulary, the same on every machine: 64, but 16 for a model of more than a billion
// parameters, because a CPU takes seconds for more; at most half of the model's positions, at least 2.
inline std::vector<Token> probe_text(const ModelConfig& config) {
  const std::int64_t most = config.parameters() > 1'000'000'000 ? 16 : 64;
  std::vector<Token> text;
  for (std::int64_t i = 0; i < std::max<std::int64_t>(2, std::min(most, config.positions_max / 2)); ++i)
    text.push_back(
        static_cast<Token>(mix64(static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(config.vocab_size)));
  return text;
}

}  // namespace echoline::model
