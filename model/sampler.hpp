// Samples tokens from logits, each row by its own settings and one uniform number. Private to model/.
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
  std::vector<float> logprobs;  // as in Generation; not finite if the row's logits are not
};

// Samples from row r of logits fp32 [rows, vocab] by draws[r]. The token is where the cumulative probability exceeds
// the uniform number: in the order of the vocabulary or, if tokens are left out, from the most likely one down (equal
// ones in the order of the vocabulary). `batched`: by libtorch's operations on all rows, as on devices other than a
// CPU.
Drawn draw(const torch::Tensor& logits, std::span<const Draw> draws, bool batched = false);

}  // namespace echoline::model
