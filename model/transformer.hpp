// The decoder of the Qwen3, Qwen2 and Llama families on libtorch, with Hugging Face's parameter names.
//
// RMSNorm, rotary positions, grouped-query attention, SwiGLU. Qwen3 normalises each head of queries and keys. Qwen2
// adds a bias to queries, keys and values. Llama 3 slows rotary frequencies down for long contexts (RopeScaling).
//
//   parameters                         | computes without gradients         | computes with gradients
//   fp32 on a CPU                      | fp32                               | fp32
//   bf16 on a CPU that only generates  | fp32: half the bytes, same results | (bf16)
//   bf16 on CUDA                       | bf16                               | bf16
//
// Norms, rotations, the softmax over the vocabulary and sums of gradients are in fp32 everywhere. After a policy was
// loaded, fp32 parameters have values that are exact in bf16.
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
  // Uninitialised weights on `device`; the type is compute_dtype(device) unless given. Do not call to() afterwards:
  // model/cuda records the addresses of the weights.
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

  // Gives the model, which has none, an adapter, with uninitialised weights. Its products are computed on their own and
  // never merged: W x + scale * B (A x). kInvalid for an adapter that policy_layout() refuses.
  Status add_adapter(const AdapterConfig& adapter);
  // From now on only the adapter has gradients. Rounds all other weights to bf16, as in a policy.
  void freeze_base();

  // Saves memory for gradients at the cost of a second forward pass: keeps only each layer's input and recomputes the
  // rest.
  void recompute_layers(bool on) { recompute_ = on; }

  // Scores the tokens of right-padded ids [batch, tokens] under softmax(logits / temperature). Computes only the
  // entries with a true `mask` (bool [batch, tokens - 1]; undefined: all); the others are 0. Logits are computed for a
  // bounded number of positions at a time, also in the backward pass.
  // `as_trained`: uses the parameters' type also without gradients, for comparison with scores that have them.
  TokenScores token_logprobs(const torch::Tensor& ids, double temperature = 1.0, const torch::Tensor& mask = {},
                             bool as_trained = false);

  // Scores packed sequences. Both fields of the result are [number of scored tokens], in the order of `packed`.
  TokenScores packed_logprobs(const PackedTokens& packed, double temperature = 1.0, bool as_trained = false);

  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  torch::ScalarType dtype() const;

  struct Layer;
  // The tensors of a pass, for model/cuda.
  struct Parts {
    torch::Tensor embedding, norm, lm_head;
    const std::vector<Layer>* layers;
    torch::Tensor cos, sin;  // rotations, fp32 [positions, head_dim]; they contain the scale of the scores
  };
  // cos and sin cover at least `positions` positions. A later call for more positions may allocate cos and sin again,
  // at other addresses. Weights keep their addresses.
  Parts parts(std::int64_t positions);

 private:
  ModelConfig config_;
  torch::Tensor embedding_, norm_, lm_head_;  // lm_head_ is embedding_ if tied
  std::vector<Layer> layers_;
  bool recompute_ = false;
  torch::Tensor rope_cos_, rope_sin_;  // fp32 [positions, head_dim], grown on demand
  // Computes rope_cos_ and rope_sin_ again if they have fewer rows than `positions`.
  void ensure_rope_covers(std::int64_t positions);
  // Returns [batch * tokens, hidden], before the last norm. Without `attention`, tokens attend by `segments`
  // (model/packed; undefined: to earlier ones in their row). `compute_fp32`: on a CPU without gradients, also with bf16
  // parameters.
  torch::Tensor run_layers(const torch::Tensor& ids, const torch::Tensor& positions, Attention* attention,
                           const torch::Tensor& segments, bool compute_fp32);
  torch::Tensor apply_last_norm(const torch::Tensor& x) const;
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
