// Batched sampling with a KV cache, and the log-probability of every token under the policy that drew it.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "model/transformer.hpp"

namespace echoline::model {

struct SamplingOptions {
  double temperature = 1.0;      // 0: greedy
  double top_p = 1.0;            // (0, 1]: keep the fewest most likely tokens that hold this much probability
  std::int64_t tokens_max = 64;  // per row, the ending token included
  std::vector<Token> eos = {};   // a row ends with the first of these; none: only tokens_max ends it
  std::uint64_t seed = 0;        // the same prompts, options and weights give the same tokens
};

enum class Finish { kEos, kLength, kInterrupted };

struct Generation {
  std::vector<Token> tokens;  // without the prompt; the ending token is the last
  // Per token: log softmax(logits / temperature), nats, over the whole vocabulary (temperature 0: temperature 1).
  // With top_p < 1 this is deliberately not the renormalised nucleus: the learner scores the same full distribution,
  // so the importance ratio is exactly 1 for an unchanged policy and measures only how far the weights have moved.
  // Renormalised values would shift every ratio by the nucleus's mass, which the learner cannot recompute.
  std::vector<float> logprobs;
  Finish finish = Finish::kLength;
};

// Samples one continuation per prompt, in order. Prompts may differ in length (none empty); equal prompts are read
// once. `interrupted` is asked between tokens: true ends all unfinished rows with what they have; it may also load
// new weights into the model, whose log-probabilities then count from the next token on.
// kInvalid: an empty prompt, an id outside the vocabulary, options out of range, or a row beyond positions_max.
// kCorrupt: logits that are not finite. kExhausted: out of memory. kInternal: anything else that libtorch throws.
Result<std::vector<Generation>> generate(Transformer& model, const std::vector<std::vector<Token>>& prompts,
                                         const SamplingOptions& options, const std::function<bool()>& interrupted = {});

// Log-probability of each token of `continuation` after `prompt`, as generate() gives it for tokens it has drawn; nats.
// Errors as generate().
Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature = 1.0);

}  // namespace echoline::model
