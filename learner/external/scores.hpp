// What an external trainer's model says of the tokens of a batch, and what that tells of the workers that handed them
// in. Private to learner/external/.
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

// Of every response token of a batch, in its order; nats. NaN: not computed.
struct TokenScores {
  std::vector<float> logprobs;   // log π of the token
  std::vector<float> entropies;  // H of the distribution it was drawn from; empty: of none
};

// A safetensors file with `logprobs`, and if wanted `entropies`, F32 [tokens]. kInvalid says what is wrong.
Result<TokenScores> parse_scores(const std::string& bytes, std::size_t tokens);

struct Scored {
  std::map<WorkerId, Scrutiny> scrutiny;  // responses all of whose trained tokens were scored
  nlohmann::json
      figures;  // entropy, behaviour_kl, scored_responses: over their tokens, as the built-in trainer has them
};

// The scores are of this batch.
Scored scored(const std::vector<schema::Trajectory>& batch, const TokenScores& scores);

}  // namespace echoline::learner
