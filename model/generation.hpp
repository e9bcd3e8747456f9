// What is asked of a continuation and what comes back; without libtorch.
#pragma once
#include <cstdint>
#include <vector>

#include "model/config.hpp"

namespace echoline::model {

// How the tokens of one sequence are drawn. top_k, top_p and min_p leave tokens out in this order, the most likely one
// never; top_p measures in what top_k has left.
struct Sampling {
  double temperature = 1.0;      // 0: greedy
  double top_p = 1.0;            // (0, 1]: keep the fewest most likely tokens that hold this much probability
  std::int64_t top_k = 0;        // keep so many most likely tokens; 0: all
  double min_p = 0;              // [0, 1]: keep tokens at least this share as likely as the most likely one
  std::int64_t tokens_max = 64;  // the ending token included
  std::vector<Token> eos = {};   // ends with the first of these; none: only tokens_max ends it
  // The same prompt, sampling and weights give the same tokens, whatever is computed beside them (but for the rounding
  // of logits, which may differ with the number of rows in a product).
  std::uint64_t seed = 0;
};
using SamplingOptions = Sampling;

enum class Finish {
  kEos,          // with an ending token
  kLength,       // tokens_max
  kStopped,      // whoever asked for it had enough
  kInterrupted,  // all had to stop
};

struct Generation {
  std::vector<Token> tokens;  // without the prompt; the ending token is the last
  // Per token: log softmax(logits / temperature), nats, over the whole vocabulary (temperature 0: temperature 1).
  // Where tokens were left out this is deliberately not the renormalised rest: the learner scores the same full
  // distribution, so the importance ratio is exactly 1 for an unchanged policy and measures only how far the weights
  // have moved. Renormalised values would shift every ratio by the mass kept, which the learner cannot recompute.
  std::vector<float> logprobs;
  Finish finish = Finish::kLength;
};

// kInvalid: an empty prompt, an id outside the vocabulary, sampling out of range, or more than positions_max tokens.
Status check_request(const ModelConfig& config, const std::vector<Token>& prompt, const Sampling& sampling);

}  // namespace echoline::model
