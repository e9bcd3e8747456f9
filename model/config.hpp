// What a decoder of the Qwen3, Qwen2 (2.5 included) or Llama (3 included) family looks like: its shape, as Hugging
// Face's config.json names it, and its sizes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::model {

// Index into the vocabulary.
using Token = std::int32_t;

enum class Family { kQwen3, kQwen2, kLlama };
const char* family_name(Family family);  // config.json's model_type

// Rotary positions beyond those trained first, in the manner of Llama 3: slow rotations are slowed down by `factor`,
// fast ones stay, those in between are in between.
struct RopeScaling {
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
  std::int64_t original_positions = 8192;
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

// Shape of a decoder. The defaults are those Hugging Face assumes when config.json leaves a field out.
struct ModelConfig {
  Family family = Family::kQwen3;
  std::int64_t vocab_size = 151936;
  std::int64_t hidden_size = 4096;
  std::int64_t intermediate_size = 22016;
  std::int64_t layers = 32;            // num_hidden_layers
  std::int64_t heads = 32;             // num_attention_heads
  std::int64_t kv_heads = 32;          // num_key_value_heads; divides heads
  std::int64_t head_dim = 128;         // even
  std::int64_t positions_max = 32768;  // max_position_embeddings, tokens
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  double initializer_range = 0.02;  // standard deviation of fresh weights
  bool tie_embeddings = false;      // tie_word_embeddings: lm_head is embed_tokens
  std::vector<Token> eos;           // eos_token_id, one or several
  std::optional<Token> bos;         // bos_token_id

  friend bool operator==(const ModelConfig&, const ModelConfig&) = default;

  // Parses and validates config.json. kInvalid names the field: an unknown model_type, a rope_scaling or a bias
  // this model does not implement, a missing or impossible number.
  static Result<ModelConfig> from_json(std::string_view text);
  static Result<ModelConfig> from_file(const std::filesystem::path& path);
  // config.json that transformers loads as the family's ForCausalLM in bfloat16.
  std::string to_json() const;
  // kInvalid when no model can have this shape.
  Status validate() const;

  std::uint64_t parameters() const;
  bool qk_norm() const { return family == Family::kQwen3; }   // a norm on every head of queries and keys
  bool qkv_bias() const { return family == Family::kQwen2; }  // of queries, keys and values
};

// Memory a model of this shape needs; activations are not counted.
struct MemoryEstimate {
  Bytes policy_bf16;         // weights as broadcast and as held by a worker on a GPU
  Bytes training;            // policy and gradient in bf16; fp32 master, first and second moment of AdamW
  Bytes kv_cache_per_token;  // bf16 keys and values of all layers
};
MemoryEstimate memory_estimate(const ModelConfig& config);

// The shape called `name`: tiny-64, tiny-128, tiny-256 (for a pair of CPU cores, with the vocabulary of
// Tokenizer::characters(kCharacterAlphabet)), bytes-64, bytes-256 (the same for any text of a few thousand bytes, with
// Tokenizer::bytes()), qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen2.5-0.5b,
// llama-3.2-1b.
// kInvalid lists the names.
Result<ModelConfig> preset(std::string_view name);
std::vector<std::string> preset_names();

}  // namespace echoline::model
