// The trainer, its checkpoints and the warm start, on a model small enough for a unit test.
#include "learner/training/trainer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/files.hpp"
#include "base/random.hpp"
#include "data_plane/routed_experts.hpp"
#include "learner/training/trainer_checkpoint.hpp"
#include "learner/training/warm_start.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

const CheckpointDigests kDigests{.config_digest = "abc", .reference_digest = ""};

model::Tokenizer tokenizer() {
  auto tokenizer_made = model::Tokenizer::characters("0123456789+=");
  ECHO_CHECK(tokenizer_made.has_value(), "{}", tokenizer_made.error().message());
  return *tokenizer_made;
}

model::Phrasing phrasing() {
  auto phrasing_made = model::Phrasing::from_parts(tokenizer(), {*tokenizer().end_of_text()}, R"({"text":"{prompt}"})");
  ECHO_CHECK(phrasing_made.has_value(), "{}", phrasing_made.error().message());
  return *phrasing_made;
}

std::shared_ptr<model::Transformer> tiny_model(std::uint64_t seed) {
  model::ModelConfig shape;
  shape.vocab_size = tokenizer().size();
  shape.hidden_size = 16;
  shape.intermediate_size = 32;
  shape.layers = 1;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.head_dim = 8;
  shape.positions_max = 32;
  shape.tie_embeddings = true;
  shape.initializer_range = 0.1;
  auto initialised = model::init(shape, seed);
  ECHO_CHECK(initialised.has_value(), "{}", initialised.error().message());
  return *initialised;
}

// `groups` groups of four responses sampled from `model`; a response is worth the share of its tokens that are '7'.
std::vector<schema::Trajectory> rollouts(model::Transformer& model, std::uint64_t seed, std::size_t groups = 6,
                                         double temperature = 1.0) {
  constexpr std::size_t kGroupSize = 4;
  const model::Token seven = *tokenizer().id("7");
  std::vector<std::vector<model::Token>> prompts;
  for (std::size_t group = 0; group < groups; ++group)  // any prompts that differ
    prompts.insert(prompts.end(), kGroupSize, *tokenizer().encode(fmt::format("{}+{}=", group * 7 % 13, group)));
  model::Sampling sampling;
  sampling.temperature = temperature;
  sampling.tokens_max = 5;
  sampling.eos = {*tokenizer().end_of_text()};
  sampling.seed = seed;
  const auto generations = model::generate(model, prompts, sampling);
  ECHO_CHECK(generations.has_value(), "{}", generations.error().message());
  std::vector<schema::Trajectory> batch;
  for (std::size_t i = 0; i < generations->size(); ++i) {
    const auto& generation = (*generations)[i];
    schema::Trajectory trajectory;
    trajectory.set_id(fmt::format("t{}", i));
    trajectory.set_group(100 + i / kGroupSize);
    trajectory.mutable_prompt_tokens()->Add(prompts[i].begin(), prompts[i].end());
    trajectory.mutable_response_tokens()->Add(generation.tokens.begin(), generation.tokens.end());
    trajectory.mutable_logprobs()->Add(generation.logprobs.begin(), generation.logprobs.end());
    const auto sevens = std::count(generation.tokens.begin(), generation.tokens.end(), seven);
    trajectory.set_reward(static_cast<double>(sevens) / static_cast<double>(generation.tokens.size()));
    batch.push_back(std::move(trajectory));
  }
  return batch;
}

model::ModelFiles files() {
  auto model_files = model::ModelFiles::make(tiny_model(1)->config(), tokenizer());
  ECHO_CHECK(model_files.has_value(), "{}", model_files.error().message());
  return *model_files;
}

TrainerConfig settings() {
  TrainerConfig config;
  config.optimizer.learning_rate = 0.01;
  config.seed = 5;
  return config;
}

std::unique_ptr<Trainer> trainer(std::shared_ptr<model::Transformer> model, const TrainerConfig& config) {
  auto created = Trainer::create(std::move(model), config);
  ECHO_CHECK(created.has_value(), "{}", created.error().message());
  return std::move(*created);
}

std::string policy_digest(const Trainer& trainer) {
  auto policy = trainer.policy();
  ECHO_CHECK(policy.has_value(), "{}", policy.error().message());
  return policy->digest().hex();
}

// Trains 30 steps, in which the reward rises from hardly any to nearly all.
void expect_learns(Trainer& learner, model::Transformer& model) {
  double first_reward = 0, last_reward = 0;
  for (std::uint64_t step = 0; step < 30; ++step) {
    const auto report = learner.step(rollouts(model, step));
    ASSERT_TRUE(report) << report.error().message();
    (step == 0 ? first_reward : last_reward) = report->reward_mean;
  }
  EXPECT_LT(first_reward, 0.3);
  EXPECT_GT(last_reward, 0.8);
}

class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    model::use_threads(1);
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::path(::testing::TempDir()) / fmt::format("echoline-trainer-{}-{}", test->name(), ::getpid());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(TrainerTest, OnPolicyRatioIsOneAtTheSamplingTemperature) {
  TrainerConfig config = settings();
  config.temperature = 0.7;
  const auto model = tiny_model(1);
  const auto batch = rollouts(*model, 3, 6, 0.7);
  const auto report = trainer(model, config)->step(batch);
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_NEAR(report->ratio_mean, 1.0, 1e-4);
  EXPECT_NEAR(report->behaviour_kl, 0.0, 1e-4);
  EXPECT_NEAR(report->effective_sample_fraction, 1.0, 1e-4);
  EXPECT_EQ(report->trajectories, 24);
  EXPECT_EQ(report->groups, 6);
  EXPECT_EQ(report->updates, 1);
  // At another temperature than the sampling one, the same tokens look off-policy.
  const auto model_at_one = tiny_model(1);
  const auto report_at_one = trainer(model_at_one, settings())->step(batch);
  ASSERT_TRUE(report_at_one);
  EXPECT_GT(report_at_one->behaviour_kl, 1e-3);
  EXPECT_LT(report_at_one->effective_sample_fraction, 0.99);
}

// A mixture of experts, otherwise as tiny_model(). Its routers' scores are far apart.
std::shared_ptr<model::Transformer> tiny_mixture(std::uint64_t seed) {
  model::ModelConfig shape = tiny_model(1)->config();
  shape.family = model::Family::kQwen3Moe;
  shape.layers = 2;
  shape.experts = model::ExpertsConfig{.count = 4, .per_token = 2, .intermediate_size = 16, .dense_layers = {}};
  auto initialised = model::init(shape, seed);
  ECHO_CHECK(initialised.has_value(), "{}", initialised.error().message());
  torch::NoGradGuard no_gradient;
  for (auto& [name, parameter] : named_parameters(**initialised))
    if (parameter.dim() == 2) parameter.mul_(4);
  return *initialised;
}

TEST_F(TrainerTest, ReplaysTheExpertsOfTheRollout) {
  const std::vector<schema::Trajectory> without = rollouts(*tiny_mixture(1), 3);
  // `own`: the experts of the policy that generated; otherwise the first two experts of each layer.
  const auto with_experts = [&](bool own) {
    std::vector<schema::Trajectory> batch = without;
    const auto model = tiny_mixture(1);
    torch::NoGradGuard no_gradient;
    for (schema::Trajectory& trajectory : batch) {
      std::vector<std::int64_t> text(trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end());
      text.insert(text.end(), trajectory.response_tokens().begin(), trajectory.response_tokens().end());
      model::Routing routing;
      routing.records = true;
      model->hidden_states(torch::tensor(text).unsqueeze(0), {}, nullptr, &routing);
      const torch::Tensor used = routing.used.contiguous();
      data_plane::RoutedExperts experts{2, 2, {}};
      for (std::int64_t i = 0; i < used.numel(); ++i)
        experts.values.push_back(own ? used.data_ptr<std::int16_t>()[i] : static_cast<std::int16_t>(i % 2));
      trajectory.set_routed_experts(data_plane::pack_experts(experts));
    }
    return batch;
  };
  const auto report_of = [&](const std::vector<schema::Trajectory>& batch, bool replay) {
    TrainerConfig config = settings();
    config.router_replay = replay;
    config.scrutiny_seed = 7;
    auto report = trainer(tiny_mixture(1), config)->step(batch);
    ECHO_CHECK(report.has_value(), "{}", report.error().message());
    return *report;
  };
  const StepReport fresh = report_of(without, true), own = report_of(with_experts(true), true),
                   others = report_of(with_experts(false), true), ignored = report_of(with_experts(false), false);
  EXPECT_NEAR(own.loss, fresh.loss, 1e-4);
  EXPECT_NEAR(own.gradient_norm, fresh.gradient_norm, 1e-3 * fresh.gradient_norm);
  EXPECT_NEAR(ignored.gradient_norm, fresh.gradient_norm, 1e-5 * fresh.gradient_norm);
  EXPECT_GT(std::abs(others.gradient_norm - fresh.gradient_norm), 0.01 * fresh.gradient_norm);
  EXPECT_GT(others.behaviour_kl, fresh.behaviour_kl + 1e-3);
  // Workers are judged with the policy's own experts.
  ASSERT_EQ(others.scrutiny.size(), fresh.scrutiny.size());
  for (const auto& [worker, scrutiny] : fresh.scrutiny)
    EXPECT_NEAR(others.scrutiny.at(worker).dispute, scrutiny.dispute, 1e-3);
}

TEST_F(TrainerTest, RewardRises) {
  const auto model = tiny_model(2);
  const auto learner = trainer(model, settings());
  expect_learns(*learner, *model);
  EXPECT_EQ(learner->steps(), 30);
}

TEST_F(TrainerTest, MicroBatchSizeDoesNotMatter) {
  const auto batch = rollouts(*tiny_model(3), 1);
  TrainerConfig small_microbatches = settings();
  small_microbatches.microbatch_tokens = 20;
  const auto with_one_microbatch = trainer(tiny_model(3), settings()),
             with_many_microbatches = trainer(tiny_model(3), small_microbatches);
  const auto report = with_one_microbatch->step(batch), report_of_many = with_many_microbatches->step(batch);
  ASSERT_TRUE(report && report_of_many);
  EXPECT_NEAR(report->loss, report_of_many->loss, 1e-6);
  EXPECT_NEAR(report->gradient_norm, report_of_many->gradient_norm, 1e-4 * report->gradient_norm);
}

// A bf16 model, as on a GPU: 32 copies of a group, each row a micro-batch of its own, have the gradient of the group.
// Powers of two scale exactly, so only the sum over micro-batches can differ.
TEST_F(TrainerTest, ManyMicroBatchesHaveTheGradientOfOne) {
  std::vector<schema::Trajectory> group;
  const auto have_equal_rewards = [](const auto& a, const auto& b) { return a.reward() == b.reward(); };
  for (std::uint64_t seed = 1;
       std::adjacent_find(group.begin(), group.end(), std::not_fn(have_equal_rewards)) == group.end(); ++seed)
    group = rollouts(*tiny_model(3), seed, 1);  // until rewards differ, because equal ones have no gradient
  const auto gradient_norm = [&](std::uint64_t copies) {
    const auto model = std::make_shared<model::Transformer>(tiny_model(3)->config(), torch::kCPU, torch::kBFloat16);
    ECHO_CHECK(model::load_policy(*model, model::export_policy(*tiny_model(3))->view()).has_value(), "same weights");
    TrainerConfig config = settings();
    config.microbatch_tokens = 1;
    std::vector<schema::Trajectory> batch;
    for (std::uint64_t copy = 0; copy < copies; ++copy)
      for (schema::Trajectory trajectory : group) {
        trajectory.set_group(copy);
        batch.push_back(std::move(trajectory));
      }
    const auto report = trainer(model, config)->step(batch);
    ECHO_CHECK(report.has_value(), "{}", report.error().message());
    return report->gradient_norm;
  };
  const double norm_of_one = gradient_norm(1);
  ASSERT_GT(norm_of_one, 0);
  EXPECT_NEAR(gradient_norm(32) / norm_of_one, 1, 1e-5);
}

TEST_F(TrainerTest, SeveralUpdatesPerStepMeasureTheTrustRegion) {
  TrainerConfig config = settings();
  config.minibatches = 3;
  config.passes = 4;
  config.optimizer.learning_rate = 0.03;
  const auto model = tiny_model(4);
  const auto report = trainer(model, config)->step(rollouts(*model, 1));
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_GT(report->updates, 4);  // at most 12: a minibatch whose groups teach nothing makes none
  EXPECT_GT(report->clip_fraction, 0);
}

TEST_F(TrainerTest, EqualRewardsTeachNothing) {
  const auto model = tiny_model(5);
  auto batch = rollouts(*model, 1);
  for (auto& trajectory : batch) trajectory.set_reward(0.5);
  const auto learner = trainer(model, settings());
  const std::string before = policy_digest(*learner);
  const auto report = learner->step(batch);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->informative_groups, 0);
  EXPECT_EQ(report->updates, 0);
  EXPECT_EQ(policy_digest(*learner), before);
  EXPECT_EQ(learner->steps(), 1);
}

// Tokens drawn from the policy have, on average, the likelihood that it states, and the reported probabilities are
// right.
TEST_F(TrainerTest, LooksCloselyAtSomeResponsesOfEveryWorker) {
  auto model = tiny_model(3);
  {
    torch::NoGradGuard no_gradient;
    for (auto& [name, parameter] : named_parameters(*model))
      if (parameter.dim() == 2) parameter.mul_(6);  // so that its probabilities are far from equal
  }
  auto batch = rollouts(*model, 9, 30);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    schema::Trajectory& trajectory = batch[i];
    trajectory.set_worker(1 + i / 4 % 3);
    if (trajectory.worker() == 2)  // states a false log-probability
      trajectory.set_logprobs(0, trajectory.logprobs(0) - 10 * trajectory.logprobs_size());
    if (trajectory.worker() != 3) continue;
    // Worker 3 answers with the token that the policy finds least likely.
    std::vector<std::int64_t> tokens(trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end());
    tokens.push_back(0);
    torch::NoGradGuard no_gradient;
    float lowest_logprob = 0;
    for (std::int64_t token = 0; token < tokenizer().size(); ++token) {
      tokens.back() = token;
      const auto ids = torch::tensor(tokens).unsqueeze(0);
      const float logprob = model->token_logprobs(ids, 1.0).logprobs.index({0, -1}).item<float>();
      if (logprob >= lowest_logprob) continue;
      lowest_logprob = logprob;
      trajectory.clear_response_tokens(), trajectory.clear_logprobs();
      trajectory.add_response_tokens(static_cast<std::uint32_t>(token));
      trajectory.add_logprobs(logprob);
    }
  }
  const auto report = trainer(model, settings())->step(batch);
  ASSERT_TRUE(report) << report.error().message();
  ASSERT_EQ(report->scrutiny.size(), 3u);
  for (const auto& [worker, scrutiny] : report->scrutiny) EXPECT_EQ(scrutiny.responses, 5u) << worker.value;
  const auto mean = [&](std::uint64_t worker, double Scrutiny::*figure) {
    return report->scrutiny.at(WorkerId{worker}).*figure / 5;
  };
  EXPECT_NEAR(mean(1, &Scrutiny::surprise), 0, 1);
  EXPECT_LT(mean(1, &Scrutiny::dispute), 0.05);
  EXPECT_NEAR(mean(2, &Scrutiny::surprise), 0, 1);
  EXPECT_NEAR(mean(2, &Scrutiny::dispute), 10, 0.05);
  EXPECT_GT(mean(3, &Scrutiny::surprise), 3);
  EXPECT_LT(mean(3, &Scrutiny::dispute), 0.05);
}

TEST_F(TrainerTest, MaskedTokensDoNotCount) {
  const auto model = tiny_model(6);
  auto batch = rollouts(*model, 1);
  std::int64_t unmasked_tokens = 0;
  for (auto& trajectory : batch) {
    for (int i = 0; i < trajectory.response_tokens_size(); ++i) trajectory.add_loss_mask(i == 0 ? 1 : 0);
    ++unmasked_tokens;
  }
  const auto report = trainer(model, settings())->step(batch);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->response_tokens, unmasked_tokens);
}

TEST_F(TrainerTest, RefusesUntrainableBatchesAndStaysUnchanged) {
  const auto model = tiny_model(7);
  const auto learner = trainer(model, settings());
  const std::string before = policy_digest(*learner);
  const auto batch = rollouts(*model, 1);
  const auto expect_refused = [&](auto change, const char* reason) {
    auto changed_batch = batch;
    change(changed_batch);
    const auto report = learner->step(changed_batch);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code, Code::kInvalid);
    EXPECT_NE(report.error().detail.find(reason), std::string::npos) << report.error().detail;
  };
  expect_refused([](auto& b) { b.clear(); }, "empty");
  expect_refused([](auto& b) { b.resize(5); }, "group 101");
  expect_refused([](auto& b) { b[3].set_prompt_tokens(0, 4000); }, "vocabulary");
  expect_refused([](auto& b) { b[2].mutable_logprobs()->RemoveLast(); }, "log-probabilities");
  expect_refused([](auto& b) { b[2].add_loss_mask(1); }, "loss mask");
  expect_refused(
      [](auto& b) {
        for (int i = 0; i < 40; ++i) b[1].add_prompt_tokens(1);
      },
      "positions");
  expect_refused([](auto& b) { b[0].set_reward(std::nan("")); }, "reward");
  EXPECT_EQ(policy_digest(*learner), before);
  EXPECT_EQ(learner->steps(), 0);
}

TEST_F(TrainerTest, SettingsAreChecked) {
  TrainerConfig config = settings();
  config.temperature = 0;
  EXPECT_NE(Trainer::create(tiny_model(1), config).error().detail.find("temperature"), std::string::npos);
  config = settings();
  config.loss.kl_coefficient = 0.1;
  EXPECT_NE(Trainer::create(tiny_model(1), config).error().detail.find("reference"), std::string::npos);
  config = settings();
  config.minibatches = 0;
  EXPECT_EQ(validate(config).error().code, Code::kInvalid);
}

TEST_F(TrainerTest, ReferencePolicyHoldsTheLearnerBack) {
  TrainerConfig config = settings();
  config.loss.kl_coefficient = 5.0;
  const auto model = tiny_model(8);
  auto held_learner = Trainer::create(model, config, tiny_model(8));
  ASSERT_TRUE(held_learner);
  const auto free_model = tiny_model(8);
  const auto free_learner = trainer(free_model, settings());
  double held_reward = 0, free_reward = 0;
  for (std::uint64_t step = 0; step < 20; ++step) {
    const auto held_report = (*held_learner)->step(rollouts(*model, step));
    const auto free_report = free_learner->step(rollouts(*free_model, step));
    ASSERT_TRUE(held_report && free_report);
    EXPECT_GE(held_report->reference_kl, 0);
    held_reward = held_report->reward_mean;
    free_reward = free_report->reward_mean;
  }
  EXPECT_LT(held_reward, free_reward - 0.2);
}

TEST_F(TrainerTest, LearnsInBf16WithMomentsInEightBitsAndRecomputedLayers) {
  TrainerConfig config = settings();
  config.optimizer.moments = Moments::kInt8;
  config.microbatch_tokens = 40;
  const auto model = std::make_shared<model::Transformer>(tiny_model(2)->config(), torch::kCPU, torch::kBFloat16);
  ASSERT_TRUE(model::load_policy(*model, model::export_policy(*tiny_model(2))->view()));
  model->recompute_layers(true);
  const auto learner = trainer(model, config);
  expect_learns(*learner, *model);
}

class CheckpointOfMoments : public TrainerTest, public ::testing::WithParamInterface<Moments> {};
INSTANTIATE_TEST_SUITE_P(Moments, CheckpointOfMoments, ::testing::Values(Moments::kFp32, Moments::kInt8));

TEST_P(CheckpointOfMoments, CheckpointContinuesBitForBit) {
  TrainerConfig config = settings();
  config.optimizer.moments = GetParam();
  config.optimizer.schedule = Schedule::kCosine;
  config.optimizer.updates_expected = 20;
  config.minibatches = 2;
  config.optimizer.warmup_updates = 9;
  const auto model = tiny_model(9);
  const auto uninterrupted = trainer(model, config);
  std::vector<std::vector<schema::Trajectory>> batches;
  for (std::uint64_t step = 0; step < 6; ++step) {
    batches.push_back(rollouts(*model, step));
    ASSERT_TRUE(uninterrupted->step(batches.back()));
    if (step == 2) {
      ASSERT_TRUE(save_checkpoint(folder_, *uninterrupted, files(), kDigests));
    }
  }
  const auto resumed = trainer(tiny_model(1234), config);  // other weights: all must come from the checkpoint
  const auto resume_report = load_checkpoint(folder_, *resumed, kDigests);
  ASSERT_TRUE(resume_report) << resume_report.error().message();
  EXPECT_EQ(resume_report->step, 3);
  for (std::size_t i = 3; i < 6; ++i) ASSERT_TRUE(resumed->step(batches[i]));
  EXPECT_EQ(policy_digest(*resumed), policy_digest(*uninterrupted));
  for (std::size_t i = 0; i < uninterrupted->optimizer().slots().size(); ++i) {
    const auto &expected = uninterrupted->optimizer().slots()[i], &actual = resumed->optimizer().slots()[i];
    EXPECT_TRUE(torch::equal(expected.master, actual.master)) << expected.name;
    EXPECT_TRUE(torch::equal(expected.moment1, actual.moment1)) << expected.name;
    EXPECT_TRUE(torch::equal(expected.moment2, actual.moment2)) << expected.name;
    if (GetParam() == Moments::kInt8) {
      EXPECT_TRUE(torch::equal(expected.scale1, actual.scale1) && torch::equal(expected.scale2, actual.scale2))
          << expected.name;
    }
  }
  // Moments of another kind are refused.
  config.optimizer.moments = GetParam() == Moments::kInt8 ? Moments::kFp32 : Moments::kInt8;
  const auto other = trainer(tiny_model(1), config);
  const auto refused = load_checkpoint(folder_, *other, kDigests);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("learner.moments"), std::string::npos) << refused.error().message();
}

TEST_F(TrainerTest, CheckpointRestoresTheTorchGenerator) {
  const auto learner = trainer(tiny_model(1), settings());
  torch::manual_seed(11);
  torch::rand({3});
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), kDigests));
  const torch::Tensor expected = torch::rand({4});
  torch::manual_seed(99);
  ASSERT_TRUE(load_checkpoint(folder_, *learner, kDigests));
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST_F(TrainerTest, CheckpointsAreKeptPrunedAndSurviveAnUnfinishedWrite) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  for (std::uint64_t step = 0; step < 4; ++step) {
    ASSERT_TRUE(learner->step(rollouts(*model, step)));
    ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), kDigests, 2));
  }
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"LATEST", "step-000000003", "step-000000004"}));
  // A crash half way through the next checkpoint: leftovers that LATEST does not name.
  ASSERT_TRUE(make_folders(folder_ / "writing"));
  std::ofstream(folder_ / "writing" / "trainer.safetensors") << "half";
  const auto other = trainer(tiny_model(2), settings());
  EXPECT_EQ(load_checkpoint(folder_, *other, kDigests)->step, 4);
  EXPECT_EQ(policy_digest(*other), policy_digest(*learner));
  ASSERT_TRUE(save_checkpoint(folder_, *other, files(), kDigests, 2));  // the same step again, next to the old one
  EXPECT_EQ(load_checkpoint(folder_, *other, kDigests)->step, 4);
}

TEST_F(TrainerTest, CheckpointsOfAnotherRunOrWithWrongBytesAreRefused) {
  const auto learner = trainer(tiny_model(1), settings());
  EXPECT_EQ(load_checkpoint(folder_, *learner, kDigests).error().code, Code::kNotFound);
  const auto saved = save_checkpoint(folder_, *learner, files(), kDigests);
  ASSERT_TRUE(saved);
  EXPECT_EQ(load_checkpoint(folder_, *learner, {.config_digest = "other", .reference_digest = ""}).error().code,
            Code::kInvalid);
  const fs::path tensors = *saved / "trainer.safetensors";
  auto bytes = read_file(tensors);
  ASSERT_TRUE(bytes);
  bytes->back() = static_cast<char>(bytes->back() ^ 1);
  ASSERT_TRUE(write_file_atomic(tensors, *bytes));
  EXPECT_EQ(load_checkpoint(folder_, *learner, kDigests).error().code, Code::kCorrupt);
  bytes->resize(bytes->size() / 2);
  ASSERT_TRUE(write_file_atomic(tensors, *bytes));
  EXPECT_EQ(load_checkpoint(folder_, *learner, kDigests).error().code, Code::kCorrupt);
  ASSERT_TRUE(write_file_atomic(*saved / "trainer.json", "{}"));
  EXPECT_EQ(load_checkpoint(folder_, *learner, kDigests).error().code, Code::kCorrupt);
  EXPECT_TRUE(fs::exists(*saved)) << "the only checkpoint was moved although nothing else could be loaded";
}

TEST_F(TrainerTest, ADamagedCheckpointFallsBackToTheOneBefore) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  std::string digest_of_second;
  for (std::uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(learner->step(rollouts(*model, step)));
    ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), kDigests, 2));
    if (step == 1) digest_of_second = policy_digest(*learner);
  }
  const fs::path newest = folder_ / "step-000000003" / "trainer.safetensors";
  fs::resize_file(newest, fs::file_size(newest) - 1);
  const auto other = trainer(tiny_model(2), settings());
  const auto resumed = load_checkpoint(folder_, *other, kDigests);
  ASSERT_TRUE(resumed) << resumed.error().message();
  EXPECT_EQ(resumed->step, 2);
  EXPECT_EQ(policy_digest(*other), digest_of_second);
  ASSERT_EQ(resumed->damaged.size(), 1u);
  EXPECT_EQ(resumed->damaged[0].name, "step-000000003");
  EXPECT_NE(resumed->damaged[0].reason.find("trainer.safetensors"), std::string::npos);
  // The damaged checkpoint is moved aside: it neither counts as the newest nor displaces a sound one.
  EXPECT_TRUE(fs::exists(folder_ / "damaged-step-000000003"));
  EXPECT_EQ(read_file(folder_ / "LATEST").value(), "step-000000002\n");
  ASSERT_TRUE(other->step(rollouts(other->model(), 7)));
  ASSERT_TRUE(save_checkpoint(folder_, *other, files(), kDigests, 2));
  EXPECT_TRUE(fs::exists(folder_ / "step-000000002"));
  EXPECT_EQ(load_checkpoint(folder_, *other, kDigests)->step, 3);
  // Without LATEST the newest is found by name.
  fs::remove(folder_ / "LATEST");
  EXPECT_EQ(load_checkpoint(folder_, *other, kDigests)->step, 3);
}

TEST_F(TrainerTest, ACheckpointCarriesItsPolicyAsAModelDirectory) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  ASSERT_TRUE(learner->step(rollouts(*model, 1)));
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), kDigests));
  const auto stored = find_policy(folder_);
  ASSERT_TRUE(stored) << stored.error().message();
  EXPECT_EQ(stored->step, 1);
  EXPECT_EQ(stored->digest, policy_digest(*learner));
  const auto loaded = model::load_model(stored->model);
  ASSERT_TRUE(loaded) << loaded.error().message();
  EXPECT_EQ(model::export_policy(*loaded->transformer)->digest().hex(), stored->digest);
  EXPECT_EQ(loaded->files.eos, phrasing().eos());
  EXPECT_EQ(find_policy(folder_, 1)->model, stored->model);
  EXPECT_NE(find_policy(folder_, 5).error().detail.find("steps with one: 1"), std::string::npos);
}

TEST_F(TrainerTest, TheReferencePolicyIsKeptAndProven) {
  const auto frozen = tiny_model(8), other = tiny_model(9);
  EXPECT_EQ(load_reference(folder_, *other).error().code, Code::kNotFound);
  const auto digest = freeze_reference(folder_, model::export_policy(*frozen).value());
  ASSERT_TRUE(digest) << digest.error().message();
  EXPECT_EQ(load_reference(folder_, *other).value(), *digest);
  EXPECT_EQ(model::export_policy(*other)->digest().hex(), *digest);
  // A checkpoint says which reference it was trained against.
  const auto learner = trainer(tiny_model(1), settings());
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {.config_digest = "abc", .reference_digest = *digest}));
  EXPECT_TRUE(load_checkpoint(folder_, *learner, {.config_digest = "abc", .reference_digest = *digest}));
  EXPECT_EQ(load_checkpoint(folder_, *learner, {.config_digest = "abc", .reference_digest = std::string(32, '0')})
                .error()
                .code,
            Code::kInvalid);
  auto bytes = read_file(folder_ / "reference.safetensors").value();
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  ASSERT_TRUE(write_file_atomic(folder_ / "reference.safetensors", bytes));
  EXPECT_EQ(load_reference(folder_, *other).error().code, Code::kCorrupt);
}

TEST_F(TrainerTest, AnswersCutByTheLengthAreKeptMaskedOrPenalised) {
  auto batch = rollouts(*tiny_model(6), 1);
  std::int64_t finished_tokens = 0, all_tokens = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    batch[i].set_finished(i % 4 != 0);
    all_tokens += batch[i].response_tokens_size();
    if (i % 4 != 0) finished_tokens += batch[i].response_tokens_size();
  }
  TrainerConfig config = settings();
  const auto report_kept = trainer(tiny_model(6), config)->step(batch);
  config.truncated = Truncated::kMask;
  const auto report_masked = trainer(tiny_model(6), config)->step(batch);
  config.truncated = Truncated::kPenalty;
  const auto report_penalised = trainer(tiny_model(6), config)->step(batch);
  ASSERT_TRUE(report_kept && report_masked && report_penalised);
  EXPECT_EQ(report_kept->response_tokens, all_tokens);
  EXPECT_EQ(report_masked->response_tokens, finished_tokens);
  EXPECT_EQ(report_penalised->response_tokens, all_tokens);
  EXPECT_DOUBLE_EQ(report_kept->truncated_fraction, 0.25);
  // The penalty shapes the gradient, not the report.
  EXPECT_EQ(report_penalised->reward_mean, report_kept->reward_mean);
  // Rewards are equal except for the penalty on truncated responses.
  for (auto& trajectory : batch) trajectory.set_reward(0.5);
  EXPECT_EQ(trainer(tiny_model(6), settings())->step(batch)->informative_groups, 0);
  EXPECT_EQ(trainer(tiny_model(6), config)->step(batch)->informative_groups, 6);
}

TEST_F(TrainerTest, WarmStartReachesItsTargetAndReports) {
  const auto adapter =
      data_plane::make_adapter("arithmetic", R"({"operations":["+"],"operand_max":19,"evaluation_problems":200})", 1);
  ASSERT_TRUE(adapter) << adapter.error().message();
  const auto model = tiny_model(3);
  WarmStartConfig config;
  config.optimizer.learning_rate = 0.01;
  config.batch_problems = 32;
  config.steps_max = 300;
  config.probe_every = 10;
  config.probe_problems = 64;
  config.target_accuracy = 0.1;
  config.response_tokens_max = 4;
  std::vector<WarmStartProgress> progress;
  const auto report = warm_start(*model, phrasing(), **adapter, config, [&](const WarmStartProgress& latest) {
    progress.push_back(latest);
    return true;
  });
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_TRUE(report->reached_target);
  EXPECT_GE(report->accuracy, 0.1);
  ASSERT_GE(progress.size(), 2u);
  EXPECT_LT(progress.back().loss, progress.front().loss);
  EXPECT_EQ(progress.back().steps, report->steps);
  const auto stopped = warm_start(*model, phrasing(), **adapter, config, [](const auto&) { return false; });
  EXPECT_EQ(stopped.error().code, Code::kCancelled);
  config.target_accuracy = 0;
  EXPECT_EQ(warm_start(*model, phrasing(), **adapter, config).error().code, Code::kInvalid);
}

TEST_F(TrainerTest, EvaluationCountsAnswersTheAdapterScoresCorrect) {
  const auto adapter =
      data_plane::make_adapter("arithmetic", R"({"operations":["+"],"operand_max":19,"evaluation_problems":200})", 1);
  ASSERT_TRUE(adapter);
  const auto model = tiny_model(3);
  EvaluationOptions options;
  options.response_tokens_max = 4;
  options.batch_rows = 64;
  const auto evaluation = evaluate(*model, phrasing(), **adapter, (*adapter)->evaluation(), options);
  ASSERT_TRUE(evaluation) << evaluation.error().message();
  EXPECT_EQ(evaluation->problems, 200);
  EXPECT_LT(evaluation->accuracy(), 0.1);  // an untrained model
  EXPECT_EQ(evaluate(*model, phrasing(), **adapter, {}, options).error().code, Code::kInvalid);
}

}  // namespace
}  // namespace echoline::learner
