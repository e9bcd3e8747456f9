// The decoder of the Qwen3, Qwen3-MoE, Qwen2, Llama, Mistral and Gemma 3 families on libtorch, with Hugging Face's
// parameter names.
//
// It uses RMSNorm, rotary positions, grouped-query attention and SwiGLU. Qwen3 normalises each head of queries and
// keys. Qwen2 adds a bias to queries, keys and values. Llama 3 slows rotary frequencies down for long contexts
// (RopeScaling). Layers may have sliding windows (SlidingWindow). Gemma 3 has GELU in place of SiLU, norms of outputs,
// a factor of the embeddings, and rotations of its own in layers with a window.
//
//   parameters                         | computes without gradients | computes with gradients
//   fp32 on a CPU                      | in fp32                    | in fp32
//   bf16 on a CPU that only generates  | in fp32                    | (in bf16)
//   bf16 on CUDA                       | in bf16                    | in bf16
//
// On a CPU, bf16 parameters take half the memory of fp32 and give the same results. Norms, rotations, the softmax over
// the vocabulary and sums of gradients are in fp32 everywhere. fp32 parameters that were loaded from a policy hold
// values that bf16 can represent exactly.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/config.hpp"
#include "model/packed.hpp"
#include "model/torch.hpp"

namespace echoline::model {

// A caller's own attention, which a pass uses in place of attend_packed(). Implemented by callers that keep keys and
// values (model/paged_cache).
class Attention {
 public:
  virtual ~Attention() = default;
  // Attention of one layer: q [batch, tokens, heads, dim], k and v [batch, tokens, kv_heads, dim] ->
  // [batch * tokens, heads * dim]. The products of q and k already contain the scale of the scores,
  // ModelConfig::score_scale().
  virtual torch::Tensor attend(std::size_t layer, const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v) = 0;
};

// Causal attention: each token attends to itself and to earlier tokens of its row. Right padding needs no mask, because
// it comes after all other tokens. With a `window`, a token attends to the last `window` of these tokens.
torch::Tensor attend_causally(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                              std::int64_t window = 0);

// The experts that a pass through a mixture of experts uses.
struct Routing {
  // int64 [tokens, mixture layers, experts per token] on the model's device: the experts to use, ascending. A row of -1
  // lets the router choose. Undefined: it chooses all. (Router replay: the trainer uses the experts of the engine.)
  torch::Tensor given;
  bool records = false;  // whether the pass fills in `used`
  torch::Tensor used;    // int16, of the shape of `given`, on the CPU: the experts that each token used
};

// Log-probabilities of given tokens, and the entropy of their distributions.
struct TokenScores {
  torch::Tensor logprobs;  // fp32 [batch, tokens - 1]: entry t scores ids[:, t + 1] given ids[:, 0..t]; nats
  torch::Tensor entropy;   // fp32 [batch, tokens - 1], nats, without gradient
};

// Not thread-safe. Throws c10::Error for wrong shapes, like every torch module. The functions of generate.hpp and
// weights.hpp return errors instead.
class Transformer : public torch::nn::Module {
 public:
  // Makes uninitialised weights on `device`; their type is default_weight_dtype(device) unless given. Do not call to()
  // afterwards, because model/cuda records the addresses of the weights.
  explicit Transformer(const ModelConfig& config, torch::Device device = torch::kCPU,
                       std::optional<torch::ScalarType> dtype = std::nullopt);
  ~Transformer() override;

  // The logits fp32 [batch, tokens, vocab] for ids int64 [batch, tokens].
  torch::Tensor forward(const torch::Tensor& ids);
  // The last layer's normalised hidden states [batch, tokens, hidden]. `positions` are those of the tokens: int64
  // [batch, tokens] on the CPU; undefined: 0, 1, ... in every row. `attention` null: the tokens attend causally.
  // `routing` may be null; it is for mixtures of experts.
  torch::Tensor hidden_states(const torch::Tensor& ids, const torch::Tensor& positions = {},
                              Attention* attention = nullptr, Routing* routing = nullptr);
  // Hidden states [..., hidden] -> logits fp32 [..., vocab].
  torch::Tensor logits(const torch::Tensor& hidden) const;

  // Adds an adapter with uninitialised weights to a model without one. The model computes W x + scale * B (A x); B A is
  // never merged into W. kInvalid for an adapter that policy_layout() refuses.
  Status add_adapter(const AdapterConfig& adapter);
  // Freezes all weights but the adapter's: they get no gradients, and are rounded to bf16, as in a policy.
  void freeze_base();

  // If on, a pass with gradients keeps only each layer's input, and the backward pass computes the layer again. This
  // saves memory at the cost of a second forward pass.
  void recompute_layers(bool on) { recompute_ = on; }

  // Scores the tokens of right-padded ids [batch, tokens] under softmax(logits / temperature). Computes only the
  // entries with a true `mask` (bool [batch, tokens - 1]; undefined: all); the others are 0. Logits are computed for a
  // bounded number of positions at a time, also in the backward pass.
  // `as_trained`: computes in the parameters' type also without gradients, for comparison with scores from a pass with
  // gradients.
  TokenScores token_logprobs(const torch::Tensor& ids, double temperature = 1.0, const torch::Tensor& mask = {},
                             bool as_trained = false);

  // Scores packed sequences. Both fields of the result are [number of scored tokens], in the order of `packed`. Uses
  // the experts of `packed`, if it has any.
  TokenScores packed_logprobs(const PackedTokens& packed, double temperature = 1.0, bool as_trained = false);

  const ModelConfig& config() const { return config_; }
  torch::Device device() const;
  torch::ScalarType dtype() const;

  struct Layer;
  // The tensors of a pass, for model/cuda.
  struct Parts {
    torch::Tensor embedding, norm, lm_head;
    const std::vector<Layer>* layers;
    // Rotations of queries and keys, fp32 [positions, head_dim]. Both contain the square root of the scale of attention
    // scores, so that the products of queries and keys have this scale.
    torch::Tensor cos, sin;
  };
  // cos and sin cover at least `positions` positions. A later call for more positions may allocate cos and sin again,
  // at other addresses. Weights keep their addresses.
  Parts parts(std::int64_t positions);

 private:
  ModelConfig config_;
  torch::Tensor embedding_, norm_, lm_head_;  // lm_head_ is embedding_ if tied
  std::vector<Layer> layers_;
  bool recompute_ = false;
  torch::Tensor rope_cos_, rope_sin_;              // fp32 [positions, head_dim], grown on demand
  torch::Tensor local_rope_cos_, local_rope_sin_;  // the same for layers with a window, if these have their own
  // Computes these tables again if they have fewer rows than `positions`.
  void ensure_rope_covers(std::int64_t positions);
  // Returns [batch * tokens, hidden], before the last norm. Without `attention`, tokens attend by `segments`
  // (model/packed) or, if these are undefined, to themselves and earlier tokens of their row. `compute_fp32`: computes
  // in fp32 on a CPU without gradients, also with bf16 parameters.
  torch::Tensor run_layers(const torch::Tensor& ids, const torch::Tensor& positions, Attention* attention,
                           const torch::Tensor& segments, Routing* routing, bool compute_fp32);
  torch::Tensor apply_last_norm(const torch::Tensor& x) const;
};

// Sets the threads per operation, in libtorch and its BLAS, for the whole process. Use 1 if several processes share a
// machine, because the BLAS otherwise starts a thread per core. Call before the first operation.
void use_threads(int threads);

// The default type of weights: fp32 on a CPU, bf16 elsewhere.
torch::ScalarType default_weight_dtype(const torch::Device& device);

// The device called "cpu", "cuda" or "cuda:N". kInvalid for another name, kUnavailable if there is no such device.
Result<torch::Device> device_named(const std::string& name);

// A model with uninitialised weights, for a policy that is loaded next. Their type is default_weight_dtype(device)
// unless given. kInvalid for an impossible shape, kExhausted if memory is short.
Result<std::shared_ptr<Transformer>> create(const ModelConfig& config, torch::Device device = torch::kCPU,
                                            std::optional<torch::ScalarType> dtype = std::nullopt);

}  // namespace echoline::model
