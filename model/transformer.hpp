// The decoder of the Qwen3, Qwen2 and Llama families on libtorch, with Hugging Face's parameter names.
//
// RMSNorm, rotary positions, grouped-query attention, SwiGLU. Qwen3 has a norm on every head of queries and keys, Qwen2
// a bias on queries, keys and values, Llama 3 slowed rotations for long texts. Parameters are fp32 on a CPU, holding
// values that are exact in bf16 once a policy was loaded, and bf16 on CUDA, which then computes in it. A CPU that only
// generates may keep them in bf16: without gradients it computes in fp32 all the same, with the same results, and reads
// half the bytes. With gradients everything is computed in the parameters' type (norms, rotations, softmax over the
// vocabulary and sums of gradients in fp32).
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config.hpp"
#include "model/packed.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// Stands in for the attention of a pass's tokens to each other, for who keeps keys and values (model/paged_cache).
class Attention {
 public:
  virtual ~Attention() = default;
  // Of one layer: q [batch, tokens, heads, dim], k and v [batch, tokens, kv_heads, dim]
  // -> [batch * tokens, heads * dim].
  // The scale of the scores, 1 / sqrt(dim), is in q and k already.
  virtual torch::Tensor attend(std::size_t layer, const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v) = 0;
};

// What a pass does without one: every token sees itself and those before it in its row. Right padding needs nothing
// more: a causal model never looks ahead.
torch::Tensor attend_causally(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);

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

  // ids int64 [batch, tokens] -> logits fp32 [batch, tokens, vocab].
  torch::Tensor forward(const torch::Tensor& ids);
  // The last layer's normalised hidden states [batch, tokens, hidden]. The tokens stand at the given positions (int64
  // [batch, tokens] on the CPU; undefined: 0, 1, ... in every row).
  torch::Tensor hidden_states(const torch::Tensor& ids, const torch::Tensor& positions = {},
                              Attention* attention = nullptr);
  // Hidden states [..., hidden] -> logits fp32 [..., vocab].
  torch::Tensor logits(const torch::Tensor& hidden) const;

  // Gradients from now on at the price of a second pass: of each layer only its input is kept, the rest is computed
  // again.
  void recompute_layers(bool on) { recompute_ = on; }

  // Scores the tokens of right-padded ids [batch, tokens] under softmax(logits / temperature). Only entries where
  // `mask` (bool [batch, tokens - 1]; undefined: all) is true are computed, the others are 0. Logits exist for a
  // bounded number of positions at a time, in the backward pass too.
  // `as_trained`: in the parameters' type without gradients too, for comparison with scores that have them.
  TokenScores token_logprobs(const torch::Tensor& ids, double temperature = 1.0, const torch::Tensor& mask = {},
                             bool as_trained = false);

  // Scores packed sequences; both fields of the result are [scores], in the order of `packed`.
  TokenScores packed_logprobs(const PackedTokens& packed, double temperature = 1.0, bool as_trained = false);

  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  torch::ScalarType dtype() const;

  struct Layer;
  // What a pass reads, for model/cuda: the tables of rotations cover so many positions, fp32 [.., head_dim], with the
  // scale of the scores in them. Weights stay where they are; the tables do not.
  struct Parts {
    torch::Tensor embedding, norm, lm_head;
    const std::vector<Layer>* layers;
    torch::Tensor cos, sin;
  };
  Parts parts(std::int64_t positions);

 private:
  ModelConfig config_;
  torch::Tensor embedding_, norm_, lm_head_;  // lm_head_ is embedding_ when tied
  std::vector<Layer> layers_;
  bool recompute_ = false;
  torch::Tensor rope_cos_, rope_sin_;  // fp32 [positions, head_dim], grown on demand
  void grow_rope(std::int64_t positions);
  // -> [batch * tokens, hidden], without the last norm. Without `attention`: each token to those that `segments` says
  // (model/packed; undefined: to those before it in its row).
  torch::Tensor through_layers(const torch::Tensor& ids, const torch::Tensor& positions, Attention* attention,
                               const torch::Tensor& segments, bool wide);
  torch::Tensor normed(const torch::Tensor& x) const;
};

// Threads that one operation may use, in libtorch and in its BLAS, for the whole process. Several processes on one
// machine each want 1: the BLAS starts a thread per core otherwise, and they fight. Call before the first operation.
void use_threads(int threads);

// fp32 on a CPU, bf16 elsewhere.
torch::ScalarType compute_dtype(const torch::Device& device);

// "cpu", "cuda" or "cuda:N". kInvalid for another name, kUnavailable where there is no such device.
Result<torch::Device> device_named(const std::string& name);

// Uninitialised weights, for a policy that is loaded next; compute_dtype(device) unless given. kInvalid for an
// impossible shape.
Result<std::shared_ptr<Transformer>> create(const ModelConfig& config, torch::Device device = torch::kCPU,
                                            std::optional<torch::ScalarType> dtype = std::nullopt);

}  // namespace echoline::model
