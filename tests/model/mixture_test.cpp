// Mixtures of experts: experts that the engine records, and the same experts in the trainer's pass.
#include "model/mixture.hpp"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/random.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "model/running_batch.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

ModelConfig moe_config(bool tied = true) { return small_config(Family::kQwen3Moe, tied); }

// Steps until nothing is left.
std::map<std::uint64_t, Generation> finish(RunningBatch& batch) {
  std::map<std::uint64_t, Generation> out;
  for (int steps = 0; steps < 10'000 && batch.running() + batch.waiting() > 0; ++steps)
    for (Ended& ended : batch.step()) out.emplace(ended.id, std::move(ended.generation).value());
  return out;
}

std::vector<std::int64_t> text_of(const std::vector<Token>& prompt, const Generation& generation) {
  std::vector<std::int64_t> text(prompt.begin(), prompt.end());
  text.insert(text.end(), generation.tokens.begin(), generation.tokens.end());
  return text;
}

// The experts of each token and mixture layer that a pass over the text chooses, as Generation::experts has them.
std::vector<std::int16_t> experts_of_pass(Transformer& model, const std::vector<std::int64_t>& text) {
  torch::NoGradGuard no_gradient;
  Routing routing;
  routing.records = true;
  model.hidden_states(torch::tensor(text, torch::kLong).unsqueeze(0), {}, nullptr, &routing);
  const Tensor used = routing.used.contiguous();
  return {used.data_ptr<std::int16_t>(), used.data_ptr<std::int16_t>() + used.numel()};
}

TEST(Mixture, ChoosesTheHighestScoresAndTheFirstOfEqualOnes) {
  std::vector<std::int64_t> chosen(3);
  choose_experts(std::vector<float>{0.1f, 0.4f, 0.1f, 0.2f, 0.1f}, chosen);
  EXPECT_EQ(chosen, (std::vector<std::int64_t>{0, 1, 3}));
}

TEST(Mixture, ParametersHaveTheNamesOfPublishedDirectories) {
  const ModelConfig config = moe_config();
  const auto parameters = init(config, 1).value()->named_parameters();
  EXPECT_EQ(parameters["model.layers.0.mlp.gate.weight"].sizes(), (std::vector<std::int64_t>{5, 20}));
  EXPECT_EQ(parameters["model.layers.2.mlp.experts.4.down_proj.weight"].sizes(), (std::vector<std::int64_t>{20, 11}));
  EXPECT_TRUE(parameters.contains("model.layers.1.mlp.gate_proj.weight")) << "a layer of mlp_only_layers";
  EXPECT_FALSE(parameters.contains("model.layers.0.mlp.gate_proj.weight"));
}

// The engine records experts in every way that a sequence can run: alone, with a shared prompt, from a cached prompt,
// and prefilled again after it lost its place. A pass over the whole text chooses the same.
TEST(Mixture, TheEngineRecordsTheExpertsOfAPassOverTheText) {
  const ModelConfig config = moe_config();
  const auto model = random_model(config, 3);
  const auto choices = static_cast<std::size_t>(config.expert_choices());
  ASSERT_EQ(choices, 4u);
  Random random(5);
  std::vector<std::vector<Token>> prompts(3);
  for (auto& prompt : prompts)
    for (std::uint64_t t = 0, n = 1 + random.below(20); t < n; ++t) prompt.push_back(Token(random.below(19)));
  for (const bool short_of_pages : {false, true}) {
    BatchLimits limits{.records_experts = true};
    if (short_of_pages) {
      const auto page_bytes = std::uint64_t(config.layers * config.kv_heads * config.head_dim * 16 * 2 * 4);
      limits.cache_max = Bytes{9 * page_bytes};
    }
    RunningBatch batch(model, limits);
    std::uint64_t id = 0;
    for (int again = 0; again < 3; ++again)
      for (const auto& prompt : prompts)
        ASSERT_TRUE(batch.add({.id = id++, .prompt = prompt, .sampling = {.tokens_max = 30, .seed = id}}));
    std::size_t running_max = 0;
    std::map<std::uint64_t, Generation> done;
    for (int steps = 0; steps < 10'000 && batch.running() + batch.waiting() > 0; ++steps) {
      for (Ended& ended : batch.step()) done.emplace(ended.id, std::move(ended.generation).value());
      running_max = std::max(running_max, batch.running());
    }
    ASSERT_EQ(done.size(), 9u);
    EXPECT_EQ(running_max == 9, !short_of_pages);
    for (const auto& [sequence, generation] : done) {
      const auto text = text_of(prompts[sequence % 3], generation);
      ASSERT_EQ(generation.experts.size(), text.size() * choices);
      std::vector<std::int16_t> want = experts_of_pass(*model, text);
      std::fill(want.end() - std::ptrdiff_t(choices), want.end(), std::int16_t(-1));  // the last token is no input
      EXPECT_EQ(generation.experts, want) << sequence;
    }
  }
  RunningBatch without(model, {});
  ASSERT_TRUE(without.add({.id = 1, .prompt = {1}, .sampling = {.tokens_max = 3}}));
  EXPECT_TRUE(finish(without).at(1).experts.empty());
}

// Experts other than the router's: the pass uses them, with and without gradients, stored or recomputed, and trains the
// router. A row of -1 is routed freshly.
TEST(Mixture, GivenExpertsAreUsed) {
  for (const bool tied : {false, true}) {
    const ModelConfig config = moe_config(tied);
    const auto model = random_model(config, 8);
    const std::vector<std::int64_t> text = {2, 7, 1, 8, 2, 8, 1, 3};
    std::vector<std::int16_t> experts;
    reference::GivenExperts given;
    for (std::size_t t = 0; t < text.size(); ++t) {
      given.emplace_back();
      for (std::size_t layer = 0; layer < 2; ++layer) {
        const std::size_t first = (t + layer) % 4;
        if (t == 3 || (t == 4 && layer == 1)) {
          experts.insert(experts.end(), {-1, -1});
          given.back().emplace_back();
        } else {
          experts.insert(experts.end(), {std::int16_t(first), std::int16_t(first + 1)});
          given.back().push_back({first, first + 1});
        }
      }
    }
    const auto want = reference::logits(config, reference_weights(*model), {text.begin(), text.end()}, given);
    const auto own = reference::logits(config, reference_weights(*model), {text.begin(), text.end()});
    const PackedTokens packed =
        pack({{.tokens = text, .prompt = 1, .mask = {}, .experts = experts}}, torch::kCPU, config.expert_choices());
    ASSERT_EQ(packed.experts.sizes(), (std::vector<std::int64_t>{7, 4}));
    double differences = 0;
    std::map<std::string, Tensor> stored_gradients;
    for (const bool recompute : {false, true}) {
      model->recompute_layers(recompute);
      for (const bool gradients : {false, true}) {
        torch::AutoGradMode mode(gradients);
        const TokenScores scores = model->packed_logprobs(packed);
        for (std::size_t t = 0; t + 1 < text.size(); ++t) {
          const auto token = static_cast<std::size_t>(text[t + 1]);
          const double got = scores.logprobs[std::int64_t(t)].item<double>();
          EXPECT_NEAR(got, reference::log_softmax(want[t], 1)[token], 3e-5) << t;
          differences += std::abs(got - reference::log_softmax(own[t], 1)[token]);
        }
        if (!gradients) continue;
        model->zero_grad();
        scores.logprobs.sum().backward();
        for (const auto& item : model->named_parameters()) {
          const Tensor gradient = item.value().grad();
          if (!recompute) {
            stored_gradients[item.key()] = gradient.clone();
            EXPECT_GT(gradient.abs().max().item<double>(), 1e-4) << item.key();
          } else {
            const Tensor& stored = stored_gradients.at(item.key());
            EXPECT_LT(distance(gradient, stored), 1e-5 * std::max(1.0, stored.abs().max().item<double>()))
                << item.key();
          }
        }
      }
    }
    EXPECT_GT(differences, 1) << "the router's own experts give other log-probabilities";
  }
}

TEST(Mixture, PackedSequencesShareThePromptsExperts) {
  const std::vector<std::int64_t> a = {1, 2, 3, 4, 5}, b = {1, 2, 3, 6, 7};
  const std::vector<std::int16_t> a_experts = {0, 1, 2, 3, 4}, b_experts = {5, 6, 7};  // b's response has none
  const PackedTokens packed = pack({{.tokens = a, .prompt = 3, .mask = {}, .experts = a_experts},
                                    {.tokens = b, .prompt = 3, .mask = {}, .experts = b_experts}},
                                   torch::kCPU, 1);
  const Tensor got = packed.experts.flatten();
  EXPECT_EQ(std::vector<std::int64_t>(got.data_ptr<std::int64_t>(), got.data_ptr<std::int64_t>() + got.numel()),
            (std::vector<std::int64_t>{0, 1, 2, 3, 7, -1}));
  EXPECT_FALSE(pack({{.tokens = a, .prompt = 3, .mask = {}}}, torch::kCPU, 1).experts.defined());
}

// The engine's weights are bf16 and the trainer's fp32 of the same values, so their log-probabilities differ only by
// the rounding of sums, and with the engine's experts not even where two experts have nearly equal scores.
TEST(Mixture, ReplayedExpertsGiveTheEnginesLogProbabilities) {
  const ModelConfig config = preset("tiny-moe").value();
  const auto trained = init(config, 6).value();
  const auto engine = std::make_shared<Transformer>(config, torch::kCPU, torch::kBFloat16);
  ASSERT_TRUE(load_policy(*engine, export_policy(*trained)->view()));
  RunningBatch batch(engine, {.records_experts = true});
  const std::vector<Token> prompt = {5, 9, 14, 3};
  for (std::uint64_t id = 0; id < 4; ++id)
    ASSERT_TRUE(batch.add({.id = id, .prompt = prompt, .sampling = {.tokens_max = 60, .seed = id}}));
  for (const auto& [id, generation] : finish(batch)) {
    const auto text = text_of(prompt, generation);
    const PackedTokens packed =
        pack({{.tokens = text, .prompt = prompt.size(), .mask = {}, .experts = generation.experts}}, torch::kCPU,
             config.expert_choices());
    const Tensor scores = trained->packed_logprobs(packed).logprobs;
    ASSERT_EQ(scores.numel(), std::ssize(generation.logprobs));
    for (std::size_t t = 0; t < generation.logprobs.size(); ++t)
      EXPECT_NEAR(scores[std::int64_t(t)].item<double>(), generation.logprobs[t], 2e-4);
  }
}

TEST(Mixture, AdaptersOfAttentionWorkAndThoseOfExpertsAreRefused) {
  ModelConfig config = moe_config();
  config.adapter = AdapterConfig{.rank = 2, .alpha = 4, .targets = {"o_proj", "q_proj"}, .base_model = {}};
  const auto adapted = random_model(config, 4);
  torch::NoGradGuard no_grad;
  for (auto& item : adapted->named_parameters())
    if (item.key().ends_with("lora_B.weight"))
      item.value().copy_((torch::rand_like(item.value()) - 0.5).to(torch::kBFloat16));
  const auto base = random_model(moe_config(), 4);
  const Tensor ids = ids_of({{1, 2, 3, 4, 5, 6}});
  const Tensor with = adapted->token_logprobs(ids).logprobs, without = base->token_logprobs(ids).logprobs;
  EXPECT_GT(distance(with, without), 1e-2);
  EXPECT_LT(distance(with, adapted->token_logprobs(ids, 1.0, {}, /*as_trained=*/true).logprobs), 2e-5);

  for (const char* target : {"gate_proj", "gate", "experts.3.up_proj"}) {
    config.adapter->targets = {target};
    const Status refused = check_adapter_computable(config);
    ASSERT_FALSE(refused) << target;
    EXPECT_NE(refused.error().detail.find(target), std::string::npos) << refused.error().detail;
    EXPECT_TRUE(policy_layout(config)) << "such an adapter can be carried";
    EXPECT_FALSE(create(config));
  }
}

}  // namespace
}  // namespace echoline::model
