// The probe of a policy before workers get it.
#include "model/probe.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "model/finite.hpp"
#include "model/generate.hpp"
#include "model/policy.hpp"
#include "model/probe_text.hpp"
#include "model/transformer.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

// Half of the greatest value that bf16 has.
constexpr std::uint16_t kHuge = 0x7f00;

void fill(delta::OwnedState& policy, std::string_view ending, std::uint16_t value) {
  for (std::size_t i = 0; i < policy.size(); ++i)
    if (policy.name(i).ends_with(ending))
      for (std::span<std::byte> bytes = policy.mutable_bytes(i); !bytes.empty(); bytes = bytes.subspan(2))
        std::memcpy(bytes.data(), &value, 2);
  policy.seal();
}

TEST(ProbePolicy, FindsLogProbabilitiesThatAreNotFinite) {
  for (const char* preset_name : {"tiny-64", "bytes-64"}) {
    const ModelConfig config = *preset(preset_name);
    for (const double temperature : {0.0, 0.7, 1.0})
      EXPECT_TRUE(probe_policy(init_policy(config, 1)->view(), config, temperature, 1)) << preset_name;
    for (const char* ending : {".mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"}) {
      delta::OwnedState policy = *init_policy(config, 1);
      fill(policy, ending, kHuge);
      ASSERT_TRUE(check_finite(policy.view()));
      const auto probed = probe_policy(policy.view(), config, 1, 1);
      ASSERT_FALSE(probed) << preset_name << " " << ending;
      EXPECT_EQ(probed.error().code, Code::kInvalid);
      EXPECT_THAT(probed.error().message(), testing::HasSubstr("log-probabilities are not finite"));
    }
  }
}

// The probe agrees with the model's own log-probabilities.
TEST(ProbePolicy, GivesTheLogProbabilitiesOfTheText) {
  const ModelConfig config = *preset("tiny-64");
  const delta::OwnedState policy = *init_policy(config, 1);
  const std::vector<Token> text = probe_text(config);
  const auto model = *create(config, torch::kCPU, torch::kBFloat16);
  ASSERT_TRUE(load_policy(*model, policy.view()));
  const std::vector<float> expected = *score(*model, {text.front()}, {text.begin() + 1, text.end()});
  const std::vector<double> probed = *probe_policy(policy.view(), config, 0.7, 1);
  ASSERT_EQ(probed.size(), text.size() - 1);
  for (std::size_t i = 0; i < probed.size(); ++i) EXPECT_NEAR(probed[i], expected[i], 1e-4) << i;
}

// The families, tied and untied.
TEST(ProbePolicy, RunsEveryFamily) {
  for (const Family family :
       {Family::kQwen3, Family::kQwen3Moe, Family::kQwen2, Family::kLlama, Family::kMistral, Family::kGemma3})
    for (const bool tied : {true, false}) {
      ModelConfig c;
      c.family = family;
      if (family == Family::kQwen3Moe)
        c.experts = ExpertsConfig{.count = 4, .per_token = 2, .intermediate_size = 32, .dense_layers = {}};
      if (family == Family::kGemma3) c.sliding_window = SlidingWindow{.tokens = 3, .full_layers = {1}};
      c.vocab_size = 100;
      c.hidden_size = 32;
      c.intermediate_size = 64;
      c.layers = 2;
      c.heads = 4;
      c.kv_heads = 2;
      c.head_dim = 8;
      c.positions_max = 8;
      c.tie_embeddings = tied;
      delta::OwnedState policy = *init_policy(c, 1);
      const auto probed = probe_policy(policy.view(), c, 1, 1);
      EXPECT_TRUE(probed) << family_name(family) << ": " << probed.error().message();
      fill(policy, "self_attn.k_proj.weight", 0x7fc0);
      EXPECT_FALSE(probe_policy(policy.view(), c, 1, 1)) << family_name(family) << ": the probe uses the given weights";
    }
}

}  // namespace
}  // namespace echoline::model
