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
  const auto advantages = group_advantages({1, 0, 0, 0, 1, 1, 3, 3}, 4, config);
  ASSERT_TRUE(advantages);
  EXPECT_NEAR((*advantages)[0], 0.75 / (std::sqrt(3.0) / 4), 1e-5);
  EXPECT_NEAR((*advantages)[1], -0.25 / (std::sqrt(3.0) / 4), 1e-5);
  EXPECT_NEAR((*advantages)[4], -1.0, 2e-6);
  EXPECT_NEAR((*advantages)[7], 1.0, 2e-6);
}

TEST(GroupAdvantages, WithoutScaleOnlyCentre) {
  LossConfig config{};
  config.advantage_scale = AdvantageScale::kNone;
  const auto advantages = group_advantages({1, 0, 0.5, 0.5}, 2, config);
  ASSERT_TRUE(advantages);
  EXPECT_EQ(*advantages, (std::vector<double>{0.5, -0.5, 0, 0}));
}

TEST(GroupAdvantages, EqualRewardsGiveExactlyZero) {
  const auto advantages = group_advantages({0.1, 0.1, 0.1, 0.7, 0.7, 0.7}, 3, LossConfig{});
  ASSERT_TRUE(advantages);
  for (const double value : *advantages) EXPECT_EQ(value, 0.0);
}

TEST(GroupAdvantages, RefuseInvalidGroups) {
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
  config.clip_low = 1.01;
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
  double advantage, ratio;  // the inputs; ratio: r
  double objective, slope;  // the expected results; slope: d objective / d log π_θ
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
    const LossInputs inputs{.log_probs = log_probs,
                            .proximal_log_probs = zero,
                            .behaviour_log_probs = zero,
                            .reference_log_probs = {},
                            .advantages = tensor({c.advantage}, {1}),
                            .mask = torch::ones({1, 1})};
    const LossResult result = policy_loss(inputs, {1, 1}, LossConfig{});
    result.loss.backward();
    EXPECT_NEAR(result.loss.item<double>(), -c.objective, 1e-12) << c.advantage << " " << c.ratio;
    EXPECT_NEAR(log_probs.grad().item<double>(), -c.slope, 1e-12) << c.advantage << " " << c.ratio;
    EXPECT_EQ(result.statistics().clipped, c.clipped ? 1 : 0) << c.advantage << " " << c.ratio;
    EXPECT_NEAR(result.statistics().ratio_sum, c.ratio, 1e-12);
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
  EXPECT_EQ(result.statistics().capped, 1);
  EXPECT_EQ(result.statistics().tokens, 2);
  EXPECT_NEAR(result.statistics().ratio_sum, 6.5, 1e-12);
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
  EXPECT_NEAR(result.statistics().reference_kl_sum, k3, 1e-12);
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
  EXPECT_TRUE(std::isfinite(result.statistics().behaviour_kl_sum));
}

torch::Tensor score(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1);
}

struct RandomCase {
  torch::Tensor logits, targets;
  LossInputs inputs;
};

// Three sequences of four tokens over five symbols. All policies differ, some ratios are clipped, and some importance
// weights are capped.
RandomCase random_case(bool with_proximal) {
  torch::manual_seed(7);
  const auto f64 = torch::TensorOptions().dtype(torch::kFloat64);
  RandomCase result;
  result.logits = torch::randn({3, 4, 5}, f64);
  result.targets = torch::randint(5, {3, 4}, torch::kInt64);
  const torch::Tensor log_probs = score(result.logits, result.targets);
  result.inputs.behaviour_log_probs = log_probs + 0.8 * torch::randn({3, 4}, f64);
  result.inputs.reference_log_probs = log_probs + 0.5 * torch::randn({3, 4}, f64);
  if (with_proximal) result.inputs.proximal_log_probs = log_probs + 0.4 * torch::randn({3, 4}, f64);
  result.inputs.advantages = tensor({1.2, -0.7, 0.4}, {3});
  result.inputs.mask = tensor({1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0}, {3, 4});
  return result;
}

using Row = std::vector<double>;
using Rows = std::vector<Row>;

Rows rows_of(const torch::Tensor& matrix) {
  Rows rows;
  for (std::int64_t i = 0; i < matrix.size(0); ++i) {
    const torch::Tensor row = matrix[i].detach().to(torch::kFloat64).contiguous();
    rows.emplace_back(row.data_ptr<double>(), row.data_ptr<double>() + row.numel());
  }
  return rows;
}

// The losses again, response by response from docs/losses.md. `now` is differentiated; `held` is the same value where a
// formula holds it constant.
struct PlainLoss {
  Rows old, behaviour, reference, mask;
  Row advantages;
  double sequences = 3, tokens = 8;

  double operator()(const LossConfig& c, const Rows& now, const Rows& held) const {
    double loss = 0;
    for (std::size_t i = 0; i < now.size(); ++i) {
      std::vector<std::size_t> counted;  // the tokens that count
      for (std::size_t t = 0; t < now[i].size(); ++t)
        if (mask[i][t] > 0) counted.push_back(t);
      const auto length = static_cast<double>(counted.size());
      const auto sum = [&](const auto& term) {
        double total = 0;
        for (const std::size_t t : counted) total += term(t);
        return total;
      };
      const Rows& anchor = needs_proximal(c) ? old : held;
      const double product = sum([&](std::size_t t) { return anchor[i][t] - behaviour[i][t]; });
      const double drift = sum([&](std::size_t t) { return now[i][t] - old[i][t]; }) / length;
      const double drift_held = sum([&](std::size_t t) { return held[i][t] - old[i][t]; }) / length;
      const std::vector<std::size_t> left_out = beyond_second_moment(c, i, counted, held);
      for (const std::size_t t : counted) {
        const bool by_sequence = c.importance_level == Level::kSequence;
        const double weight =
            std::min(std::exp(by_sequence ? product : anchor[i][t] - behaviour[i][t]), c.importance_cap);
        const bool geometric = c.ratio_level == Level::kSequence;
        const double ratio = std::exp(geometric ? drift : now[i][t] - old[i][t]);
        const double ratio_held = std::exp(geometric ? drift_held : held[i][t] - old[i][t]);
        const auto clip = [&](double value) { return std::min(std::max(value, 1 - c.clip_low), 1 + c.clip_high); };
        const double difference = reference[i][t] - now[i][t];
        double advantage = advantages[i], objective = 0;
        if (c.kl_form == KlForm::kK1) advantage -= c.kl_coefficient * (held[i][t] - reference[i][t]);
        const bool is_left_out = std::find(left_out.begin(), left_out.end(), t) != left_out.end();
        if (c.trust_region == TrustRegion::kClip)
          objective = weight * std::min(ratio * advantage, clip(ratio) * advantage);
        if (c.trust_region == TrustRegion::kDetachedClip) objective = weight * clip(ratio_held) * advantage * now[i][t];
        if (c.trust_region == TrustRegion::kSecondMoment) objective = is_left_out ? 0 : weight * advantage * now[i][t];
        if (c.trust_region == TrustRegion::kNone) objective = weight * advantage * now[i][t];
        if (c.kl_form == KlForm::kK2) objective -= c.kl_coefficient * difference * difference / 2;
        if (c.kl_form == KlForm::kK3) objective -= c.kl_coefficient * (std::exp(difference) - difference - 1);
        double share = 1 / tokens;
        if (c.aggregation == Aggregation::kSequenceMean) share = 1 / (sequences * length);
        if (c.aggregation == Aggregation::kSequenceSum) share = 1 / sequences;
        if (c.aggregation == Aggregation::kFixedLength) share = 1 / (sequences * static_cast<double>(c.fixed_length));
        loss -= share * objective;
      }
    }
    return loss;
  }

  std::vector<std::size_t> beyond_second_moment(const LossConfig& c, std::size_t i, std::vector<std::size_t> remaining,
                                                const Rows& held) const {
    std::vector<std::size_t> left_out;
    const auto log_ratio = [&](std::size_t t) { return held[i][t] - behaviour[i][t]; };
    while (c.trust_region == TrustRegion::kSecondMoment && !remaining.empty()) {
      double mean_square = 0;
      auto worst = remaining.end();
      for (auto t = remaining.begin(); t != remaining.end(); ++t) {
        mean_square += log_ratio(*t) * log_ratio(*t) / static_cast<double>(remaining.size());
        if (log_ratio(*t) * advantages[i] <= 0) continue;
        if (worst == remaining.end() || std::abs(log_ratio(*t)) > std::abs(log_ratio(*worst))) worst = t;
      }
      if (mean_square <= c.second_moment_max || worst == remaining.end()) break;
      left_out.push_back(*worst);
      remaining.erase(worst);
    }
    return left_out;
  }
};

// Value and gradient of every loss, against the plain one and its finite differences.
TEST(PolicyLoss, EveryNamedLossMatchesItsFormulaAndFiniteDifferences) {
  ASSERT_EQ(loss_names().size(), 10u);
  for (const std::string_view name : loss_names()) {
    for (const KlForm form : {KlForm::kK1, KlForm::kK2, KlForm::kK3}) {
      LossConfig config = *loss_named(name);
      config.kl_coefficient = 0.1;
      config.kl_form = form;
      config.fixed_length = 5;
      config.second_moment_max = 0.3;
      if (config.clip_high > 1) config.clip_high = 0.3;  // so that some ratios exceed it
      RandomCase c = random_case(true);
      torch::Tensor logits = c.logits.clone().requires_grad_();
      c.inputs.log_probs = score(logits, c.targets);
      const LossResult result = policy_loss(c.inputs, {3, 8}, config);
      EXPECT_GT(result.statistics().capped, 0) << name;
      EXPECT_EQ(result.statistics().clipped > 0, config.trust_region != TrustRegion::kNone) << name;
      result.loss.backward();
      const PlainLoss plain{.old = rows_of(c.inputs.proximal_log_probs),
                            .behaviour = rows_of(c.inputs.behaviour_log_probs),
                            .reference = rows_of(c.inputs.reference_log_probs),
                            .mask = rows_of(c.inputs.mask),
                            .advantages = rows_of(c.inputs.advantages.unsqueeze(0))[0]};
      const Rows held = rows_of(c.inputs.log_probs);
      EXPECT_NEAR(result.loss.item<double>(), plain(config, held, held), 1e-12) << name;
      const torch::Tensor gradient = logits.grad().reshape({-1});
      constexpr double kStep = 1e-6;
      for (std::int64_t i = 0; i < gradient.numel(); ++i) {
        torch::Tensor up = c.logits.clone(), down = c.logits.clone();
        up.view({-1})[i] += kStep;
        down.view({-1})[i] -= kStep;
        const double above = plain(config, rows_of(score(up, c.targets)), held);
        const double below = plain(config, rows_of(score(down, c.targets)), held);
        EXPECT_NEAR(gradient[i].item<double>(), (above - below) / (2 * kStep), 1e-8) << name << " logit " << i;
      }
    }
  }
}

// Two responses of 2 and 1 tokens with rewards 1 and 0, and numbers simple enough to compute the loss by hand.
TEST(PolicyLoss, EveryNamedLossByHand) {
  // Log-ratios to the proximal policy: ln 1.5, ln 1, ln 0.5; that policy to the behaviour policy: ln 3, ln 1, ln 1.
  const torch::Tensor old = tensor({-1, -2, -1, 0}, {2, 2});
  const torch::Tensor now = old + tensor({std::log(1.5), 0, std::log(0.5), 0}, {2, 2});
  const torch::Tensor behaviour = old - tensor({std::log(3.0), 0, 0, 0}, {2, 2});
  const torch::Tensor mask = tensor({1, 1, 1, 0}, {2, 2});
  const double l1 = -1 + std::log(1.5), l3 = -1 + std::log(0.5);  // log π_θ; the second token's is -2
  const double geometric = std::sqrt(1.5);
  // Advantages: the mean is 0.5 and the deviation 0.5; the length-weighted mean 2/3.
  const std::pair<const char*, double> expected[] = {
      {"dapo", (2 * 1.28 + 1 - 0.8) / 3},  // cap 2; 1.5 is clipped to 1.28, 0.5 to 0.8
      {"grpo", ((2 * 1.2 + 1) / 2 - 0.8) / 2},
      {"dr_grpo", (0.5 * (2 * 1.2 + 1) - 0.5 * 0.8) / (2 * 10)},  // 10 tokens at most
      {"rloo", (2 * l1 - 2 - 0.5 * l3) / 2},                      // 4.5 is capped to 2; 0.5 is under-weighted
      {"opo", ((2 * l1 - 2) / 3 - 2.0 / 3 * 0.5 * l3) / 2},
      {"gspo", ((2 + 1) * std::min(geometric, 1.0004) / 2 - 0.9997) / 2},
      {"cispo", (2 * 1.5 * l1 - 2 - 0.5 * l3) / 3},  // 1.5 is below 5
      {"tis", (2 * l1 - 2 - 0.5 * l3) / 3},
      {"tis_sequence", (2 * l1 + 2 * -2 - 0.5 * l3) / 3},  // the product 4.5 weighs both tokens
      {"m2po", -2.0 / 3},                                  // (ln 4.5)² and (ln 0.5)² are beyond 0.04
  };
  ASSERT_EQ(std::size(expected), loss_names().size());
  for (const auto& [name, objective] : expected) {
    LossConfig config = *loss_named(name);
    config.fixed_length = 10;
    const auto advantages = group_advantages({1, 0}, 2, config, {2, 1});
    ASSERT_TRUE(advantages) << name;
    const LossInputs inputs{now, old, behaviour, {}, tensor(*advantages, {2}), mask};
    const LossResult result = policy_loss(inputs, {2, 3}, config);
    EXPECT_NEAR(result.loss.item<double>(), -objective, 2e-5) << name;
    EXPECT_NEAR(result.statistics().ratio_sum, 4.5 + 1 + 0.5, 1e-9);
    EXPECT_NEAR(result.statistics().ratio_square_sum, 20.25 + 1 + 0.25, 1e-9);
  }
  EXPECT_FALSE(loss_named("ppo"));
}

TEST(GroupAdvantages, BaselinesByHand) {
  LossConfig config = *loss_named("rloo");
  EXPECT_EQ(group_advantages({1, 0, 0, 1}, 4, config).value(), (std::vector<double>{2. / 3, -2. / 3, -2. / 3, 2. / 3}));
  config = *loss_named("opo");  // (1·6 + 1·2) / 16 = 1/2
  EXPECT_EQ(group_advantages({1, 0, 0, 1}, 4, config, {6, 4, 4, 2}).value(),
            (std::vector<double>{0.5, -0.5, -0.5, 0.5}));
  EXPECT_EQ(group_advantages({1, 0}, 2, config, {3, 1}).value(), (std::vector<double>{0.25, -0.75}));
  EXPECT_EQ(group_advantages({1, 0}, 2, config).error().code, Code::kInvalid);
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
      statistics += result.statistics();
    }
    EXPECT_NEAR(loss, whole.loss.item<double>(), 1e-12);
    EXPECT_EQ(statistics.tokens, whole.statistics().tokens);
    EXPECT_NEAR(statistics.behaviour_kl_sum, whole.statistics().behaviour_kl_sum, 1e-12);
  }
}

}  // namespace
}  // namespace echoline::learner
