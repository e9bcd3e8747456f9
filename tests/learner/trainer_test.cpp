// The trainer, its checkpoints and the warm start, on a model small enough for a unit test.
#include "learner/training/trainer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/files.hpp"
#include "base/random.hpp"
#include "learner/training/trainer_checkpoint.hpp"
#include "learner/training/warm_start.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

model::Tokenizer tokenizer() {
  auto made = model::Tokenizer::characters("0123456789+=");
  ECHO_CHECK(made.has_value(), "{}", made.error().message());
  return *made;
}

model::Phrasing phrasing() {
  auto made = model::Phrasing::from_parts(tokenizer(), {*tokenizer().end_of_text()}, R"({"text":"{prompt}"})");
  ECHO_CHECK(made.has_value(), "{}", made.error().message());
  return *made;
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
  auto made = model::init(shape, seed);
  ECHO_CHECK(made.has_value(), "{}", made.error().message());
  return *made;
}

// `groups` groups of four responses sampled from `model`; a response is worth the share of its tokens that are '7'.
std::vector<schema::Trajectory> rollouts(model::Transformer& model, std::uint64_t seed, std::size_t groups = 6,
                                         double temperature = 1.0) {
  constexpr std::size_t kGroupSize = 4;
  const model::Token seven = *tokenizer().id("7");
  std::vector<std::vector<model::Token>> prompts;
  for (std::size_t g = 0; g < groups; ++g)
    prompts.insert(prompts.end(), kGroupSize, *tokenizer().encode(fmt::format("{}+{}=", g * 7 % 13, g)));
  model::Sampling sampling;
  sampling.temperature = temperature;
  sampling.tokens_max = 5;
  sampling.eos = {*tokenizer().end_of_text()};
  sampling.seed = seed;
  const auto generations = model::generate(model, prompts, sampling);
  ECHO_CHECK(generations.has_value(), "{}", generations.error().message());
  std::vector<schema::Trajectory> batch;
  for (std::size_t i = 0; i < generations->size(); ++i) {
    const auto& g = (*generations)[i];
    schema::Trajectory t;
    t.set_id(fmt::format("t{}", i));
    t.set_group(100 + i / kGroupSize);
    t.mutable_prompt_tokens()->Add(prompts[i].begin(), prompts[i].end());
    t.mutable_response_tokens()->Add(g.tokens.begin(), g.tokens.end());
    t.mutable_logprobs()->Add(g.logprobs.begin(), g.logprobs.end());
    const auto sevens = std::count(g.tokens.begin(), g.tokens.end(), seven);
    t.set_reward(static_cast<double>(sevens) / static_cast<double>(g.tokens.size()));
    batch.push_back(std::move(t));
  }
  return batch;
}

model::ModelFiles files() {
  auto made = model::ModelFiles::make(tiny_model(1)->config(), tokenizer());
  ECHO_CHECK(made.has_value(), "{}", made.error().message());
  return *made;
}

TrainerConfig settings() {
  TrainerConfig config;
  config.optimizer.learning_rate = 0.01;
  config.seed = 5;
  return config;
}

std::unique_ptr<Trainer> trainer(std::shared_ptr<model::Transformer> model, const TrainerConfig& config) {
  auto made = Trainer::create(std::move(model), config);
  ECHO_CHECK(made.has_value(), "{}", made.error().message());
  return std::move(*made);
}

std::string policy_digest(const Trainer& trainer) {
  auto policy = trainer.policy();
  ECHO_CHECK(policy.has_value(), "{}", policy.error().message());
  return policy->digest().hex();
}

// 30 steps, from hardly any reward to nearly all.
void expect_learns(Trainer& learner, model::Transformer& model) {
  double first = 0, last = 0;
  for (std::uint64_t step = 0; step < 30; ++step) {
    const auto report = learner.step(rollouts(model, step));
    ASSERT_TRUE(report) << report.error().message();
    (step == 0 ? first : last) = report->reward_mean;
  }
  EXPECT_LT(first, 0.3);
  EXPECT_GT(last, 0.8);
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
  const auto other = tiny_model(1);
  const auto wrong = trainer(other, settings())->step(batch);
  ASSERT_TRUE(wrong);
  EXPECT_GT(wrong->behaviour_kl, 1e-3);
  EXPECT_LT(wrong->effective_sample_fraction, 0.99);
}

TEST_F(TrainerTest, RewardRises) {
  const auto model = tiny_model(2);
  const auto learner = trainer(model, settings());
  expect_learns(*learner, *model);
  EXPECT_EQ(learner->steps(), 30);
}

TEST_F(TrainerTest, MicroBatchSizeDoesNotMatter) {
  const auto batch = rollouts(*tiny_model(3), 1);
  TrainerConfig small = settings();
  small.microbatch_tokens = 20;
  const auto whole = trainer(tiny_model(3), settings()), split = trainer(tiny_model(3), small);
  const auto a = whole->step(batch), b = split->step(batch);
  ASSERT_TRUE(a && b);
  EXPECT_NEAR(a->loss, b->loss, 1e-6);
  EXPECT_NEAR(a->gradient_norm, b->gradient_norm, 1e-4 * a->gradient_norm);
}

// A bf16 model, as on a GPU: 32 copies of a group, each row a micro-batch of its own, have the gradient of the group.
// Powers of two scale exactly, so only the sum over micro-batches can differ.
TEST_F(TrainerTest, ManyMicroBatchesHaveTheGradientOfOne) {
  std::vector<schema::Trajectory> group;
  const auto equal = [](const auto& a, const auto& b) { return a.reward() == b.reward(); };
  for (std::uint64_t seed = 1; std::adjacent_find(group.begin(), group.end(), std::not_fn(equal)) == group.end();
       ++seed)
    group = rollouts(*tiny_model(3), seed, 1);  // until it teaches something
  const auto gradient_norm = [&](std::uint64_t copies) {
    const auto model = std::make_shared<model::Transformer>(tiny_model(3)->config(), torch::kCPU, torch::kBFloat16);
    ECHO_CHECK(model::load_policy(*model, model::export_policy(*tiny_model(3))->view()).has_value(), "same weights");
    TrainerConfig config = settings();
    config.microbatch_tokens = 1;
    std::vector<schema::Trajectory> batch;
    for (std::uint64_t copy = 0; copy < copies; ++copy)
      for (schema::Trajectory t : group) {
        t.set_group(copy);
        batch.push_back(std::move(t));
      }
    const auto report = trainer(model, config)->step(batch);
    ECHO_CHECK(report.has_value(), "{}", report.error().message());
    return report->gradient_norm;
  };
  const double one = gradient_norm(1);
  ASSERT_GT(one, 0);
  EXPECT_NEAR(gradient_norm(32) / one, 1, 1e-5);
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
  for (auto& t : batch) t.set_reward(0.5);
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
      if (parameter.dim() == 2) parameter.mul_(6);  // it has opinions
  }
  auto batch = rollouts(*model, 9, 30);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    schema::Trajectory& t = batch[i];
    t.set_worker(1 + i / 4 % 3);
    if (t.worker() == 2) t.set_logprobs(0, t.logprobs(0) - 10 * t.logprobs_size());  // says what is not so
    if (t.worker() != 3) continue;
    std::vector<std::int64_t> tokens(t.prompt_tokens().begin(), t.prompt_tokens().end());
    tokens.push_back(0);
    torch::NoGradGuard no_gradient;
    float least = 0;
    for (std::int64_t token = 0; token < tokenizer().size(); ++token) {  // does not ask the policy
      tokens.back() = token;
      const auto ids = torch::tensor(tokens).unsqueeze(0);
      const float likely = model->token_logprobs(ids, 1.0).logprobs.index({0, -1}).item<float>();
      if (likely >= least) continue;
      least = likely;
      t.clear_response_tokens(), t.clear_logprobs();
      t.add_response_tokens(static_cast<std::uint32_t>(token));
      t.add_logprobs(likely);
    }
  }
  const auto report = trainer(model, settings())->step(batch);
  ASSERT_TRUE(report) << report.error().message();
  ASSERT_EQ(report->scrutiny.size(), 3u);
  const auto& seen = report->scrutiny;
  for (const auto& [worker, s] : seen) EXPECT_EQ(s.responses, 5u) << worker.value;
  const auto each = [&](std::uint64_t worker, double Scrutiny::*what) { return seen.at(WorkerId{worker}).*what / 5; };
  EXPECT_NEAR(each(1, &Scrutiny::surprise), 0, 1);
  EXPECT_LT(each(1, &Scrutiny::dispute), 0.05);
  EXPECT_NEAR(each(2, &Scrutiny::surprise), 0, 1);
  EXPECT_NEAR(each(2, &Scrutiny::dispute), 10, 0.05);
  EXPECT_GT(each(3, &Scrutiny::surprise), 3);
  EXPECT_LT(each(3, &Scrutiny::dispute), 0.05);
}

TEST_F(TrainerTest, MaskedTokensDoNotCount) {
  const auto model = tiny_model(6);
  auto batch = rollouts(*model, 1);
  std::int64_t expected = 0;
  for (auto& t : batch) {
    for (int i = 0; i < t.response_tokens_size(); ++i) t.add_loss_mask(i == 0 ? 1 : 0);
    ++expected;
  }
  const auto report = trainer(model, settings())->step(batch);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->response_tokens, expected);
}

TEST_F(TrainerTest, RefusesUntrainableBatchesAndStaysUnchanged) {
  const auto model = tiny_model(7);
  const auto learner = trainer(model, settings());
  const std::string before = policy_digest(*learner);
  const auto batch = rollouts(*model, 1);
  const auto refused = [&](auto change, const char* says) {
    auto changed = batch;
    change(changed);
    const auto report = learner->step(changed);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().code, Code::kInvalid);
    EXPECT_NE(report.error().detail.find(says), std::string::npos) << report.error().detail;
  };
  refused([](auto& b) { b.clear(); }, "empty");
  refused([](auto& b) { b.resize(5); }, "group 101");
  refused([](auto& b) { b[3].set_prompt_tokens(0, 4000); }, "vocabulary");
  refused([](auto& b) { b[2].mutable_logprobs()->RemoveLast(); }, "log-probabilities");
  refused([](auto& b) { b[2].add_loss_mask(1); }, "loss mask");
  refused(
      [](auto& b) {
        for (int i = 0; i < 40; ++i) b[1].add_prompt_tokens(1);
      },
      "positions");
  refused([](auto& b) { b[0].set_reward(std::nan("")); }, "reward");
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
  auto held = Trainer::create(model, config, tiny_model(8));
  ASSERT_TRUE(held);
  const auto free_model = tiny_model(8);
  const auto free_learner = trainer(free_model, settings());
  double held_reward = 0, free_reward = 0;
  for (std::uint64_t step = 0; step < 20; ++step) {
    const auto a = (*held)->step(rollouts(*model, step)), b = free_learner->step(rollouts(*free_model, step));
    ASSERT_TRUE(a && b);
    EXPECT_GE(a->reference_kl, 0);
    held_reward = a->reward_mean;
    free_reward = b->reward_mean;
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
  const auto straight = trainer(model, config);
  std::vector<std::vector<schema::Trajectory>> batches;
  for (std::uint64_t step = 0; step < 6; ++step) {
    batches.push_back(rollouts(*model, step));
    ASSERT_TRUE(straight->step(batches.back()));
    if (step == 2) {
      ASSERT_TRUE(save_checkpoint(folder_, *straight, files(), {"abc", ""}));
    }
  }
  const auto resumed = trainer(tiny_model(1234), config);  // other weights: all must come from the checkpoint
  const auto step = load_checkpoint(folder_, *resumed, {"abc", ""});
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->step, 3);
  for (std::size_t i = 3; i < 6; ++i) ASSERT_TRUE(resumed->step(batches[i]));
  EXPECT_EQ(policy_digest(*resumed), policy_digest(*straight));
  for (std::size_t i = 0; i < straight->optimizer().slots().size(); ++i) {
    const auto &a = straight->optimizer().slots()[i], &b = resumed->optimizer().slots()[i];
    EXPECT_TRUE(torch::equal(a.master, b.master)) << a.name;
    EXPECT_TRUE(torch::equal(a.moment1, b.moment1)) << a.name;
    EXPECT_TRUE(torch::equal(a.moment2, b.moment2)) << a.name;
    if (GetParam() == Moments::kInt8) {
      EXPECT_TRUE(torch::equal(a.scale1, b.scale1) && torch::equal(a.scale2, b.scale2)) << a.name;
    }
  }
  // Moments of another kind are refused.
  config.optimizer.moments = GetParam() == Moments::kInt8 ? Moments::kFp32 : Moments::kInt8;
  const auto other = trainer(tiny_model(1), config);
  const auto refused = load_checkpoint(folder_, *other, {"abc", ""});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message().find("learner.moments"), std::string::npos) << refused.error().message();
}

TEST_F(TrainerTest, CheckpointRestoresTheTorchGenerator) {
  const auto learner = trainer(tiny_model(1), settings());
  torch::manual_seed(11);
  torch::rand({3});
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {"abc", ""}));
  const torch::Tensor expected = torch::rand({4});
  torch::manual_seed(99);
  ASSERT_TRUE(load_checkpoint(folder_, *learner, {"abc", ""}));
  EXPECT_TRUE(torch::equal(torch::rand({4}), expected));
}

TEST_F(TrainerTest, CheckpointsAreKeptPrunedAndSurviveAnUnfinishedWrite) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  for (std::uint64_t step = 0; step < 4; ++step) {
    ASSERT_TRUE(learner->step(rollouts(*model, step)));
    ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {"abc", ""}, 2));
  }
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"LATEST", "step-000000003", "step-000000004"}));
  // A crash half way through the next checkpoint: leftovers that LATEST does not name.
  ASSERT_TRUE(make_folders(folder_ / "writing"));
  std::ofstream(folder_ / "writing" / "trainer.safetensors") << "half";
  const auto other = trainer(tiny_model(2), settings());
  EXPECT_EQ(load_checkpoint(folder_, *other, {"abc", ""})->step, 4);
  EXPECT_EQ(policy_digest(*other), policy_digest(*learner));
  ASSERT_TRUE(save_checkpoint(folder_, *other, files(), {"abc", ""}, 2));  // the same step again, next to the old one
  EXPECT_EQ(load_checkpoint(folder_, *other, {"abc", ""})->step, 4);
}

TEST_F(TrainerTest, CheckpointsOfAnotherRunOrWithWrongBytesAreRefused) {
  const auto learner = trainer(tiny_model(1), settings());
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"abc", ""}).error().code, Code::kNotFound);
  const auto saved = save_checkpoint(folder_, *learner, files(), {"abc", ""});
  ASSERT_TRUE(saved);
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"other", ""}).error().code, Code::kInvalid);
  const fs::path tensors = *saved / "trainer.safetensors";
  auto bytes = read_file(tensors);
  ASSERT_TRUE(bytes);
  bytes->back() = static_cast<char>(bytes->back() ^ 1);
  ASSERT_TRUE(write_file_atomic(tensors, *bytes));
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"abc", ""}).error().code, Code::kCorrupt);
  bytes->resize(bytes->size() / 2);
  ASSERT_TRUE(write_file_atomic(tensors, *bytes));
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"abc", ""}).error().code, Code::kCorrupt);
  ASSERT_TRUE(write_file_atomic(*saved / "trainer.json", "{}"));
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"abc", ""}).error().code, Code::kCorrupt);
  EXPECT_TRUE(fs::exists(*saved)) << "the only checkpoint was moved although nothing else could be loaded";
}

TEST_F(TrainerTest, ADamagedCheckpointFallsBackToTheOneBefore) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  std::string second, third;
  for (std::uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(learner->step(rollouts(*model, step)));
    ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {"abc", ""}, 2));
    if (step == 1) second = policy_digest(*learner);
  }
  const fs::path newest = folder_ / "step-000000003" / "trainer.safetensors";
  fs::resize_file(newest, fs::file_size(newest) - 1);
  const auto other = trainer(tiny_model(2), settings());
  const auto resumed = load_checkpoint(folder_, *other, {"abc", ""});
  ASSERT_TRUE(resumed) << resumed.error().message();
  EXPECT_EQ(resumed->step, 2);
  EXPECT_EQ(policy_digest(*other), second);
  ASSERT_EQ(resumed->damaged.size(), 1u);
  EXPECT_EQ(resumed->damaged[0].name, "step-000000003");
  EXPECT_NE(resumed->damaged[0].reason.find("trainer.safetensors"), std::string::npos);
  // The damaged checkpoint is moved aside: it neither counts as the newest nor displaces a sound one.
  EXPECT_TRUE(fs::exists(folder_ / "damaged-step-000000003"));
  EXPECT_EQ(read_file(folder_ / "LATEST").value(), "step-000000002\n");
  ASSERT_TRUE(other->step(rollouts(other->model(), 7)));
  ASSERT_TRUE(save_checkpoint(folder_, *other, files(), {"abc", ""}, 2));
  EXPECT_TRUE(fs::exists(folder_ / "step-000000002"));
  EXPECT_EQ(load_checkpoint(folder_, *other, {"abc", ""})->step, 3);
  // Without LATEST the newest is found by name.
  fs::remove(folder_ / "LATEST");
  EXPECT_EQ(load_checkpoint(folder_, *other, {"abc", ""})->step, 3);
}

TEST_F(TrainerTest, ACheckpointCarriesItsPolicyAsAModelDirectory) {
  const auto model = tiny_model(1);
  const auto learner = trainer(model, settings());
  ASSERT_TRUE(learner->step(rollouts(*model, 1)));
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {"abc", ""}));
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
  ASSERT_TRUE(save_checkpoint(folder_, *learner, files(), {"abc", *digest}));
  EXPECT_TRUE(load_checkpoint(folder_, *learner, {"abc", *digest}));
  EXPECT_EQ(load_checkpoint(folder_, *learner, {"abc", std::string(32, '0')}).error().code, Code::kInvalid);
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
  const auto kept = trainer(tiny_model(6), config)->step(batch);
  config.truncated = Truncated::kMask;
  const auto masked = trainer(tiny_model(6), config)->step(batch);
  config.truncated = Truncated::kPenalty;
  const auto penalised = trainer(tiny_model(6), config)->step(batch);
  ASSERT_TRUE(kept && masked && penalised);
  EXPECT_EQ(kept->response_tokens, all_tokens);
  EXPECT_EQ(masked->response_tokens, finished_tokens);
  EXPECT_EQ(penalised->response_tokens, all_tokens);
  EXPECT_DOUBLE_EQ(kept->truncated_fraction, 0.25);
  EXPECT_EQ(penalised->reward_mean, kept->reward_mean);  // the penalty shapes the gradient, not the report
  // Rewards are equal except for the penalty on truncated responses.
  for (auto& t : batch) t.set_reward(0.5);
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
  const auto report = warm_start(*model, phrasing(), **adapter, config, [&](const WarmStartProgress& p) {
    progress.push_back(p);
    return true;
  });
  ASSERT_TRUE(report) << report.error().message();
  EXPECT_TRUE(report->reached);
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
