// Parameters and result of a generation; without libtorch.
#pragma once
#include <cstdint>
#include <vector>

#include "model/config.hpp"

namespace echoline::model {

// How to sample the tokens of one sequence. top_k, top_p and min_p exclude tokens, in this order, but never the most
// likely one. top_p applies to the probabilities of the tokens that top_k has kept, scaled to a sum of 1.
struct Sampling {
  double temperature = 1.0;      // 0: greedy
  double top_p = 1.0;            // (0, 1]: keep the fewest most likely tokens with this total probability
  std::int64_t top_k = 0;        // keep this many most likely tokens; 0: all
  double min_p = 0;              // [0, 1]: keep tokens at least this fraction as likely as the most likely one
  std::int64_t tokens_max = 64;  // of the response, with its ending token
  std::vector<Token> eos = {};   // tokens that end the sequence; none: only tokens_max ends it
  // Equal prompts, sampling and weights give equal tokens, independently of other rows (except for the rounding of
  // logits, which may depend on the number of rows in a product).
  std::uint64_t seed = 0;
};

enum class Finish {
  kEos,          // the last token is an ending token
  kLength,       // the sequence has tokens_max tokens
  kStopped,      // the caller ended the sequence
  kInterrupted,  // the caller ended all sequences
};

struct Generation {
  std::vector<Token> tokens;  // without the prompt; the ending token is the last
  // Per token: log softmax(logits / temperature) in nats, over the whole vocabulary; for temperature 0, at
  // temperature 1. It is deliberately not renormalised over the tokens that top_k, top_p and min_p keep. The learner
  // scores the same full distribution, so the importance ratio is exactly 1 for an unchanged policy and measures only
  // the change of weights. Renormalisation would shift every ratio by the kept probability, which the learner cannot
  // recompute.
  std::vector<float> logprobs;
  Finish finish = Finish::kLength;
  // The experts of the prompt's tokens and of `tokens`, [tokens, ModelConfig::expert_choices()], those of a layer
  // ascending; -1: not known, as for a last token, which was not an input of the model. Empty unless asked for.
  std::vector<std::int16_t> experts = {};
};

// kInvalid: the prompt is empty or has an id outside the vocabulary, a sampling parameter is out of range, or prompt
// and tokens_max together exceed the model's positions.
Status check_request(const ModelConfig& config, const std::vector<Token>& prompt, const Sampling& sampling);

}  // namespace echoline::model
