// The estimate of training memory against the actual use: the test counts every tensor of a learner step.
#include "model/training_memory.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "base/random.hpp"
#include "learner/training/trainer.hpp"
#include "model/weights.hpp"
#include "tests/learner/tensor_count.hpp"

namespace echoline::learner {
namespace {

model::ModelConfig shape(model::Family family, std::int64_t vocabulary, bool tied) {
  model::ModelConfig config;
  config.family = family;
  config.vocab_size = vocabulary;
  config.hidden_size = 128;
  config.intermediate_size = 384;
  config.layers = 6;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.positions_max = 512;
  config.tie_embeddings = tied;
  if (family == model::Family::kQwen3Moe)
    config.experts = model::ExpertsConfig{.count = 8, .per_token = 2, .intermediate_size = 192, .dense_layers = {}};
  if (family == model::Family::kGemma3) config.sliding_window = model::SlidingWindow{.tokens = 64, .full_layers = {5}};
  return config;
}

constexpr std::int64_t kPromptTokens = 8, kResponseTokens = 248;

struct Case {
  model::Family family;
  std::int64_t vocabulary;
  bool tied, bf16, int8, recompute, adapter = false;
};

TEST(TrainingMemory, IsPredictedWithinATenth) {
  model::use_threads(1);
  const Case cases[] = {
      // a comment names what takes the most memory
      {model::Family::kQwen3, 512, true, false, false, false},  // activations
      {model::Family::kQwen3, 512, true, false, false, true},   // activations of one layer
      {model::Family::kQwen2, 512, false, true, true, false},
      {model::Family::kQwen3, 20000, true, false, true, true},  // the vocabulary
      {model::Family::kQwen3, 20000, true, true, true, true},
      {model::Family::kLlama, 20000, false, false, false, false},
      {model::Family::kLlama, 20000, false, true, false, true},
      {model::Family::kQwen3, 151936, true, true, true, true},  // logits in several parts
      {model::Family::kQwen3, 512, true, false, false, false, true},
      {model::Family::kLlama, 20000, false, true, true, true, true},
      {model::Family::kQwen3Moe, 512, true, false, false, false},
      {model::Family::kQwen3Moe, 512, true, true, false, true},
      {model::Family::kGemma3, 512, true, false, false, false},
      {model::Family::kGemma3, 512, true, true, false, true},
  };
  for (const Case& c : cases) {
    model::ModelConfig config = shape(c.family, c.vocabulary, c.tied);
    if (c.adapter) config.adapter = model::AdapterConfig{.rank = 8, .alpha = 16, .base_model = {}};
    const auto counter = std::make_shared<TensorCount>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    const auto model = model::init(config, 1, torch::kCPU, c.bf16 ? torch::kBFloat16 : torch::kFloat).value();
    model->recompute_layers(c.recompute);
    if (c.adapter) model->freeze_base();
    TrainerConfig training;
    training.optimizer.moments = c.int8 ? Moments::kInt8 : Moments::kFp32;
    training.microbatch_tokens = 512;
    std::vector<schema::Trajectory> batch;
    Random random(3);
    for (std::uint32_t i = 0; i < 4; ++i) {
      schema::Trajectory trajectory;
      trajectory.set_group(i / 2);
      trajectory.set_reward(i % 2);
      trajectory.set_finished(true);
      for (int token = 0; token < kPromptTokens; ++token)
        trajectory.add_prompt_tokens(static_cast<std::uint32_t>(random.below(500)));
      for (int token = 0; token < kResponseTokens; ++token) {
        trajectory.add_response_tokens(static_cast<std::uint32_t>(random.below(500)));
        trajectory.add_logprobs(static_cast<float>(-std::log(static_cast<double>(c.vocabulary))));
      }
      batch.push_back(std::move(trajectory));
    }
    const auto trainer = Trainer::create(model, training).value();
    const auto report = trainer->step(batch);
    ASSERT_TRUE(report) << report.error().message();
    const model::TrainingMemory predicted =
        model::training_memory(config, {.bf16 = c.bf16,
                                        .int8_moments = c.int8,
                                        .reference = false,
                                        .recompute = c.recompute,
                                        .microbatch_tokens = 512,
                                        .sequence_tokens = kPromptTokens + kResponseTokens});
    EXPECT_NEAR(static_cast<double>(predicted.tensors().count) / counter->most(), 1, 0.1)
        << model::family_name(c.family) << " vocabulary " << c.vocabulary << (c.tied ? " tied" : "")
        << (c.bf16 ? " bf16" : "") << (c.int8 ? " int8" : "") << (c.recompute ? " recompute" : "")
        << (c.adapter ? " adapter" : "") << ": predicted " << to_text(predicted.tensors()) << " (weights "
        << to_text(predicted.weights) << ", gradients " << to_text(predicted.gradients) << ", optimizer "
        << to_text(predicted.optimizer) << ", activations " << to_text(predicted.activations) << ", passing "
        << to_text(predicted.transient) << "), measured " << counter->most() / 1e6 << " MB";
  }
}

}  // namespace
}  // namespace echoline::learner
