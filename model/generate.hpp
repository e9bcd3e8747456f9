// Many prompts at once, from the first token to the last, and the log-probability of given tokens.
#pragma once
#include <functional>
#include <vector>

#include "model/generation.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// Samples one continuation per prompt, in order. Prompts may differ in length (none empty); equal prompts are read
// once and continued independently. `interrupted` is asked between tokens: true ends all unfinished rows with what they
// have; it may also load new weights into the model, whose log-probabilities then count from the next token on.
// kInvalid: see check_request(). kCorrupt: logits that are not finite. kExhausted: out of memory even for one row.
// kInternal: anything else that libtorch throws.
Result<std::vector<Generation>> generate(Transformer& model, const std::vector<std::vector<Token>>& prompts,
                                         const Sampling& sampling, const std::function<bool()>& interrupted = {});

// Log-probability of each token of `continuation` after `prompt`, as generate() gives it for tokens it has drawn; nats.
// Errors as generate().
Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature = 1.0);

}  // namespace echoline::model
