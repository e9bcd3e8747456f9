// The Qwen3 decoder on libtorch, with Hugging Face's parameter names.
//
// RMSNorm, rotary positions, grouped-query attention with a per-head norm on queries and keys, SwiGLU; no biases.
// Parameters have the compute type: fp32 on a CPU (bf16 products are slow there), holding values that are exact in
// bf16 once a policy was loaded; bf16 on CUDA.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// Keys and values of the tokens already seen; memory for `capacity` tokens is taken at once.
struct KvCache {
  KvCache() = default;
  KvCache(const ModelConfig& config, std::int64_t batch, std::int64_t capacity, const torch::Device& device,
          torch::ScalarType dtype);
  // Row i becomes row rows[i] (int64); for repeating a prefix or dropping finished rows.
  void select_rows(const torch::Tensor& rows);

  std::vector<torch::Tensor> keys;    // per layer [batch, kv_heads, capacity, head_dim]
  std::vector<torch::Tensor> values;  // per layer [batch, kv_heads, capacity, head_dim]
  std::int64_t length = 0;            // tokens held
  std::int64_t capacity = 0;
};

// Where tokens stand and which keys exist. Right padding needs none of this: a causal model never looks ahead.
struct Layout {
  torch::Tensor positions;  // int64 [batch, tokens]; undefined: cache length, cache length + 1, ...
  torch::Tensor key_mask;   // bool [batch, cache length + tokens], true = a real token; undefined: all real
};

// Left padding: row r of [batch, tokens_max] starts with tokens_max - lengths[r] pads.
Layout left_padded(const std::vector<std::int64_t>& lengths, const torch::Device& device);

// Log-probabilities of given tokens, and the entropy of the distributions they were taken from.
struct TokenScores {
  torch::Tensor logprobs;  // fp32 [batch, tokens - 1]: entry t scores ids[:, t + 1] given ids[:, 0..t]; nats
  torch::Tensor entropy;   // fp32 [batch, tokens - 1], nats, without gradient
};

// Not thread-safe. Throws c10::Error on wrong shapes, like every torch module; generate() and weights.hpp do not.
class Transformer : public torch::nn::Module {
 public:
  // Uninitialised weights on `device`; the type is compute_dtype(device) unless given. Do not move it afterwards.
  explicit Transformer(const ModelConfig& config, torch::Device device = torch::kCPU,
                       std::optional<torch::ScalarType> dtype = std::nullopt);
  ~Transformer() override;

  // ids int64 [batch, tokens] -> logits fp32 [batch, tokens, vocab]. With a cache the tokens continue those it
  // holds and are added to it.
  torch::Tensor forward(const torch::Tensor& ids, const Layout& layout = {}, KvCache* cache = nullptr);
  // The last layer's normalised hidden states [batch, tokens, hidden]; arguments as in forward().
  torch::Tensor hidden_states(const torch::Tensor& ids, const Layout& layout = {}, KvCache* cache = nullptr);
  // Hidden states [..., hidden] -> logits fp32 [..., vocab].
  torch::Tensor logits(const torch::Tensor& hidden) const;

  // Scores the tokens of right-padded ids [batch, tokens] under softmax(logits / temperature). Only entries where
  // `mask` (bool [batch, tokens - 1]; undefined: all) is true are computed, the others are 0. Logits exist for a
  // bounded number of positions at a time, in the backward pass too.
  TokenScores token_logprobs(const torch::Tensor& ids, double temperature = 1.0, const torch::Tensor& mask = {});

  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  torch::ScalarType dtype() const;

  struct Layer;

 private:
  ModelConfig config_;
  torch::Tensor embedding_, norm_, lm_head_;  // lm_head_ is embedding_ when tied
  std::vector<Layer> layers_;
  torch::Tensor rope_cos_, rope_sin_;  // fp32 [positions, head_dim], grown on demand
  void grow_rope(std::int64_t positions);
};

// Threads that one operation may use, in libtorch and in its BLAS, for the whole process. Several processes on one
// machine each want 1: the BLAS starts a thread per core otherwise, and they fight. Call before the first operation.
void use_threads(int threads);

// fp32 on a CPU, bf16 elsewhere.
torch::ScalarType compute_dtype(const torch::Device& device);

// Uninitialised weights, for a policy that is loaded next. kInvalid for an impossible shape.
Result<std::shared_ptr<Transformer>> create(const ModelConfig& config, torch::Device device = torch::kCPU);

// A fresh model: every matrix normal(0, initializer_range), every norm 1, rounded to bf16; the same numbers for the
// same seed on every machine. kInvalid for an impossible shape.
Result<std::shared_ptr<Transformer>> init(const ModelConfig& config, std::uint64_t seed,
                                          torch::Device device = torch::kCPU);

}  // namespace echoline::model
