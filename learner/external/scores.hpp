// An external trainer's log-probabilities of a batch's tokens, and their use for judging the workers. Private to
// learner/external/.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/credibility.hpp"

namespace echoline::learner {

// Values for every response token of a batch, in the order of the tokens; nats. NaN: not computed.
struct TokenScores {
  std::vector<float> logprobs;   // log π of the token
  std::vector<float> entropies;  // entropy of the token's distribution; empty: not computed
};

// Parses a safetensors file with `logprobs` and optionally `entropies`, F32 [tokens]. kInvalid with the reason.
Result<TokenScores> parse_scores(const std::string& bytes, std::size_t tokens);

struct ScoreComparison {
  std::map<WorkerId, Scrutiny> scrutiny;  // of the responses whose trained tokens all have scores
  // entropy, behaviour_kl and scored_responses, over the tokens of these responses, as in the built-in trainer.
  nlohmann::json figures;
};

// `scores` must belong to `batch`.
ScoreComparison compare_scores(const std::vector<schema::Trajectory>& batch, const TokenScores& scores);

}  // namespace echoline::learner
