// The shape and sizes of a decoder, with the names of Hugging Face's config.json. This program can compute the Qwen3,
// Qwen3-MoE, Qwen2 (including 2.5), Llama (including 3), Mistral and Gemma 3 families. It can carry the policies of all
// others.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "model/adapter.hpp"

namespace echoline::model {

// Index into the vocabulary.
using Token = std::int32_t;

// kCarried: another family, or a model of these families with a feature that is not implemented. This program only
// transports the policies of such a model, which may have tensors of any names and types. An external trainer makes
// them, and an inference server generates with them.
enum class Family { kQwen3, kQwen3Moe, kQwen2, kLlama, kMistral, kGemma3, kCarried };
const char* family_name(Family family);  // config.json's model_type, if the family is implemented

// The models that a caller accepts: kCompute only models that this program can compute, kCarry also Family::kCarried.
enum class ModelUse { kCompute, kCarry };

// Extends rotary positions beyond the length of pretraining, as Llama 3 does: divides the frequency of slow rotations
// by `factor`, keeps fast rotations, and interpolates between them. A rotation is slow if it makes fewer than
// low_freq_factor turns within original_positions, and fast if it makes more than high_freq_factor. With `is_linear`,
// divides all frequencies by `factor`, and the other members have no meaning.
struct RopeScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_positions = 8192;
  bool is_linear = false;
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

// The sliding windows of a decoder: in a layer with a window, a token attends to itself and to the `tokens` - 1 tokens
// before it.
struct SlidingWindow {
  std::int64_t tokens = 4096;                  // sliding_window
  std::vector<std::int64_t> full_layers = {};  // layers without a window, ascending; from layer_types
  friend bool operator==(const SlidingWindow&, const SlidingWindow&) = default;
};

// The mixture of experts of a decoder. In a mixture layer, a router chooses a few experts for each token; each expert
// is an MLP of its own. The defaults are Hugging Face's for fields missing in config.json.
struct ExpertsConfig {
  std::int64_t count = 128;              // num_experts, of each mixture layer
  std::int64_t per_token = 8;            // num_experts_per_tok, at most `count`
  std::int64_t intermediate_size = 768;  // moe_intermediate_size, of one expert
  bool weights_sum_to_1 = false;         // norm_topk_prob: the weights of a token's experts are divided by their sum
  std::int64_t layer_step = 1;           // decoder_sparse_step: layers `layer_step` - 1, 2 * `layer_step` - 1, ... are
                                         // mixture layers
  std::vector<std::int64_t> dense_layers = {};  // mlp_only_layers: these have an MLP all the same
  friend bool operator==(const ExpertsConfig&, const ExpertsConfig&) = default;
};

// The shape of a decoder. The defaults are Hugging Face's for fields missing in config.json.
struct ModelConfig {
  Family family = Family::kQwen3;
  std::int64_t vocab_size = 151936;
  std::int64_t hidden_size = 4096;
  std::int64_t intermediate_size = 22016;  // of the MLP of layers that are no mixture
  std::int64_t layers = 32;                // num_hidden_layers
  std::int64_t heads = 32;                 // num_attention_heads
  std::int64_t kv_heads = 32;              // num_key_value_heads; divides heads
  std::int64_t head_dim = 128;             // even
  std::int64_t positions_max = 32768;      // max_position_embeddings, tokens
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  std::optional<ExpertsConfig> experts;         // set for Family::kQwen3Moe only
  std::optional<SlidingWindow> sliding_window;  // always set for Family::kGemma3
  double local_rope_theta = 10000.0;  // rope_local_base_freq, Gemma 3: rope_theta of layers with a window, which have
                                      // no rope_scaling
  std::int64_t query_scalar = 256;    // query_pre_attn_scalar, Gemma 3: scores have the factor 1 / sqrt(query_scalar)
  double initializer_range = 0.02;    // standard deviation of initial weights
  bool tie_embeddings = false;        // tie_word_embeddings: lm_head is embed_tokens
  std::vector<Token> eos;             // eos_token_id, one or several: tokens that end a text
  std::optional<Token> bos;           // bos_token_id: the token that begins a text
  std::optional<AdapterConfig> adapter;  // of the policies, if they have one; not part of config.json

  // Only set for Family::kCarried:
  std::string source_json;             // config.json, unchanged
  std::string reason_not_computable;   // names the field, what it is, and what would be accepted
  std::uint64_t carried_elements = 0;  // values of all tensors; 0: not known, because no weights were read
  Bytes carried_bytes{};               // of all tensors
  Bytes carried_adapter_bytes{};       // of the tensors of `adapter`; 0: no adapter, or not known

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;

  // Parses and validates config.json. kInvalid names the field: an unknown model_type, a rope_scaling or a bias that is
  // not implemented, a missing or invalid number. With kCarry, a model that is not implemented becomes
  // Family::kCarried instead. It only needs 'vocab_size' and 'max_position_embeddings', at the top or in 'text_config'.
  static Result<ModelConfig> from_json(std::string_view text, ModelUse use = ModelUse::kCompute);
  // Reads the config.json of a directory, and its adapter_config.json if there is one. For Family::kCarried, also reads
  // the headers of the weights and sums up their sizes.
  static Result<ModelConfig> from_folder(const std::filesystem::path& folder, ModelUse use = ModelUse::kCompute);
  // A text such as "qwen3 of 596049920 parameters".
  std::string summary() const;
  // kInvalid, with the reason, for Family::kCarried.
  Status check_computable() const;
  // A config.json with which transformers loads the family's ForCausalLM in bfloat16; source_json for kCarried.
  std::string to_json() const;
  // kInvalid if no model can have this shape.
  Status validate() const;

  std::uint64_t parameters() const;           // of the base; 0 if a carried model's weights were not read
  std::uint64_t active_parameters() const;    // those that compute one token: fewer than parameters() for a mixture
  std::uint64_t adapter_parameters() const;   // 0 for a carried model
  bool is_mixture(std::int64_t layer) const;  // whether this layer has experts instead of an MLP
  std::int64_t mixture_layers() const;        // how many layers are
  std::int64_t expert_choices() const;        // of one token: experts of all its mixture layers
  std::int64_t window_of(std::int64_t layer) const;  // SlidingWindow::tokens; 0: the layer has no window
  double score_scale() const;                        // the factor of attention's scores
  double embedding_scale() const;                    // the factor of a token's embedding as input of the first layer
  // Whether each head of queries and keys is normalised.
  bool qk_norm() const { return family == Family::kQwen3 || family == Family::kQwen3Moe || family == Family::kGemma3; }
  bool qkv_bias() const { return family == Family::kQwen2; }        // queries, keys and values have a bias
  bool norms_add_one() const { return family == Family::kGemma3; }  // the factor of a norm is 1 + its weight
  // Whether the outputs of attention and MLP are normalised before they are added to the layer's input.
  bool has_output_norms() const { return family == Family::kGemma3; }
  bool gates_by_gelu() const { return family == Family::kGemma3; }  // GELU in place of SiLU, approximated by tanh
};

// The memory of a model of this shape, without activations.
struct MemoryEstimate {
  Bytes policy_bf16;   // the weights as broadcast, and as a worker holds them on a GPU; a carried model's own types
  Bytes trained_bf16;  // the part of the policy that a learner step changes: its adapter, or everything
  Bytes training;      // policy and gradient in bf16; fp32 master, first and second moment of AdamW
  Bytes kv_cache_per_token;  // keys and values of all layers in bf16
};
MemoryEstimate memory_estimate(const ModelConfig& config);

// The preset called `name`. tiny-64, tiny-128 and tiny-256 are for two CPU cores and have the vocabulary of
// Tokenizer::characters(kCharacterAlphabet). bytes-64 and bytes-256 take any text of a few thousand bytes, with
// Tokenizer::bytes(). tiny-moe is a mixture of experts with the vocabulary of tiny-64. Others: qwen3-0.6b, qwen3-1.7b,
// qwen3-4b, qwen3-8b, qwen2.5-0.5b, llama-3.2-1b. kInvalid lists the names.
Result<ModelConfig> preset(std::string_view name);
std::vector<std::string> preset_names();

}  // namespace echoline::model
