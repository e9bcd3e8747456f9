// Packs sequences of different lengths into one row of tokens for training, without padding. Responses to the same
// prompt share one copy of it.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "model/segment.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// A sequence whose response tokens are scored: their log-probabilities are computed for training.
struct ScoredSequence {
  std::span<const std::int64_t> tokens;  // prompt and response
  std::size_t prompt = 0;                // number of tokens of the prompt, at least 1
  std::span<const float> mask;           // per response token: scored if above 0; empty: all tokens are scored
  // The experts of the first tokens, or of all, [tokens, `expert_choices` of pack()]; -1: the router chooses.
  std::span<const std::int16_t> experts = {};
};

struct PackedTokens {
  torch::Tensor ids;        // int64 [tokens], on the model's device
  torch::Tensor positions;  // int64 [tokens], on the CPU: the position of each token in its own sequence
  torch::Tensor segments;   // int64 [segments, 3], on the CPU: fields of Segment
  torch::Tensor scored;     // int64 [scores], on the model's device: tokens whose successor is scored, each once
  torch::Tensor targets;    // int64 [scores], on the model's device: ids of the successors
  // int64 [tokens, expert choices of a token], on the model's device: see Routing::given; undefined: no sequence has
  // any
  torch::Tensor experts;
};

// Packs `sequences` in order. The scores are ordered by sequence, then by token. Adjacent sequences with equal prompts
// share the prompt's tokens, and the experts that the first of them names for these. Tokens after the last scored token
// of a sequence are left out. `expert_choices` is ModelConfig::expert_choices().
PackedTokens pack(const std::vector<ScoredSequence>& sequences, const torch::Device& device,
                  std::int64_t expert_choices = 0);

// The number of tokens that pack() uses for a sequence.
struct PackedSize {
  std::int64_t with_prompt = 0;     // if no sequence with the same prompt precedes it
  std::int64_t without_prompt = 0;  // after a sequence with the same prompt
};
PackedSize packed_size(const ScoredSequence& sequence);
bool same_prompt(const ScoredSequence& a, const ScoredSequence& b);

// Copies t to `device`. A copy from the CPU to a GPU is queued, not awaited.
torch::Tensor upload(const torch::Tensor& t, const torch::Device& device);

// The segments of `batch` consecutive sequences of `tokens` tokens each, without shared prompts.
torch::Tensor uniform_segments(std::int64_t batch, std::int64_t tokens);

}  // namespace echoline::model
