// The policy loss: advantages and clipping by hand, gradients against finite differences, micro-batch additivity.
#include "learner/training/loss.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace echoline::learner {
namespace {

torch::Tensor tensor(std::vector<double> values, std::vector<std::int64_t> shape) {
  return torch::tensor(values, torch::kFloat64).reshape(shape);
}

TEST(GroupAdvantages, MatchTheFormulaByHand) {
  const LossConfig config{};
  // Group 1: mean 0.25, population deviation sqrt(3)/4. Group 2: mean 2, deviation 1.
  const auto a = group_advantages({1, 0, 0, 0, 1, 1, 3, 3}, 4, config);
  ASSERT_TRUE(a);
  EXPECT_NEAR((*a)[0], 0.75 / (std::sqrt(3.0) / 4), 1e-5);
  EXPECT_NEAR((*a)[1], -0.25 / (std::sqrt(3.0) / 4), 1e-5);
  EXPECT_NEAR((*a)[4], -1.0, 2e-6);
  EXPECT_NEAR((*a)[7], 1.0, 2e-6);
}

TEST(GroupAdvantages, WithoutScaleOnlyCentre) {
  LossConfig config{};
  config.advantage_scale = AdvantageScale::kNone;
  const auto a = group_advantages({1, 0, 0.5, 0.5}, 2, config);
  ASSERT_TRUE(a);
  EXPECT_EQ(*a, (std::vector<double>{0.5, -0.5, 0, 0}));
}

TEST(GroupAdvantages, EqualRewardsGiveExactlyZero) {
  const auto a = group_advantages({0.1, 0.1, 0.1, 0.7, 0.7, 0.7}, 3, LossConfig{});
  ASSERT_TRUE(a);
  for (const double value : *a) EXPECT_EQ(value, 0.0);
}

TEST(GroupAdvantages, RefuseWhatIsNoGroup) {
  EXPECT_EQ(group_advantages({1, 0, 1}, 2, LossConfig{}).error().code, Code::kInvalid);
  EXPECT_EQ(group_advantages({1, 0}, 1, LossConfig{}).error().code, Code::kInvalid);
  EXPECT_EQ(group_advantages({1, 0}, 0, LossConfig{}).error().code, Code::kInvalid);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(group_advantages({1, nan}, 2, LossConfig{}).error().code, Code::kInvalid);
  EXPECT_TRUE(group_advantages({}, 4, LossConfig{})->empty());
}

TEST(LossConfig, RangesAreChecked) {
  EXPECT_TRUE(validate(LossConfig{}));
  LossConfig config{};
  config.clip_low = 1.0;
  EXPECT_NE(validate(config).error().detail.find("clip_low"), std::string::npos);
  config = {};
  config.importance_cap = 0.5;
  EXPECT_NE(validate(config).error().detail.find("importance_cap"), std::string::npos);
  config = {};
  config.kl_coefficient = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(validate(config).error().code, Code::kInvalid);
}

// One sequence per (advantage, ratio) case; the proximal log-probability is 0, so log π_θ is the log of the ratio.
struct ClipCase {
  double advantage, ratio, objective, slope;  // slope: d objective / d log π_θ
  bool clipped;
};

TEST(PolicyLoss, ClipsOnlyTheSideThatWouldGoTooFar) {
  const ClipCase cases[] = {
      {1.0, 1.1, 1.1, 1.1, false},     // inside
      {1.0, 1.27, 1.27, 1.27, false},  // inside the wider upper bound
      {1.0, 1.5, 1.28, 0.0, true},     // good and already far up: no more push
      {1.0, 0.5, 0.5, 0.5, false},     // good but pushed down: keeps its gradient
      {-1.0, 0.5, -0.8, 0.0, true},    // bad and already far down: no more push
      {-1.0, 1.5, -1.5, -1.5, false},  // bad but pushed up: keeps its gradient
      {0.0, 3.0, 0.0, 0.0, false},
  };
  for (const ClipCase& c : cases) {
    torch::Tensor log_probs = tensor({std::log(c.ratio)}, {1, 1}).requires_grad_();
    const torch::Tensor zero = torch::zeros({1, 1}, torch::kFloat64);
    const LossInputs inputs{log_probs, zero, zero, {}, tensor({c.advantage}, {1}), torch::ones({1, 1})};
    const LossResult result = policy_loss(inputs, {1, 1}, LossConfig{});
    result.loss.backward();
    EXPECT_NEAR(result.loss.item<double>(), -c.objective, 1e-12) << c.advantage << " " << c.ratio;
    EXPECT_NEAR(log_probs.grad().item<double>(), -c.slope, 1e-12) << c.advantage << " " << c.ratio;
    EXPECT_EQ(result.statistics.clipped, c.clipped ? 1 : 0) << c.advantage << " " << c.ratio;
    EXPECT_NEAR(result.statistics.ratio_sum, c.ratio, 1e-12);
  }
}

TEST(PolicyLoss, ImportanceWeightIsTruncatedAndNotDifferentiated) {
  // π_θ/π_μ is 1.5 and 5; the cap is 2. Without proximal log-probabilities the ratio is 1 and its slope is w·A.
  torch::Tensor log_probs = tensor({std::log(0.6), std::log(0.5)}, {1, 2}).requires_grad_();
  const torch::Tensor behaviour = tensor({std::log(0.4), std::log(0.1)}, {1, 2});
  const LossInputs inputs{log_probs, {}, behaviour, {}, tensor({2.0}, {1}), torch::ones({1, 2})};
  const LossResult result = policy_loss(inputs, {1, 2}, LossConfig{});
  result.loss.backward();
  EXPECT_NEAR(result.loss.item<double>(), -(1.5 * 2 + 2 * 2) / 2, 1e-12);
  EXPECT_NEAR(log_probs.grad()[0][0].item<double>(), -1.5 * 2 / 2, 1e-12);
  EXPECT_NEAR(log_probs.grad()[0][1].item<double>(), -2.0 * 2 / 2, 1e-12);
  EXPECT_EQ(result.statistics.capped, 1);
  EXPECT_EQ(result.statistics.tokens, 2);
  EXPECT_NEAR(result.statistics.ratio_sum, 6.5, 1e-12);
}

TEST(PolicyLoss, ReferenceDivergenceByHand) {
  LossConfig config{};
  config.kl_coefficient = 0.5;
  const torch::Tensor current = tensor({std::log(0.5)}, {1, 1});
  const torch::Tensor reference = tensor({std::log(0.25)}, {1, 1});
  const LossInputs inputs{current, {}, current, reference, tensor({0.0}, {1}), torch::ones({1, 1})};
  const double k3 = 0.5 - std::log(0.5) - 1;
  const LossResult result = policy_loss(inputs, {1, 1}, config);
  EXPECT_NEAR(result.loss.item<double>(), 0.5 * k3, 1e-12);
  EXPECT_NEAR(result.statistics.reference_kl_sum, k3, 1e-12);
}

TEST(PolicyLoss, AggregationsWeighTokensOrSequences) {
  // Advantages 1 and 3; the first response has one token, the second has three.
  const torch::Tensor zero = torch::zeros({2, 3}, torch::kFloat64);
  const torch::Tensor mask = tensor({1, 0, 0, 1, 1, 1}, {2, 3});
  const LossInputs inputs{zero, {}, zero, {}, tensor({1, 3}, {2}), mask};
  LossConfig config{};
  EXPECT_NEAR(policy_loss(inputs, {2, 4}, config).loss.item<double>(), -(1 + 9) / 4.0, 1e-12);
  config.aggregation = Aggregation::kSequenceMean;
  EXPECT_NEAR(policy_loss(inputs, {2, 4}, config).loss.item<double>(), -(1 + 3) / 2.0, 1e-12);
}

TEST(PolicyLoss, PaddingMayHoldAnything) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  torch::Tensor log_probs = tensor({-0.5, infinity, nan}, {1, 3}).requires_grad_();
  const torch::Tensor behaviour = tensor({-0.5, -infinity, nan}, {1, 3});
  const LossInputs inputs{log_probs, {}, behaviour, {}, tensor({1}, {1}), tensor({1, 0, 0}, {1, 3})};
  const LossResult result = policy_loss(inputs, {1, 1}, LossConfig{});
  result.loss.backward();
  EXPECT_NEAR(result.loss.item<double>(), -1.0, 1e-12);
  EXPECT_TRUE(torch::equal(log_probs.grad(), tensor({-1, 0, 0}, {1, 3})));
  EXPECT_TRUE(std::isfinite(result.statistics.behaviour_kl_sum));
}

torch::Tensor score(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1);
}

struct RandomCase {
  torch::Tensor logits, targets;
  LossInputs inputs;
};

// Three sequences of four tokens over five symbols; all policies differ, some ratios are cut, some weights capped.
RandomCase random_case(bool with_proximal) {
  torch::manual_seed(7);
  const auto f64 = torch::TensorOptions().dtype(torch::kFloat64);
  RandomCase c;
  c.logits = torch::randn({3, 4, 5}, f64);
  c.targets = torch::randint(5, {3, 4}, torch::kInt64);
  const torch::Tensor now = score(c.logits, c.targets);
  c.inputs.behaviour_log_probs = now + 0.8 * torch::randn({3, 4}, f64);
  c.inputs.reference_log_probs = now + 0.5 * torch::randn({3, 4}, f64);
  if (with_proximal) c.inputs.proximal_log_probs = now + 0.4 * torch::randn({3, 4}, f64);
  c.inputs.advantages = tensor({1.2, -0.7, 0.4}, {3});
  c.inputs.mask = tensor({1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0}, {3, 4});
  return c;
}

double loss_at(RandomCase c, const torch::Tensor& logits, const LossConfig& config) {
  c.inputs.log_probs = score(logits, c.targets);
  return policy_loss(c.inputs, {3, 8}, config).loss.item<double>();
}

TEST(PolicyLoss, GradientMatchesFiniteDifferences) {
  for (const Aggregation aggregation : {Aggregation::kTokenMean, Aggregation::kSequenceMean}) {
    LossConfig config{};
    config.aggregation = aggregation;
    config.kl_coefficient = 0.1;
    RandomCase c = random_case(true);
    torch::Tensor logits = c.logits.clone().requires_grad_();
    c.inputs.log_probs = score(logits, c.targets);
    const LossResult result = policy_loss(c.inputs, {3, 8}, config);
    EXPECT_GT(result.statistics.clipped, 0);
    EXPECT_GT(result.statistics.capped, 0);
    result.loss.backward();
    const torch::Tensor gradient = logits.grad().reshape({-1});
    constexpr double kStep = 1e-6;
    for (std::int64_t i = 0; i < gradient.numel(); ++i) {
      torch::Tensor up = c.logits.clone(), down = c.logits.clone();
      up.view({-1})[i] += kStep;
      down.view({-1})[i] -= kStep;
      const double slope = (loss_at(c, up, config) - loss_at(c, down, config)) / (2 * kStep);
      EXPECT_NEAR(gradient[i].item<double>(), slope, 1e-8) << "logit " << i;
    }
  }
}

TEST(PolicyLoss, MicroBatchesSumToTheMinibatch) {
  for (const Aggregation aggregation : {Aggregation::kTokenMean, Aggregation::kSequenceMean}) {
    LossConfig config{};
    config.aggregation = aggregation;
    RandomCase c = random_case(true);
    c.inputs.log_probs = score(c.logits, c.targets);
    const LossResult whole = policy_loss(c.inputs, {3, 8}, config);
    double loss = 0;
    LossStatistics statistics;
    for (const auto& [first, last] : {std::pair{0, 1}, std::pair{1, 3}}) {
      const auto part = [first = first, last = last](const torch::Tensor& t) { return t.slice(0, first, last); };
      const LossInputs inputs{part(c.inputs.log_probs),           part(c.inputs.proximal_log_probs),
                              part(c.inputs.behaviour_log_probs), {},
                              part(c.inputs.advantages),          part(c.inputs.mask)};
      const LossResult result = policy_loss(inputs, {3, 8}, config);
      loss += result.loss.item<double>();
      statistics += result.statistics;
    }
    EXPECT_NEAR(loss, whole.loss.item<double>(), 1e-12);
    EXPECT_EQ(statistics.tokens, whole.statistics.tokens);
    EXPECT_NEAR(statistics.behaviour_kl_sum, whole.statistics.behaviour_kl_sum, 1e-12);
  }
}

}  // namespace
}  // namespace echoline::learner
