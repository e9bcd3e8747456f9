// Tokens from logits, each row by its own rules and by one uniform number. Private to model/.
#pragma once
#include <span>
#include <vector>

#include "model/generation.hpp"
#include "model/torch.hpp"

namespace echoline::model {

struct Draw {
  const Sampling* sampling;
  double uniform;  // [0, 1)
};

struct Drawn {
  std::vector<Token> tokens;
  std::vector<float> logprobs;  // as in Generation; not finite where the row's logits are not
};

// Row r of logits fp32 [rows, vocab] by draws[r]. The token is where the cumulative probability passes the uniform
// number: over the vocabulary in its order, or, where tokens are left out, from the most likely one down (equal ones in
// the vocabulary's order). `batched`: by libtorch's operations on all rows, as on other devices than a CPU.
Drawn draw(const torch::Tensor& logits, std::span<const Draw> draws, bool batched = false);

}  // namespace echoline::model
