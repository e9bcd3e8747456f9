// Samples one token from each row of logits, with settings and a uniform random number for each row. Private to model/.
#pragma once
#include <span>
#include <vector>

#include "model/generation.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// How to sample the next token of a row.
struct SampleRequest {
  const Sampling* sampling;
  double uniform;  // [0, 1)
};

// The sampled tokens, one per row.
struct SampledTokens {
  std::vector<Token> tokens;
  std::vector<float> logprobs;  // as in Generation; not finite if the row's logits are not
};

// Samples from row r of logits fp32 [rows, vocab] by requests[r]. Takes the first token at which the cumulative
// probability exceeds the uniform number. Tokens are in the order of the vocabulary or, if top_k, top_p or min_p apply,
// from the most likely one down (equal ones in the order of the vocabulary). `batched`: uses libtorch's operations on
// all rows at once, as always on devices other than a CPU.
SampledTokens sample_tokens(const torch::Tensor& logits, std::span<const SampleRequest> requests, bool batched = false);

}  // namespace echoline::model
