// Samples tokens from logits, each row by its own settings and one uniform number. Private to model/.
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
// probability exceeds the uniform number. The order is the vocabulary's; if top_k, top_p or min_p apply, it is from the
// most likely token down (equal ones in the order of the vocabulary). `batched`: by libtorch's operations on all rows,
// as on devices other than a CPU.
SampledTokens sample_tokens(const torch::Tensor& logits, std::span<const SampleRequest> requests, bool batched = false);

}  // namespace echoline::model
