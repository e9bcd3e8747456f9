// config.json in and out, presets and sizes.
#include "model/config.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "model/policy.hpp"
#include "model/tokenizer.hpp"

namespace echoline::model {
namespace {

// config.json of the 8B model as published (fields that do not matter here included).
const char* kQwen8b = R"({"architectures":["Qwen3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
  "bos_token_id":151643,"eos_token_id":151645,"head_dim":128,"hidden_act":"silu","hidden_size":4096,
  "initializer_range":0.02,"intermediate_size":12288,"max_position_embeddings":40960,"max_window_layers":36,
  "model_type":"qwen3","num_attention_heads":32,"num_hidden_layers":36,"num_key_value_heads":8,"rms_norm_eps":1e-06,
  "rope_scaling":null,"rope_theta":1000000,"sliding_window":null,"tie_word_embeddings":false,
  "torch_dtype":"bfloat16","transformers_version":"4.51.0","use_cache":true,"use_sliding_window":false,
  "vocab_size":151936})";

Result<ModelConfig> with(const char* name, nlohmann::json value) {
  auto j = nlohmann::json::parse(kQwen8b);
  j[name] = std::move(value);
  return ModelConfig::from_json(j.dump());
}
void refused(const char* name, nlohmann::json value) {
  const auto config = with(name, std::move(value));
  ASSERT_FALSE(config) << name;
  EXPECT_EQ(config.error().code, Code::kInvalid);
  EXPECT_NE(config.error().detail.find(name), std::string::npos) << config.error().detail;
}

TEST(Config, ReadsThePublished8b) {
  const auto config = ModelConfig::from_json(kQwen8b);
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(*config, preset("qwen3-8b").value());
  EXPECT_EQ(config->parameters(), 8190735360u);  // 8.2 B, as published
}

TEST(Config, ParameterCountsOfThePublishedModels) {
  EXPECT_EQ(preset("qwen3-0.6b")->parameters(), 596049920u);
  EXPECT_EQ(preset("qwen3-1.7b")->parameters(), 1720574976u);
  EXPECT_EQ(preset("qwen3-4b")->parameters(), 4022468096u);
  EXPECT_EQ(preset("qwen2.5-0.5b")->parameters(), 494032768u);
  EXPECT_EQ(preset("llama-3.2-1b")->parameters(), 1235814400u);
}

TEST(Config, MemoryEstimates) {
  const MemoryEstimate m = memory_estimate(preset("qwen3-8b").value());
  EXPECT_EQ(m.policy_bf16.count, 2 * 8190735360u);
  EXPECT_EQ(m.training.count, 16 * 8190735360u);
  EXPECT_EQ(m.kv_cache_per_token.count, 2u * 36 * 8 * 128 * 2);  // 144 KiB
}

// config.json as published.
TEST(Config, ReadsTheOtherFamilies) {
  const auto qwen = ModelConfig::from_json(R"({"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,
    "bos_token_id":151643,"eos_token_id":151645,"hidden_act":"silu","hidden_size":896,"initializer_range":0.02,
    "intermediate_size":4864,"max_position_embeddings":32768,"max_window_layers":21,"model_type":"qwen2",
    "num_attention_heads":14,"num_hidden_layers":24,"num_key_value_heads":2,"rms_norm_eps":1e-06,"rope_theta":1000000.0,
    "sliding_window":32768,"tie_word_embeddings":true,"torch_dtype":"bfloat16","transformers_version":"4.43.1",
    "use_cache":true,"use_sliding_window":false,"vocab_size":151936})");
  ASSERT_TRUE(qwen) << qwen.error().message();
  EXPECT_EQ(*qwen, preset("qwen2.5-0.5b").value());
  auto llama =
      nlohmann::json::parse(R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
    "bos_token_id":128000,"eos_token_id":128001,"head_dim":64,"hidden_act":"silu","hidden_size":2048,
    "initializer_range":0.02,"intermediate_size":8192,"max_position_embeddings":131072,"mlp_bias":false,
    "model_type":"llama","num_attention_heads":32,"num_hidden_layers":16,"num_key_value_heads":8,"pretraining_tp":1,
    "rms_norm_eps":1e-05,"rope_scaling":{"factor":32.0,"high_freq_factor":4.0,"low_freq_factor":1.0,
    "original_max_position_embeddings":8192,"rope_type":"llama3"},"rope_theta":500000.0,"tie_word_embeddings":true,
    "torch_dtype":"bfloat16","transformers_version":"4.45.0.dev0","use_cache":true,"vocab_size":128256})");
  EXPECT_EQ(ModelConfig::from_json(llama.dump()).value(), preset("llama-3.2-1b").value());
  // The instruct models end a text in three ways. Older ones have no shared heads and state no head_dim.
  llama["eos_token_id"] = {128001, 128008, 128009};
  llama.erase("num_key_value_heads");
  llama.erase("head_dim");
  const auto config = ModelConfig::from_json(llama.dump());
  ASSERT_TRUE(config) << config.error().message();
  EXPECT_EQ(config->eos, (std::vector<Token>{128001, 128008, 128009}));
  EXPECT_EQ(config->kv_heads, 32);
  EXPECT_EQ(config->head_dim, 64);
  const auto refuses = [&](const char* name, nlohmann::json value) {
    auto changed = llama;
    changed[name] = std::move(value);
    const auto parsed = ModelConfig::from_json(changed.dump());
    ASSERT_FALSE(parsed) << name;
    EXPECT_NE(parsed.error().detail.find(name), std::string::npos) << parsed.error().detail;
  };
  refuses("attention_bias", true);
  refuses("mlp_bias", true);
  refuses("rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}});
  refuses("rope_scaling", {{"rope_type", "linear"}});
  refuses("rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}});
  refuses("rope_scaling", {{"rope_type", "llama3"},
                           {"factor", 0.0},
                           {"low_freq_factor", 1},
                           {"high_freq_factor", 4},
                           {"original_max_position_embeddings", 8192}});
}

TEST(Config, ArithmeticOfOtherFamiliesIsRefused) {
  auto mistral = nlohmann::json::parse(preset("llama-3.2-1b")->to_json());
  mistral["model_type"] = "mistral";
  mistral["rope_scaling"] = nullptr;
  const auto refuses = [&](const char* name, nlohmann::json value) {
    auto changed = mistral;
    changed[name] = std::move(value);
    const auto parsed = ModelConfig::from_json(changed.dump());
    ASSERT_FALSE(parsed) << name;
    EXPECT_NE(parsed.error().detail.find(name), std::string::npos) << parsed.error().detail;
  };
  refuses("sliding_window", 0);
  refuses("layer_types", {"full_attention", "sliding_attention"});
  refuses("layer_types", std::vector<std::string>(16, "chunked_attention"));
  refuses("partial_rotary_factor", 0.5);
  refuses("final_logit_softcapping", 30.0);
  refuses("num_experts", 8);
  refuses("residual_multiplier", 0.22);
  refuses("quantization_config", {{"quant_method", "fp8"}});
  mistral["layer_types"] = std::vector<std::string>(16, "full_attention");
  mistral["partial_rotary_factor"] = 1.0;
  mistral["sliding_window"] = mistral["max_position_embeddings"];
  const auto parsed = ModelConfig::from_json(mistral.dump());
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->family, Family::kMistral);
  const auto written = nlohmann::json::parse(parsed->to_json());
  EXPECT_EQ(written["architectures"], nlohmann::json({"MistralForCausalLM"}));
  EXPECT_TRUE(written["sliding_window"].is_null());
  EXPECT_EQ(ModelConfig::from_json(written.dump()).value(), *parsed);
}

// Qwen3-30B-A3B as published.
constexpr const char* kQwen30bA3b = R"({"architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,
  "attention_dropout":0.0,"bos_token_id":151643,"decoder_sparse_step":1,"eos_token_id":151645,"head_dim":128,
  "hidden_act":"silu","hidden_size":2048,"initializer_range":0.02,"intermediate_size":6144,
  "max_position_embeddings":40960,"max_window_layers":48,"mlp_only_layers":[],"model_type":"qwen3_moe",
  "moe_intermediate_size":768,"norm_topk_prob":true,"num_attention_heads":32,"num_experts":128,
  "num_experts_per_tok":8,"num_hidden_layers":48,"num_key_value_heads":4,"output_router_logits":false,
  "rms_norm_eps":1e-06,"rope_scaling":null,"rope_theta":1000000.0,"router_aux_loss_coef":0.001,"sliding_window":null,
  "tie_word_embeddings":false,"torch_dtype":"bfloat16","use_cache":true,"use_sliding_window":false,
  "vocab_size":151936})";

TEST(Config, ReadsAMixtureOfExperts) {
  const auto parsed = ModelConfig::from_json(kQwen30bA3b);
  ASSERT_TRUE(parsed) << parsed.error().message();
  EXPECT_EQ(parsed->family, Family::kQwen3Moe);
  EXPECT_EQ(parsed->parameters(), 30'532'122'624u);
  EXPECT_EQ(parsed->active_parameters(), 3'353'032'704u);
  EXPECT_EQ(parsed->mixture_layers(), 48);
  EXPECT_EQ(parsed->expert_choices(), 384);
  EXPECT_EQ(parsed->summary(), "qwen3_moe of 30532122624 parameters, 3353032704 of them active");
  EXPECT_EQ(ModelConfig::from_json(parsed->to_json()).value(), *parsed);
  auto json = nlohmann::json::parse(kQwen30bA3b);
  json["decoder_sparse_step"] = 2;
  json["mlp_only_layers"] = {5, 1};
  const auto some = ModelConfig::from_json(json.dump());
  ASSERT_TRUE(some) << some.error().message();
  EXPECT_EQ(some->mixture_layers(), 22);
  EXPECT_TRUE(some->is_mixture(3));
  for (const std::int64_t layer : {0, 1, 2, 5}) EXPECT_FALSE(some->is_mixture(layer)) << layer;
  // transformers 5 renames the number of experts.
  json["num_local_experts"] = json["num_experts"];
  EXPECT_EQ(ModelConfig::from_json(json.dump()).value(), *some);
  json.erase("num_experts");
  EXPECT_EQ(ModelConfig::from_json(json.dump()).value(), *some);
}

TEST(Config, MixturesThatAreNotImplementedAreRefusedByName) {
  const auto refuses = [](const char* name, nlohmann::json value) {
    auto changed = nlohmann::json::parse(kQwen30bA3b);
    changed[name] = std::move(value);
    const auto parsed = ModelConfig::from_json(changed.dump());
    ASSERT_FALSE(parsed) << name;
    EXPECT_NE(parsed.error().detail.find(name), std::string::npos) << parsed.error().detail;
    EXPECT_TRUE(ModelConfig::from_json(changed.dump(), ModelUse::kCarry)) << name;
  };
  refuses("num_experts", 0);
  refuses("num_experts", "128");
  refuses("num_local_experts", 64);
  refuses("num_experts_per_tok", 129);
  refuses("moe_intermediate_size", nullptr);
  refuses("norm_topk_prob", 1);
  refuses("decoder_sparse_step", 0);
  refuses("decoder_sparse_step", 49);
  refuses("mlp_only_layers", 3);
  refuses("mlp_only_layers", {-1});
  refuses("shared_expert_intermediate_size", 512);
  refuses("n_shared_experts", 1);
  refuses("routed_scaling_factor", 2.5);
  refuses("n_group", 8);
  refuses("scoring_func", "sigmoid");
  refuses("attention_bias", true);
  refuses("use_sliding_window", true);
  refuses("quantization_config", {{"quant_method", "fp8"}});
  std::vector<int> all(48);
  for (int layer = 0; layer < 48; ++layer) all[std::size_t(layer)] = layer;
  refuses("mlp_only_layers", all);
}

TEST(Config, AModelThatCannotBeComputedIsCarried) {
  const std::string text = R"({"model_type": "gemma3", "tie_word_embeddings": true, "eos_token_id": [1, 106],
      "text_config": {"vocab_size": 262208, "max_position_embeddings": 131072, "hidden_size": 2560,
                      "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}})";
  EXPECT_FALSE(ModelConfig::from_json(text));
  const auto carried = ModelConfig::from_json(text, ModelUse::kCarry);
  ASSERT_TRUE(carried) << carried.error().message();
  EXPECT_EQ(carried->family, Family::kCarried);
  EXPECT_EQ(carried->vocab_size, 262208);
  EXPECT_EQ(carried->positions_max, 131072);
  EXPECT_EQ(carried->eos, (std::vector<Token>{1, 106}));
  EXPECT_TRUE(carried->tie_embeddings);
  EXPECT_EQ(carried->to_json(), text);
  EXPECT_EQ(ModelConfig::from_json(carried->to_json(), ModelUse::kCarry).value(), *carried);
  const Status computable = carried->check_computable();
  ASSERT_FALSE(computable);
  EXPECT_NE(computable.error().detail.find("'model_type' is \"gemma3\""), std::string::npos);
  EXPECT_FALSE(policy_layout(*carried));
  // The sizes that a run needs are required.
  EXPECT_NE(ModelConfig::from_json(R"({"model_type": "x", "vocab_size": 10})", ModelUse::kCarry)
                .error()
                .detail.find("max_position_embeddings"),
            std::string::npos);
  EXPECT_FALSE(ModelConfig::from_json("[]", ModelUse::kCarry));
  // A computable model is not carried.
  EXPECT_EQ(ModelConfig::from_json(kQwen8b, ModelUse::kCarry)->family, Family::kQwen3);
}

TEST(Config, RoundTripsThroughJson) {
  for (const std::string& name : preset_names()) {
    ModelConfig config = preset(name).value();
    EXPECT_TRUE(config.validate()) << name;
    EXPECT_EQ(ModelConfig::from_json(config.to_json()).value(), config) << name;
    config.eos = {1, 2};
    config.bos.reset();
    EXPECT_EQ(ModelConfig::from_json(config.to_json()).value(), config) << name;
  }
}

TEST(Config, AcceptsBothNamesOfTheDtypeAndNestedRope) {
  auto j = nlohmann::json::parse(kQwen8b);
  j.erase("torch_dtype");
  j["dtype"] = "bfloat16";
  j.erase("rope_theta");
  j.erase("rope_scaling");
  j["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(ModelConfig::from_json(j.dump()).value(), preset("qwen3-8b").value());
  j["dtype"] = "float16";
  EXPECT_FALSE(ModelConfig::from_json(j.dump()));
  j["dtype"] = "bfloat16";
  j["rope_parameters"]["rope_type"] = "yarn";
  EXPECT_FALSE(ModelConfig::from_json(j.dump()));
}

TEST(Config, RefusesUnsupportedModels) {
  refused("model_type", "gemma");
  refused("model_type", nullptr);
  refused("rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}});
  refused("attention_bias", true);
  refused("use_sliding_window", "yes");
  refused("hidden_act", "gelu");
  refused("torch_dtype", "float16");
}

TEST(Config, RefusesImpossibleNumbers) {
  refused("hidden_size", 0);
  refused("hidden_size", -1);
  refused("hidden_size", 4096.5);
  refused("hidden_size", "4096");
  refused("hidden_size", nullptr);
  refused("vocab_size", std::uint64_t{1} << 63);
  refused("num_hidden_layers", 1 << 20);
  refused("num_key_value_heads", 5);
  refused("head_dim", 127);
  refused("rms_norm_eps", 0);
  refused("rope_theta", "big");
  refused("tie_word_embeddings", 1);
  refused("eos_token_id", 151936);
  refused("eos_token_id", nlohmann::json::array({1, "two"}));
  refused("bos_token_id", -5);
  for (const char* text : {"", "{", "[]", "null", "\xff"}) EXPECT_FALSE(ModelConfig::from_json(text)) << text;
}

TEST(Config, PresetsFitTheCharacterTokenizer) {
  const Tokenizer tokenizer = Tokenizer::characters(kCharacterAlphabet).value();
  for (const char* name : {"tiny-64", "tiny-128", "tiny-256", "tiny-moe"}) {
    const ModelConfig config = preset(name).value();
    EXPECT_EQ(config.vocab_size, tokenizer.size());
    EXPECT_EQ(config.eos, std::vector<Token>{*tokenizer.end_of_text()});
  }
  EXPECT_LT(memory_estimate(preset("tiny-64").value()).policy_bf16.count, 350'000u);
  EXPECT_LT(memory_estimate(preset("tiny-128").value()).policy_bf16.count, 1'000'000u);
  const auto unknown = preset("tiny-63");
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().detail.find("tiny-64"), std::string::npos);
}

TEST(Policy, FreshValuesAreTheSameEverywhere) {
  for (const auto& [name, digest] : {std::pair("tiny-64", "1bd523bdfc9bcd2548ffd2085d17e149"),
                                     std::pair("bytes-64", "9738fb70db7bd4ab9f1693e3046173bb")})
    EXPECT_EQ(init_policy(preset(name).value(), 7).value().digest().hex(), digest);
  EXPECT_NE(init_policy(preset("tiny-64").value(), 7)->digest(), init_policy(preset("tiny-64").value(), 8)->digest());
}

}  // namespace
}  // namespace echoline::model
