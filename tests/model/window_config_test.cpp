// config.json of models with sliding windows: Gemma 3, Mistral and Qwen.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/config.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;

// Gemma 3 1B as published.
constexpr const char* kGemma1b = R"({"architectures":["Gemma3ForCausalLM"],"attention_bias":false,
  "attention_dropout":0.0,"attn_logit_softcapping":null,"bos_token_id":2,"cache_implementation":"hybrid",
  "eos_token_id":[1,106],"final_logit_softcapping":null,"head_dim":256,"hidden_activation":"gelu_pytorch_tanh",
  "hidden_size":1152,"initializer_range":0.02,"intermediate_size":6912,"max_position_embeddings":32768,
  "model_type":"gemma3_text","num_attention_heads":4,"num_hidden_layers":26,"num_key_value_heads":1,"pad_token_id":0,
  "query_pre_attn_scalar":256,"rms_norm_eps":1e-06,"rope_local_base_freq":10000,"rope_scaling":null,
  "rope_theta":1000000,"sliding_window":512,"sliding_window_pattern":6,"torch_dtype":"bfloat16","use_cache":true,
  "vocab_size":262144})";

std::string refusal(const json& changed) {
  const auto parsed = ModelConfig::from_json(changed.dump());
  return parsed ? "" : parsed.error().detail;
}

TEST(WindowConfig, Gemma3AsPublished) {
  const auto parsed = ModelConfig::from_json(kGemma1b);
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->family, Family::kGemma3);
  EXPECT_TRUE(parsed->tie_embeddings);
  EXPECT_EQ(parsed->parameters(), 999'885'952u);
  EXPECT_EQ(parsed->sliding_window.value(), (SlidingWindow{.tokens = 512, .full_layers = {5, 11, 17, 23}}));
  EXPECT_EQ(parsed->embedding_scale(), 34.0) << "the root of 1152, 33.94, in bf16";
  EXPECT_EQ(parsed->score_scale(), 1.0 / 16);
  EXPECT_EQ(ModelConfig::from_json(parsed->to_json()).value(), *parsed);
  EXPECT_TRUE(json::parse(parsed->to_json())["query_pre_attn_scalar"].is_number_integer())
      << "transformers accepts no 256.0";
}

// transformers 5 writes the types of layers, and rotations by type.
TEST(WindowConfig, NewerFilesOfGemma3) {
  json newer = json::parse(kGemma1b);
  for (const char* old : {"rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern"})
    newer.erase(old);
  std::vector<std::string> types(26, "sliding_attention");
  types[3] = "full_attention";
  newer["layer_types"] = types;
  newer["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 2e6}}},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 3e4}}}};
  const auto parsed = ModelConfig::from_json(newer.dump());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->sliding_window->full_layers, std::vector<std::int64_t>{3});
  EXPECT_EQ(parsed->rope_theta, 2e6);
  EXPECT_EQ(parsed->local_rope_theta, 3e4);
  EXPECT_EQ(parsed->rope_scaling.value(), (RopeScaling{.factor = 8, .is_linear = true}));
  EXPECT_EQ(ModelConfig::from_json(parsed->to_json()).value(), *parsed);
  newer["rope_parameters"]["sliding_attention"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  EXPECT_NE(refusal(newer).find("'rope_parameters.sliding_attention' is"), std::string::npos) << refusal(newer);
}

TEST(WindowConfig, OtherArithmeticOfGemmaIsRefused) {
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, json>>{
           {"attn_logit_softcapping", 50.0},
           {"final_logit_softcapping", 30.0},
           {"hidden_activation", "gelu"},
           {"attention_bias", true},
           {"use_bidirectional_attention", true},
           {"query_pre_attn_scalar", 0},
           {"rope_local_base_freq", -1},
           {"sliding_window", 0},
           {"sliding_window_pattern", 0},
           {"layer_types", {"full_attention"}},
           {"layer_types", std::vector<std::string>(26, "chunked_attention")},
           {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 8.0}}},
           {"num_experts", 8}}) {
    json changed = json::parse(kGemma1b);
    changed[name] = value;
    EXPECT_NE(refusal(changed).find(name), std::string::npos) << name << ": " << refusal(changed);
  }
}

// Mistral 7B v0.1 has a window in every layer.
TEST(WindowConfig, Mistral) {
  json mistral = json::parse(preset("llama-3.2-1b")->to_json());
  mistral["model_type"] = "mistral";
  mistral["rope_scaling"] = nullptr;
  mistral["sliding_window"] = 4096;
  const auto parsed = ModelConfig::from_json(mistral.dump());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->sliding_window.value(), (SlidingWindow{.tokens = 4096, .full_layers = {}}));
  EXPECT_EQ(ModelConfig::from_json(parsed->to_json()).value(), *parsed);
  mistral["layer_types"] = std::vector<std::string>(16, "full_attention");
  EXPECT_NE(refusal(mistral).find("'layer_types' has \"full_attention\""), std::string::npos) << refusal(mistral);
  mistral["layer_types"] = nullptr;
  mistral["model_type"] = "llama";
  EXPECT_FALSE(ModelConfig::from_json(mistral.dump())->sliding_window) << "Llama has no windows and ignores the field";
  mistral["use_sliding_window"] = true;
  EXPECT_NE(refusal(mistral).find("use_sliding_window"), std::string::npos);
}

// Qwen's windows must be turned on, and begin with layer 'max_window_layers'.
TEST(WindowConfig, Qwen) {
  for (const char* name : {"qwen2.5-0.5b", "qwen3-0.6b"}) {
    json qwen = json::parse(preset(name)->to_json());
    qwen["sliding_window"] = 1024;
    qwen["max_window_layers"] = 2;
    EXPECT_FALSE(ModelConfig::from_json(qwen.dump())->sliding_window) << "turned off";
    qwen["use_sliding_window"] = true;
    const auto parsed = ModelConfig::from_json(qwen.dump());
    ASSERT_TRUE(parsed) << parsed.error().message();
    EXPECT_EQ(parsed->sliding_window.value(), (SlidingWindow{.tokens = 1024, .full_layers = {0, 1}}));
    EXPECT_EQ(parsed->window_of(1), 0);
    EXPECT_EQ(parsed->window_of(2), 1024);
    EXPECT_EQ(ModelConfig::from_json(parsed->to_json()).value(), *parsed);
    qwen["max_window_layers"] = parsed->layers;
    EXPECT_FALSE(ModelConfig::from_json(qwen.dump())->sliding_window) << "no layer has a window";
  }
}

}  // namespace
}  // namespace echoline::model
