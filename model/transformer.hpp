// The decoder of the Qwen3, Qwen2 and Llama families on libtorch, with Hugging Face's parameter names.
//
// RMSNorm, rotary positions, grouped-query attention, SwiGLU. Qwen3 has a norm on every head of queries and keys, Qwen2
// a bias on queries, keys and values, Llama 3 slower rotations for long texts.
// Parameters are fp32 on a CPU, with values that are exact in bf16 after a policy was loaded, and bf16 on CUDA, which
// then computes in bf16. A CPU that only generates may keep them in bf16: without gradients it still computes in fp32,
// with the same results, and reads half the bytes. With gradients, the parameters' type is used (but fp32 for norms,
// rotations, the softmax over the vocabulary and sums of gradients).
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config.hpp"
#include "model/packed.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// Replaces the attention within a pass, for callers that keep keys and values (model/paged_cache).
class Attention {
 public:
  virtual ~Attention() = default;
  // For one layer: q [batch, tokens, heads, dim], k and v [batch, tokens, kv_heads, dim] -> [batch * tokens, heads *
  // dim]. q and k already contain the scale of the scores, 1 / sqrt(dim).
  virtual torch::Tensor attend(std::size_t layer, const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v) = 0;
};

// The default attention: each token attends to itself and earlier tokens of its row. Right padding needs no mask,
// because a causal model never looks ahead.
torch::Tensor attend_causally(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v);

// Log-probabilities of given tokens, and the entropy of their distributions.
struct TokenScores {
  torch::Tensor logprobs;  // fp32 [batch, tokens - 1]: entry t scores ids[:, t + 1] given ids[:, 0..t]; nats
  torch::Tensor entropy;   // fp32 [batch, tokens - 1], nats, without gradient
};

// Not thread-safe. Throws c10::Error for wrong shapes, like every torch module; generate() and weights.hpp do not.
class Transformer : public torch::nn::Module {
 public:
  // Uninitialised weights on `device`; the type is compute_dtype(device) unless given. Do not move them afterwards.
  explicit Transformer(const ModelConfig& config, torch::Device device = torch::kCPU,
                       std::optional<torch::ScalarType> dtype = std::nullopt);
  ~Transformer() override;

  // ids int64 [batch, tokens] -> logits fp32 [batch, tokens, vocab].
  torch::Tensor forward(const torch::Tensor& ids);
  // The last layer's normalised hidden states [batch, tokens, hidden], for tokens at the given positions (int64 [batch,
  // tokens] on the CPU; undefined: 0, 1, ... in every row).
  torch::Tensor hidden_states(const torch::Tensor& ids, const torch::Tensor& positions = {},
                              Attention* attention = nullptr);
  // Hidden states [..., hidden] -> logits fp32 [..., vocab].
  torch::Tensor logits(const torch::Tensor& hidden) const;

  // Saves memory for gradients at the cost of a second forward pass: keeps only each layer's input and recomputes the
  // rest.
  void recompute_layers(bool on) { recompute_ = on; }

  // Scores the tokens of right-padded ids [batch, tokens] under softmax(logits / temperature). Computes only the
  // entries with a true `mask` (bool [batch, tokens - 1]; undefined: all); the others are 0. Logits are computed for a
  // bounded number of positions at a time, also in the backward pass.
  // `as_trained`: uses the parameters' type also without gradients, for comparison with scores that have them.
  TokenScores token_logprobs(const torch::Tensor& ids, double temperature = 1.0, const torch::Tensor& mask = {},
                             bool as_trained = false);

  // Scores packed sequences; both fields of the result are [scores], in the order of `packed`.
  TokenScores packed_logprobs(const PackedTokens& packed, double temperature = 1.0, bool as_trained = false);

  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  torch::ScalarType dtype() const;

  struct Layer;
  // The tensors of a pass, for model/cuda. The rotation tables cover this many positions, fp32 [.., head_dim], and
  // contain the scale of the scores. Weights never move; the tables do.
  struct Parts {
    torch::Tensor embedding, norm, lm_head;
    const std::vector<Layer>* layers;
    torch::Tensor cos, sin;
  };
  Parts parts(std::int64_t positions);

 private:
  ModelConfig config_;
  torch::Tensor embedding_, norm_, lm_head_;  // lm_head_ is embedding_ if tied
  std::vector<Layer> layers_;
  bool recompute_ = false;
  torch::Tensor rope_cos_, rope_sin_;  // fp32 [positions, head_dim], grown on demand
  void grow_rope(std::int64_t positions);
  // Returns [batch * tokens, hidden], before the last norm. Without `attention`, tokens attend by `segments`
  // (model/packed; undefined: to earlier ones in their row).
  torch::Tensor through_layers(const torch::Tensor& ids, const torch::Tensor& positions, Attention* attention,
                               const torch::Tensor& segments, bool wide);
  torch::Tensor normed(const torch::Tensor& x) const;
};

// Sets the threads per operation, in libtorch and its BLAS, for the whole process. Use 1 if several processes share a
// machine, because the BLAS otherwise starts a thread per core. Call before the first operation.
void use_threads(int threads);

// fp32 on a CPU, bf16 elsewhere.
torch::ScalarType compute_dtype(const torch::Device& device);

// "cpu", "cuda" or "cuda:N". kInvalid for another name, kUnavailable if there is no such device.
Result<torch::Device> device_named(const std::string& name);

// Uninitialised weights, for a policy that is loaded next; compute_dtype(device) unless given. kInvalid for an
// impossible shape.
Result<std::shared_ptr<Transformer>> create(const ModelConfig& config, torch::Device device = torch::kCPU,
                                            std::optional<torch::ScalarType> dtype = std::nullopt);

}  // namespace echoline::model
