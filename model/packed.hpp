// Sequences of different lengths in one row of tokens, for training: no padding, and the prompt that several responses
// share is there once.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "model/segment.hpp"
#include "model/torch.hpp"

namespace echoline::model {

struct ScoredSequence {
  std::span<const std::int64_t> tokens;  // prompt and response
  std::size_t prompt = 0;                // tokens of the prompt, at least 1
  std::span<const float> mask;           // per response token, scored where above 0; empty: all are scored
};

struct PackedTokens {
  torch::Tensor ids;        // int64 [tokens], on the model's device
  torch::Tensor positions;  // int64 [tokens], on the CPU: the position of each token in its own sequence
  torch::Tensor segments;   // int64 [segments, 3], on the CPU: the fields of Segment
  torch::Tensor scored;     // int64 [scores], on the model's device: the tokens whose successor is scored, each once
  torch::Tensor targets;    // int64 [scores], on the model's device: those successors
};

// Packs `sequences` in their order; scores are in the order of the sequences and, within each, of its scored tokens.
// Neighbours with equal prompts share the prompt. Tokens behind the last scored one of a sequence are left out.
PackedTokens pack(const std::vector<ScoredSequence>& sequences, const torch::Device& device);

// The number of tokens that pack() makes of a sequence: alone or as the first of its prompt, and behind one of the same
// prompt.
struct PackedSize {
  std::int64_t alone = 0, behind = 0;
};
PackedSize packed_size(const ScoredSequence& sequence);
bool same_prompt(const ScoredSequence& a, const ScoredSequence& b);

// t on `device`. A copy from the CPU to a GPU is queued and not waited for.
torch::Tensor upload(const torch::Tensor& t, const torch::Device& device);

// The segments of `batch` sequences of `tokens` tokens each, one behind the other.
torch::Tensor uniform_segments(std::int64_t batch, std::int64_t tokens);

}  // namespace echoline::model
