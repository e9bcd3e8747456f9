// The losses of a client's own examples, their gradients, and updates with its settings.
#include "learner/training/datum_loss.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "learner/training/trainer.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

using testing::HasSubstr;

std::shared_ptr<model::Transformer> tiny_model() {
  model::ModelConfig shape;
  shape.vocab_size = 12;
  shape.hidden_size = 16;
  shape.intermediate_size = 32;
  shape.layers = 1;
  shape.heads = 2;
  shape.kv_heads = 1;
  shape.head_dim = 8;
  shape.positions_max = 32;
  shape.tie_embeddings = true;
  shape.initializer_range = 0.3;
  auto initialised = model::init(shape, 7);
  ECHO_CHECK(initialised.has_value(), "{}", initialised.error().message());
  return *initialised;
}

class DatumLossTest : public testing::Test {
 protected:
  DatumBatch batch(DatumLoss loss, std::size_t count = 3) const {
    DatumBatch batch{.loss = loss, .ratio_min = 0.8, .ratio_max = 1.2, .forward_only = true, .data = {}};
    for (std::size_t i = 0; i < count; ++i) {
      Datum datum;
      for (std::size_t token = 0; token < 3 + i; ++token) {
        datum.input.push_back(static_cast<std::int64_t>((7 * i + 3 * token) % 12));
        datum.targets.push_back(static_cast<std::int64_t>((5 * i + token) % 12));
        const float value = 0.7f * static_cast<float>(token) - 1.0f;
        if (loss == DatumLoss::kCrossEntropy) {
          datum.weights.push_back(value);
        } else {
          datum.logprobs.push_back(-2.5f + 0.3f * static_cast<float>(token));
          datum.advantages.push_back(value);
        }
      }
      batch.data.push_back(std::move(datum));
    }
    return batch;
  }
  DatumResult compute(const DatumBatch& batch, std::int64_t microbatch_tokens = 64) {
    auto result = compute_datum_loss(*model_, optimizer_, batch, microbatch_tokens);
    ECHO_CHECK(result.has_value(), "{}", result.error().message());
    return *result;
  }
  // The sum of f(log p, example, token) over all tokens.
  template <class F>
  static double sum_over(const DatumBatch& batch, const DatumResult& result, F f) {
    double sum = 0;
    for (std::size_t i = 0; i < batch.data.size(); ++i)
      for (std::size_t token = 0; token < batch.data[i].input.size(); ++token)
        sum += f(static_cast<double>(result.logprobs[i][token]), batch.data[i], token);
    return sum;
  }

  std::shared_ptr<model::Transformer> model_ = tiny_model();
  AdamW optimizer_{named_parameters(*model_), OptimizerConfig{}};
};

// model::score() computes them in another way, one sequence at a time.
TEST_F(DatumLossTest, LogprobsAreThoseOfTheTargets) {
  const DatumBatch examples = batch(DatumLoss::kCrossEntropy);
  const DatumResult result = compute(examples);
  for (std::size_t i = 0; i < examples.data.size(); ++i)
    for (std::size_t token = 0; token < examples.data[i].input.size(); ++token) {
      const auto& input = examples.data[i].input;
      const std::vector<model::Token> prompt(input.begin(), input.begin() + static_cast<std::ptrdiff_t>(token) + 1);
      const auto expected = model::score(*model_, prompt, {static_cast<model::Token>(examples.data[i].targets[token])});
      ASSERT_TRUE(expected) << expected.error().message();
      EXPECT_NEAR(result.logprobs[i][token], expected->front(), 1e-4) << i << " " << token;
    }
}

TEST_F(DatumLossTest, LossesAreTheirFormulas) {
  const auto ratio = [](double logprob, const Datum& datum, std::size_t token) {
    return std::exp(logprob - static_cast<double>(datum.logprobs[token]));
  };
  DatumBatch examples = batch(DatumLoss::kCrossEntropy);
  DatumResult result = compute(examples);
  EXPECT_NEAR(result.loss_sum,
              sum_over(examples, result, [](double p, const Datum& d, std::size_t t) { return -d.weights[t] * p; }),
              1e-4);
  examples = batch(DatumLoss::kImportanceSampling);
  result = compute(examples);
  EXPECT_NEAR(result.loss_sum,
              sum_over(examples, result,
                       [&](double p, const Datum& d, std::size_t t) { return -ratio(p, d, t) * d.advantages[t]; }),
              1e-3);
  examples = batch(DatumLoss::kPpo);
  result = compute(examples);
  EXPECT_NEAR(result.loss_sum,
              sum_over(examples, result,
                       [&](double p, const Datum& d, std::size_t t) {
                         const double r = ratio(p, d, t);
                         return -std::min(r * d.advantages[t], std::clamp(r, 0.8, 1.2) * d.advantages[t]);
                       }),
              1e-3);
  examples = batch(DatumLoss::kCispo);
  examples.ratio_min = 0.5;
  result = compute(examples);
  EXPECT_NEAR(result.loss_sum,
              sum_over(examples, result,
                       [&](double p, const Datum& d, std::size_t t) {
                         return -std::clamp(ratio(p, d, t), 0.5, 1.2) * d.advantages[t] * p;
                       }),
              1e-3);
}

// The gradient of the norm's weight, by finite differences of the loss.
TEST_F(DatumLossTest, GradientsAreThoseOfTheLoss) {
  for (const DatumLoss loss : {DatumLoss::kCrossEntropy, DatumLoss::kImportanceSampling, DatumLoss::kPpo}) {
    DatumBatch examples = batch(loss);
    examples.forward_only = false;
    compute(examples, /*microbatch_tokens=*/4);  // several parts, whose gradients add up
    torch::Tensor parameter = optimizer_.slots().back().parameter;
    const double gradient = parameter.grad().view({-1})[0].item<double>();
    optimizer_.clear_gradients();
    examples.forward_only = true;
    const auto loss_at = [&](double change) {
      torch::NoGradGuard no_gradient;
      parameter.view({-1})[0] += change;
      const double value = compute(examples).loss_sum;
      parameter.view({-1})[0] -= change;
      return value;
    };
    constexpr double kChange = 5e-3;
    EXPECT_NEAR(gradient, (loss_at(kChange) - loss_at(-kChange)) / (2 * kChange), 2e-2 * (1 + std::abs(gradient)));
  }
}

TEST_F(DatumLossTest, UpdatesWithTheClientsSettings) {
  const DatumBatch examples = batch(DatumLoss::kCrossEntropy);
  DatumBatch trained = examples;
  trained.forward_only = false;
  for (Datum& datum : trained.data) datum.weights.assign(datum.weights.size(), 1.0f);
  const double before = compute(trained).loss_sum;
  auto config = optimizer_config({.learning_rate = 1e-2, .epsilon = 1e-12}, OptimizerConfig{});
  ASSERT_TRUE(config);
  EXPECT_TRUE(std::isinf(config->gradient_norm_max));  // 0: not clipped
  optimizer_.set_config(*config);
  const UpdateReport report = optimizer_.step();
  EXPECT_TRUE(report.applied);
  EXPECT_EQ(report.learning_rate, 1e-2);
  trained.forward_only = true;
  EXPECT_LT(compute(trained).loss_sum, before);
  EXPECT_THAT(optimizer_config({.beta1 = 1}, {}).error().message(), HasSubstr("beta1 is 1, expected 0 to"));
  EXPECT_THAT(optimizer_config({.learning_rate = NAN}, {}).error().message(), HasSubstr("learning_rate is nan"));
}

TEST_F(DatumLossTest, RefusesWhatDoesNotFitTheModel) {
  DatumBatch examples = batch(DatumLoss::kCrossEntropy);
  examples.data[1].targets[0] = 12;
  EXPECT_THAT(compute_datum_loss(*model_, optimizer_, examples, 64).error().message(),
              HasSubstr("data[1] has token 12, expected 0 to 11"));
  examples = batch(DatumLoss::kCrossEntropy, 31);
  EXPECT_THAT(compute_datum_loss(*model_, optimizer_, examples, 64).error().message(),
              HasSubstr("data[30] has 33 tokens, the model has positions for 32"));
}

}  // namespace
}  // namespace echoline::learner
