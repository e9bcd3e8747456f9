// AdamW against a plain loop, and the effect of fp32 masters behind bf16 parameters.
#include "learner/training/optimizer.hpp"

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <cmath>
#include <limits>

namespace echoline::learner {
namespace {

// The same update in double precision, element by element.
struct PlainAdamW {
  std::vector<double> weights, moment1, moment2;
  bool decays = false;
  // `update` counts from 1.
  void step(const std::vector<double>& gradients, double clip_factor, int update, double rate,
            const OptimizerConfig& c) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double gradient = gradients[i] * clip_factor;
      moment1[i] = c.beta1 * moment1[i] + (1 - c.beta1) * gradient;
      moment2[i] = c.beta2 * moment2[i] + (1 - c.beta2) * gradient * gradient;
      const double unbiased1 = moment1[i] / (1 - std::pow(c.beta1, update));
      const double unbiased2 = moment2[i] / (1 - std::pow(c.beta2, update));
      const double decay = decays ? c.weight_decay * weights[i] : 0.0;
      weights[i] -= rate * (unbiased1 / (std::sqrt(unbiased2) + c.epsilon) + decay);
    }
  }
};

std::vector<double> to_vector(const torch::Tensor& tensor) {
  const torch::Tensor flat = tensor.detach().to(torch::kFloat64).contiguous().reshape({-1});
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

PlainAdamW plain(const torch::Tensor& parameter) {
  PlainAdamW optimizer;
  optimizer.weights = to_vector(parameter);
  optimizer.moment1.assign(optimizer.weights.size(), 0.0);
  optimizer.moment2.assign(optimizer.weights.size(), 0.0);
  optimizer.decays = parameter.dim() >= 2;
  return optimizer;
}

TEST(AdamW, MatchesAPlainLoop) {
  torch::manual_seed(3);
  OptimizerConfig config{};
  config.learning_rate = 0.01;
  config.weight_decay = 0.1;
  config.gradient_norm_max = 1.5;
  config.warmup_updates = 4;
  torch::Tensor matrix = torch::randn({3, 4}).requires_grad_();
  torch::Tensor scale = torch::randn({5}).requires_grad_();
  PlainAdamW plain_matrix = plain(matrix), plain_scale = plain(scale);
  AdamW optimizer({{"matrix", matrix}, {"scale", scale}}, config);
  bool clipped = false, unclipped = false;
  for (int update = 1; update <= 12; ++update) {
    const double gradient_scale = update % 2 == 0 ? 1.0 : 0.1;
    const torch::Tensor matrix_gradient = gradient_scale * torch::randn({3, 4}),
                        scale_gradient = gradient_scale * torch::randn({5});
    matrix.mutable_grad() = matrix_gradient.clone();
    scale.mutable_grad() = scale_gradient.clone();
    const double norm =
        std::sqrt(matrix_gradient.pow(2).sum().item<double>() + scale_gradient.pow(2).sum().item<double>());
    const UpdateReport report = optimizer.step();
    EXPECT_TRUE(report.applied);
    EXPECT_NEAR(report.gradient_norm, norm, 1e-5);
    EXPECT_NEAR(report.learning_rate, 0.01 * std::min(1.0, update / 4.0), 1e-12);
    const double clip_factor = std::min(1.0, 1.5 / norm);
    (clip_factor < 1 ? clipped : unclipped) = true;
    plain_matrix.step(to_vector(matrix_gradient), clip_factor, update, report.learning_rate, config);
    plain_scale.step(to_vector(scale_gradient), clip_factor, update, report.learning_rate, config);
    const auto matrix_weights = to_vector(optimizer.slots()[0].master),
               scale_weights = to_vector(optimizer.slots()[1].master);
    for (std::size_t i = 0; i < matrix_weights.size(); ++i)
      EXPECT_NEAR(matrix_weights[i], plain_matrix.weights[i], 2e-6);
    for (std::size_t i = 0; i < scale_weights.size(); ++i) EXPECT_NEAR(scale_weights[i], plain_scale.weights[i], 2e-6);
  }
  EXPECT_TRUE(clipped && unclipped);
  EXPECT_EQ(optimizer.updates(), 12);
}

TEST(AdamW, ParametersHoldRoundedMasters) {
  torch::Tensor parameter = torch::tensor({1.0f, 1.00390625f, 1.01171875f, 0.3f}).requires_grad_();
  AdamW optimizer({{"p", parameter}}, OptimizerConfig{});
  // 1 + 2^-8 is halfway between 1 and 1 + 2^-7: the tie goes to the even 1; 1 + 3·2^-8 goes up to 1 + 2·2^-7.
  EXPECT_TRUE(torch::equal(parameter.detach().slice(0, 0, 3), torch::tensor({1.0f, 1.0f, 1.015625f})));
  EXPECT_EQ(optimizer.slots()[0].master[3].item<float>(), 0.3f);
  EXPECT_NE(parameter[3].item<float>(), 0.3f);
}

TEST(AdamW, SmallUpdatesAddUpInTheMasters) {
  OptimizerConfig config{};
  config.learning_rate = 1e-4;  // a bf16 step just below 1 is 2^-8, 39 times as much
  torch::Tensor parameter = torch::tensor({1.0f}).requires_grad_();
  AdamW optimizer({{"p", parameter}}, config);
  int updates_until_change = 0;
  for (int update = 1; update <= 40 && updates_until_change == 0; ++update) {
    parameter.mutable_grad() = torch::tensor({1.0f});
    optimizer.step();
    if (parameter.item<float>() != 1.0f) updates_until_change = update;
  }
  EXPECT_NEAR(updates_until_change, 20, 1);  // half a step below 1 is 2^-9 = 0.00195
}

TEST(AdamW, TheRateRisesAndFallsByItsSchedule) {
  const auto rates = [](Schedule schedule, double final_share) {
    OptimizerConfig config{};
    config.learning_rate = 0.8;
    config.warmup_updates = 2;
    config.schedule = schedule;
    config.updates_expected = 6;
    config.final_share = final_share;
    torch::Tensor parameter = torch::zeros({1}).requires_grad_();
    AdamW optimizer({{"p", parameter}}, config);
    std::vector<double> used;
    for (int update = 0; update < 8; ++update) {
      parameter.mutable_grad() = torch::ones({1});
      used.push_back(optimizer.step().learning_rate);
    }
    return used;
  };
  const auto expect_near = [](const std::vector<double>& actual, const std::vector<double>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-12) << i;
  };
  expect_near(rates(Schedule::kConstant, 0), {0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8});
  expect_near(rates(Schedule::kLinear, 0.5), {0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4});
  const double deviation = 0.4 * std::sqrt(0.5);
  expect_near(rates(Schedule::kCosine, 0), {0.4, 0.8, 0.8, 0.4 + deviation, 0.4, 0.4 - deviation, 0.0, 0.0});
}

// Noisy gradients of a bowl, some elements a thousand times as steep as others: 8-bit moments converge as closely as
// 32-bit ones.
TEST(AdamW, MomentsInEightBitsDoNearlyAsWell) {
  torch::manual_seed(5);
  const torch::Tensor optimum = torch::randn({3, 700}), steepness = torch::pow(10.0, torch::rand({3, 700}) * 3 - 1.5);
  const auto distance_to_optimum = [&](Moments moments, double beta2) {
    OptimizerConfig config{};
    config.learning_rate = 0.02;
    config.beta2 = beta2;
    config.gradient_norm_max = 1e6;
    config.schedule = Schedule::kLinear;
    config.updates_expected = 400;
    config.moments = moments;
    torch::manual_seed(6);
    torch::Tensor parameter = torch::zeros({3, 700}).requires_grad_();
    AdamW optimizer({{"p", parameter}}, config);
    for (int update = 0; update < 400; ++update) {
      parameter.mutable_grad() = steepness * (optimizer.slots()[0].master - optimum + 0.3 * torch::randn({3, 700}));
      optimizer.step();
    }
    const AdamW::Slot& slot = optimizer.slots()[0];
    EXPECT_EQ(slot.moment1.element_size(), moments == Moments::kInt8 ? 1 : 4);
    EXPECT_EQ(slot.moment2.element_size(), moments == Moments::kInt8 ? 1 : 4);
    return (slot.master - optimum).square().mean().sqrt().item<double>();
  };
  for (const double beta2 : {0.95, 0.999}) {  // at 0.999 a change is a sixteenth of a step
    const double in_fp32 = distance_to_optimum(Moments::kFp32, beta2),
                 in_eight_bits = distance_to_optimum(Moments::kInt8, beta2);
    EXPECT_LT(in_fp32, 0.1);
    EXPECT_LT(in_eight_bits, 1.2 * in_fp32) << beta2;
  }
}

TEST(AdamW, GradientsThatAreNotFiniteChangeNothing) {
  torch::Tensor parameter = torch::tensor({1.0f, 2.0f}).requires_grad_();
  AdamW optimizer({{"p", parameter}}, OptimizerConfig{});
  parameter.mutable_grad() = torch::tensor({std::numeric_limits<float>::quiet_NaN(), 1.0f});
  const UpdateReport report = optimizer.step();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(optimizer.updates(), 0);
  EXPECT_TRUE(torch::equal(parameter.detach(), torch::tensor({1.0f, 2.0f})));
  EXPECT_FALSE(parameter.grad().defined());
}

TEST(AdamW, ResetStartsAnotherPhaseFromThePublishedValues) {
  torch::Tensor parameter = torch::tensor({0.3f}).requires_grad_();
  AdamW optimizer({{"p", parameter}}, OptimizerConfig{});
  parameter.mutable_grad() = torch::tensor({1.0f});
  optimizer.step();
  const float published = parameter.item<float>();
  optimizer.reset(OptimizerConfig{});
  EXPECT_EQ(optimizer.updates(), 0);
  EXPECT_EQ(parameter.item<float>(), published);
  EXPECT_EQ(optimizer.slots()[0].master.item<float>(), published);
  EXPECT_EQ(optimizer.slots()[0].moment1.item<float>(), 0.0f);
}

// bf16 counts 1, 2, ..., 256 and stays there: its next value is 258.
TEST(AdamW, GradientsOfManyMicroBatchesAddUpInFp32) {
  torch::Tensor parameter = torch::zeros({4}, torch::kBFloat16).requires_grad_();
  AdamW optimizer({{"p", parameter}}, OptimizerConfig{});
  for (int i = 0; i < 1000; ++i) {
    parameter.sum().backward();
    optimizer.gather_gradients();
  }
  parameter.sum().backward();  // step() takes what was not gathered
  const UpdateReport report = optimizer.step();
  EXPECT_TRUE(report.applied);
  EXPECT_FLOAT_EQ(report.gradient_norm, 2 * 1001);
  EXPECT_EQ(optimizer.step().gradient_norm, 0) << "gradients outlived their update";
}

// On a GPU, one kernel updates all tensors, bit for bit like libtorch's kernels one after another. Only the norm of the
// gradients is summed in another order.
TEST(AdamWOnGpu, OneKernelUpdatesAsLibtorchDoes) {
  if (!model::training::have_kernels()) GTEST_SKIP() << "built without CUDA kernels, or with a libtorch without CUDA";
  if (torch::cuda::device_count() == 0) GTEST_SKIP() << "there is no CUDA device";
  for (const Moments moments : {Moments::kFp32, Moments::kInt8})
    for (const torch::ScalarType type : {torch::kBFloat16, torch::kFloat32}) {
      OptimizerConfig config{};
      config.learning_rate = 0.01;
      config.weight_decay = 0.1;
      config.gradient_norm_max = 1e9;  // no clipping: its factor would differ in the last bit
      config.moments = moments;
      const std::vector<std::vector<std::int64_t>> shapes{{3, 700}, {5}, {1}, {257, 8192}, {256}, {40, 333}};
      const auto results_of = [&](bool kernels) {
        model::training::use_kernels(kernels);
        torch::manual_seed(4);
        const auto options = torch::TensorOptions().device(torch::kCUDA);
        NamedParameters parameters;
        for (const auto& shape : shapes)
          parameters.emplace_back("p", torch::randn(shape, options).to(type).requires_grad_());
        AdamW optimizer(parameters, config);
        std::vector<torch::Tensor> results;
        for (int update = 0; update < 4; ++update) {
          for (int microbatch = 0; microbatch < 3; ++microbatch) {
            for (std::size_t i = 0; i < parameters.size(); ++i) {
              if (i == 4 && update == 2) continue;  // no gradient in this update
              torch::Tensor& parameter = parameters[i].second;
              (parameter * torch::randn(shapes[i], options).to(type)).sum().backward();
            }
            optimizer.gather_gradients();
          }
          results.push_back(torch::tensor(optimizer.step().gradient_norm, torch::kDouble));
        }
        model::training::use_kernels(true);
        for (const AdamW::Slot& slot : optimizer.slots())
          for (const torch::Tensor& tensor :
               {slot.parameter, slot.master, slot.moment1, slot.moment2, slot.scale1, slot.scale2})
            if (tensor.defined()) results.push_back(tensor.detach().cpu());
        return results;
      };
      const auto with_kernel = results_of(true), with_libtorch = results_of(false);
      ASSERT_EQ(with_kernel.size(), with_libtorch.size());
      for (std::size_t i = 0; i < with_kernel.size(); ++i) {
        if (i < 4)
          EXPECT_NEAR(with_kernel[i].item<double>() / with_libtorch[i].item<double>(), 1, 1e-5);
        else
          EXPECT_TRUE(torch::equal(with_kernel[i], with_libtorch[i]))
              << "tensor " << i << (moments == Moments::kInt8 ? " int8 " : " fp32 ") << type << ": "
              << (with_kernel[i] != with_libtorch[i]).sum().item<std::int64_t>() << " of " << with_kernel[i].numel()
              << " differ, at most by "
              << (with_kernel[i].to(torch::kDouble) - with_libtorch[i].to(torch::kDouble)).abs().max().item<double>();
      }
    }
}

TEST(OptimizerConfig, RangesAreChecked) {
  EXPECT_TRUE(validate(OptimizerConfig{}));
  OptimizerConfig config{};
  config.learning_rate = 0;
  EXPECT_NE(validate(config).error().detail.find("learning_rate"), std::string::npos);
  config = {};
  config.beta2 = 1.0;
  EXPECT_NE(validate(config).error().detail.find("beta2"), std::string::npos);
  config = {};
  config.warmup_updates = -1;
  EXPECT_NE(validate(config).error().detail.find("warmup_updates"), std::string::npos);
}

}  // namespace
}  // namespace echoline::learner
