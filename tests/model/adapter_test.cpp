// Adapters: adapter_config.json, names and shapes of tensors, initial values, joining and merging.
#include "model/adapter.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/config.hpp"
#include "delta/digest.hpp"
#include "model/config.hpp"
#include "model/policy.hpp"
#include "model/settings.hpp"

namespace echoline::model {
namespace {

using nlohmann::json;

AdapterConfig small_adapter() { return {.rank = 2, .alpha = 4, .targets = {"q_proj", "up_proj"}, .base_model = {}}; }

// What PEFT 0.17 writes for a model of ours.
json peft_config() {
  return {{"alpha_pattern", json::object()},
          {"auto_mapping", nullptr},
          {"base_model_name_or_path", "base"},
          {"bias", "none"},
          {"corda_config", nullptr},
          {"eva_config", nullptr},
          {"exclude_modules", nullptr},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"layer_replication", nullptr},
          {"layers_pattern", nullptr},
          {"layers_to_transform", nullptr},
          {"loftq_config", json::object()},
          {"lora_alpha", 32},
          {"lora_bias", false},
          {"lora_dropout", 0.05},
          {"megatron_config", nullptr},
          {"megatron_core", "megatron.core"},
          {"modules_to_save", nullptr},
          {"peft_type", "LORA"},
          {"qalora_group_size", 16},
          {"r", 16},
          {"rank_pattern", json::object()},
          {"revision", nullptr},
          {"target_modules", {"v_proj", "q_proj"}},
          {"target_parameters", nullptr},
          {"task_type", "CAUSAL_LM"},
          {"trainable_token_indices", nullptr},
          {"use_dora", false},
          {"use_qalora", false},
          {"use_rslora", false}};
}

float value_at(const delta::TensorView& tensor, std::size_t index) {
  std::uint16_t upper = 0;
  std::memcpy(&upper, tensor.bytes.data() + 2 * index, 2);
  return std::bit_cast<float>(std::uint32_t{upper} << 16);
}

const delta::TensorView& tensor_of(const delta::StateView& state, const std::string& name) {
  const auto it = std::find_if(state.begin(), state.end(), [&](const auto& t) { return t.name == name; });
  EXPECT_NE(it, state.end()) << name;
  return *it;
}

TEST(AdapterConfig, ReadsAndWritesPeftsFile) {
  const auto read = AdapterConfig::from_json(peft_config().dump());
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->rank, 16);
  EXPECT_EQ(read->alpha, 32);
  EXPECT_EQ(read->scale(), 2);
  EXPECT_EQ(read->targets, (std::vector<std::string>{"q_proj", "v_proj"}));
  EXPECT_EQ(read->base_model, "base");
  const auto again = AdapterConfig::from_json(read->to_json());
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(*again, *read);
  EXPECT_TRUE(json::parse(read->to_json())["lora_alpha"].is_number_integer());
}

TEST(AdapterConfig, RefusesWhatIsNotImplementedByName) {
  const std::pair<const char*, json> refused[] = {{"use_dora", true},
                                                  {"use_rslora", true},
                                                  {"bias", "all"},
                                                  {"modules_to_save", {"lm_head"}},
                                                  {"rank_pattern", {{"q_proj", 4}}},
                                                  {"alpha_pattern", {{"q_proj", 4}}},
                                                  {"layers_to_transform", {0, 1}},
                                                  {"fan_in_fan_out", true},
                                                  {"a_feature_of_tomorrow", "on"},
                                                  {"target_modules", "all-linear"},
                                                  {"target_modules", json::array()},
                                                  {"target_modules", {"embed_tokens"}},
                                                  {"r", 0},
                                                  {"r", 1.5},
                                                  {"lora_alpha", "much"},
                                                  {"lora_alpha", -1},
                                                  {"peft_type", "IA3"}};
  for (const auto& [name, value] : refused) {
    json config = peft_config();
    config[name] = value;
    const auto read = AdapterConfig::from_json(config.dump());
    ASSERT_FALSE(read) << name;
    EXPECT_NE(read.error().detail.find(fmt::format("'{}'", name)), std::string::npos) << read.error().detail;
    EXPECT_EQ(read.error().operation, "adapter_config.json");
  }
  EXPECT_FALSE(AdapterConfig::from_json("[]"));
  EXPECT_FALSE(AdapterConfig::from_json("{"));
}

TEST(Adapter, HasTwoMatricesForEachTargetOfTheBase) {
  const auto base = policy_layout(*preset("tiny-64"));
  ASSERT_TRUE(base);
  const auto layout = adapter_layout(*base, small_adapter());
  ASSERT_TRUE(layout) << layout.error().message();
  const ModelConfig shape = *preset("tiny-64");
  EXPECT_EQ(std::ssize(*layout), 2 * 2 * shape.layers);
  const std::string prefix = "base_model.model.model.layers.0.mlp.up_proj.";
  EXPECT_EQ(tensor_of(*layout, prefix + "lora_A.weight").shape, (std::vector<std::int64_t>{2, shape.hidden_size}));
  EXPECT_EQ(tensor_of(*layout, prefix + "lora_B.weight").shape,
            (std::vector<std::int64_t>{shape.intermediate_size, 2}));
  EXPECT_TRUE(std::is_sorted(layout->begin(), layout->end(), [](auto& a, auto& b) { return a.name < b.name; }));

  AdapterConfig longer = small_adapter();
  longer.targets = {"self_attn.q_proj"};
  EXPECT_EQ(std::ssize(*adapter_layout(*base, longer)), 2 * shape.layers);
  for (const char* wrong : {"proj", "w1", "q_norm"}) {
    AdapterConfig other = small_adapter();
    other.targets = {wrong};
    const auto refused = adapter_layout(*base, other);
    ASSERT_FALSE(refused) << wrong;
    EXPECT_NE(refused.error().detail.find("gate_proj"), std::string::npos) << refused.error().detail;
  }
}

TEST(Adapter, BeginsAsPeftsDoes) {
  const auto base = policy_layout(*preset("tiny-64"));
  auto adapter = init_adapter(*base, small_adapter(), 7), same = init_adapter(*base, small_adapter(), 7),
       other = init_adapter(*base, small_adapter(), 8);
  ASSERT_TRUE(adapter && same && other);
  double squares = 0, count = 0;
  for (const delta::TensorView& tensor : adapter->view()) {
    const bool is_b = tensor.name.ends_with("lora_B.weight");
    const double bound = 1 / std::sqrt(static_cast<double>(tensor.shape[1]));
    for (std::size_t i = 0; i < tensor.bytes.size() / 2; ++i) {
      const double value = value_at(tensor, i);
      if (is_b) {
        ASSERT_EQ(value, 0);
        continue;
      }
      ASSERT_LE(std::abs(value), bound * 1.01);
      squares += value * value / (bound * bound);
      ++count;
    }
  }
  EXPECT_NEAR(squares / count, 1.0 / 3, 0.03);  // of a uniform distribution
  EXPECT_EQ(adapter->digest(), same->digest());
  EXPECT_NE(adapter->digest(), other->digest());
}

TEST(Adapter, SplitsAndJoinsAPolicy) {
  const auto base = init_policy(*preset("tiny-64"), 1);
  auto adapter = init_adapter(base->view(), small_adapter(), 1);
  ASSERT_TRUE(base && adapter);
  const auto policy = join_adapter(base->view(), adapter->view(), small_adapter());
  ASSERT_TRUE(policy) << policy.error().message();
  EXPECT_EQ(policy->size(), base->size() + adapter->size());
  const SplitPolicy parts = split_adapter(*policy);
  EXPECT_EQ(parts.base.size(), base->size());
  EXPECT_EQ(parts.adapter.size(), adapter->size());
  EXPECT_EQ(parts.base.front().bytes.data(), base->view().front().bytes.data());

  delta::StateView missing = adapter->view();
  missing.pop_back();
  EXPECT_FALSE(join_adapter(base->view(), missing, small_adapter()));
  AdapterConfig other_rank = small_adapter();
  other_rank.rank = 3;
  const auto refused = join_adapter(base->view(), adapter->view(), other_rank);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().detail.find("expected [3, "), std::string::npos) << refused.error().detail;
  EXPECT_FALSE(join_adapter(*policy, adapter->view(), small_adapter()));
}

TEST(Adapter, MergesIntoTheWeights) {
  const auto base = init_policy(*preset("tiny-64"), 1);
  auto adapter = init_adapter(base->view(), small_adapter(), 1);
  const auto unchanged = merge_adapter(*join_adapter(base->view(), adapter->view(), small_adapter()), small_adapter());
  ASSERT_TRUE(unchanged) << unchanged.error().message();
  EXPECT_EQ(*delta::digest_state(unchanged->view()), *delta::digest_state(base->view()));

  const std::string layer = "model.layers.1.self_attn.q_proj";
  const std::string b_name = fmt::format("base_model.model.{}.lora_B.weight", layer);
  const std::uint16_t one = 0x3f80;  // 1.0 at [3, 1]
  std::memcpy(adapter->mutable_bytes(*adapter->find(b_name)).data() + 2 * (3 * 2 + 1), &one, 2);
  adapter->seal();
  const auto merged = merge_adapter(*join_adapter(base->view(), adapter->view(), small_adapter()), small_adapter());
  ASSERT_TRUE(merged) << merged.error().message();
  const delta::StateView before = base->view(), after = merged->view(), low = adapter->view();
  const delta::TensorView &a = tensor_of(low, fmt::format("base_model.model.{}.lora_A.weight", layer)),
                          &old_weight = tensor_of(before, layer + ".weight"),
                          &new_weight = tensor_of(after, layer + ".weight");
  const auto in = static_cast<std::size_t>(a.shape[1]);
  for (std::size_t i = 0; i < old_weight.bytes.size() / 2; ++i) {
    const double change = i / in == 3 ? 2 * value_at(a, in + i % in) : 0;  // alpha / rank is 2
    ASSERT_NEAR(value_at(new_weight, i), value_at(old_weight, i) + change, 0.005) << i;
  }
  std::size_t changed = 0;
  for (std::size_t t = 0; t < before.size(); ++t)
    changed += std::ranges::equal(before[t].bytes, after[t].bytes) ? 0 : 1;
  EXPECT_EQ(changed, 1u);
}

TEST(AdapterSettings, AreReadFromTheRunFile) {
  const auto read_text = [](const char* text, AdapterConfig& settings) {
    auto file = ConfigFile::parse(text, "run.yaml");
    read(file->root().section("adapter"), settings);
    return file->finish();
  };
  AdapterConfig none, some, all;
  ASSERT_TRUE(read_text("{}", none));
  EXPECT_EQ(none.rank, 0);
  ASSERT_TRUE(read_text("adapter: {rank: 8}", some));
  EXPECT_EQ(some.alpha, 16);  // twice the rank
  EXPECT_EQ(some.targets.size(), 7u);
  ASSERT_TRUE(read_text("adapter: {rank: 8, alpha: 4, targets: [v_proj, q_proj]}", all));
  EXPECT_EQ(all.scale(), 0.5);
  EXPECT_EQ(all.targets, (std::vector<std::string>{"q_proj", "v_proj"}));
  AdapterConfig wrong;
  EXPECT_FALSE(read_text("adapter: {rank: 8, targets: []}", wrong));
  EXPECT_FALSE(read_text("adapter: {rank: 8, targets: [embed_tokens]}", wrong));
  EXPECT_FALSE(read_text("adapter: {rank: -1}", wrong));
}

}  // namespace
}  // namespace echoline::model
