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
  model::ModelConfig c;
  c.family = family;
  c.vocab_size = vocabulary;
  c.hidden_size = 128;
  c.intermediate_size = 384;
  c.layers = 6;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 64;
  c.positions_max = 512;
  c.tie_embeddings = tied;
  return c;
}

struct Case {
  model::Family family;
  std::int64_t vocabulary;
  bool tied, bf16, int8, recompute;
};

TEST(TrainingMemory, IsPredictedWithinATenth) {
  model::use_threads(1);
  const Case cases[] = {
      {model::Family::kQwen3, 512, true, false, false, false},  // activations
      {model::Family::kQwen3, 512, true, false, false, true},   // one layer of them
      {model::Family::kQwen2, 512, false, true, true, false},
      {model::Family::kQwen3, 20000, true, false, true, true},  // the vocabulary
      {model::Family::kQwen3, 20000, true, true, true, true},
      {model::Family::kLlama, 20000, false, false, false, false},
      {model::Family::kLlama, 20000, false, true, false, true},
      {model::Family::kQwen3, 151936, true, true, true, true},  // logits in several parts
  };
  for (const Case& c : cases) {
    const model::ModelConfig config = shape(c.family, c.vocabulary, c.tied);
    const auto counter = std::make_shared<TensorCount>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    const auto model = model::init(config, 1, torch::kCPU, c.bf16 ? torch::kBFloat16 : torch::kFloat).value();
    model->recompute_layers(c.recompute);
    TrainerConfig training;
    training.optimizer.moments = c.int8 ? Moments::kInt8 : Moments::kFp32;
    training.microbatch_tokens = 512;
    std::vector<schema::Trajectory> batch;
    Random random(3);
    for (std::uint32_t i = 0; i < 4; ++i) {
      schema::Trajectory t;
      t.set_group(i / 2);
      t.set_reward(i % 2);
      t.set_finished(true);
      for (int k = 0; k < 8; ++k) t.add_prompt_tokens(static_cast<std::uint32_t>(random.below(500)));
      for (int k = 0; k < 248; ++k) {
        t.add_response_tokens(static_cast<std::uint32_t>(random.below(500)));
        t.add_logprobs(static_cast<float>(-std::log(static_cast<double>(c.vocabulary))));
      }
      batch.push_back(std::move(t));
    }
    const auto trainer = Trainer::create(model, training).value();
    const auto report = trainer->step(batch);
    ASSERT_TRUE(report) << report.error().message();
    const model::TrainingMemory predicted =
        model::training_memory(config, {c.bf16, c.int8, false, c.recompute, 512, 256});
    EXPECT_NEAR(static_cast<double>(predicted.tensors().count) / counter->most(), 1, 0.1)
        << model::family_name(c.family) << " vocabulary " << c.vocabulary << (c.tied ? " tied" : "")
        << (c.bf16 ? " bf16" : "") << (c.int8 ? " int8" : "") << (c.recompute ? " recompute" : "") << ": predicted "
        << to_text(predicted.tensors()) << " (weights " << to_text(predicted.weights) << ", gradients "
        << to_text(predicted.gradients) << ", optimizer " << to_text(predicted.optimizer) << ", activations "
        << to_text(predicted.activations) << ", passing " << to_text(predicted.transient) << "), measured "
        << counter->most() / 1e6 << " MB";
  }
}

}  // namespace
}  // namespace echoline::learner
