// Generates for many prompts, and computes log-probabilities of given tokens.
#pragma once
#include <functional>
#include <vector>

#include "model/generation.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// Samples one continuation per prompt, in order. Prompts may differ in length (none empty). Equal prompts are prefilled
// (run through the model) once and continued independently. `interrupted` is called between tokens. If it returns true,
// unfinished continuations end with their tokens so far. It may also load new weights into the model, which are used
// from the next token on. kInvalid: see check_request(). kCorrupt: logits are not finite. kExhausted: memory does not
// suffice even for one continuation. kInternal: other exceptions of libtorch.
Result<std::vector<Generation>> generate(Transformer& model, const std::vector<std::vector<Token>>& prompts,
                                         const Sampling& sampling, const std::function<bool()>& interrupted = {});

// Log-probability of each token of `continuation` after `prompt`, in nats, as generate() reports it for generated
// tokens. Errors as those of generate().
Result<std::vector<float>> score(Transformer& model, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature = 1.0);

}  // namespace echoline::model
