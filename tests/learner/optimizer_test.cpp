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
  std::vector<double> w, m, v;
  bool decays = false;
  void step(const std::vector<double>& g, double scale, int n, double rate, const OptimizerConfig& c) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double gradient = g[i] * scale;
      m[i] = c.beta1 * m[i] + (1 - c.beta1) * gradient;
      v[i] = c.beta2 * v[i] + (1 - c.beta2) * gradient * gradient;
      const double m_hat = m[i] / (1 - std::pow(c.beta1, n)), v_hat = v[i] / (1 - std::pow(c.beta2, n));
      w[i] -= rate * (m_hat / (std::sqrt(v_hat) + c.epsilon) + (decays ? c.weight_decay * w[i] : 0.0));
    }
  }
};

std::vector<double> to_vector(const torch::Tensor& t) {
  const torch::Tensor flat = t.detach().to(torch::kFloat64).contiguous().reshape({-1});
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

PlainAdamW plain(const torch::Tensor& parameter) {
  PlainAdamW p;
  p.w = to_vector(parameter);
  p.m.assign(p.w.size(), 0.0);
  p.v.assign(p.w.size(), 0.0);
  p.decays = parameter.dim() >= 2;
  return p;
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
  PlainAdamW expect_matrix = plain(matrix), expect_scale = plain(scale);
  AdamW optimizer({{"matrix", matrix}, {"scale", scale}}, config);
  bool clipped = false, unclipped = false;
  for (int n = 1; n <= 12; ++n) {
    const double size = n % 2 == 0 ? 1.0 : 0.1;
    const torch::Tensor g1 = size * torch::randn({3, 4}), g2 = size * torch::randn({5});
    matrix.mutable_grad() = g1.clone();
    scale.mutable_grad() = g2.clone();
    const double norm = std::sqrt(g1.pow(2).sum().item<double>() + g2.pow(2).sum().item<double>());
    const UpdateReport report = optimizer.step();
    EXPECT_TRUE(report.applied);
    EXPECT_NEAR(report.gradient_norm, norm, 1e-5);
    EXPECT_NEAR(report.learning_rate, 0.01 * std::min(1.0, n / 4.0), 1e-12);
    const double factor = std::min(1.0, 1.5 / norm);
    (factor < 1 ? clipped : unclipped) = true;
    expect_matrix.step(to_vector(g1), factor, n, report.learning_rate, config);
    expect_scale.step(to_vector(g2), factor, n, report.learning_rate, config);
    const auto w1 = to_vector(optimizer.slots()[0].master), w2 = to_vector(optimizer.slots()[1].master);
    for (std::size_t i = 0; i < w1.size(); ++i) EXPECT_NEAR(w1[i], expect_matrix.w[i], 2e-6);
    for (std::size_t i = 0; i < w2.size(); ++i) EXPECT_NEAR(w2[i], expect_scale.w[i], 2e-6);
  }
  EXPECT_TRUE(clipped && unclipped);
  EXPECT_EQ(optimizer.updates(), 12);
}

TEST(AdamW, ParametersHoldRoundedMasters) {
  torch::Tensor p = torch::tensor({1.0f, 1.00390625f, 1.01171875f, 0.3f}).requires_grad_();
  AdamW optimizer({{"p", p}}, OptimizerConfig{});
  // 1 + 2^-8 is halfway between 1 and 1 + 2^-7: the tie goes to the even 1; 1 + 3·2^-8 goes up to 1 + 2·2^-7.
  EXPECT_TRUE(torch::equal(p.detach().slice(0, 0, 3), torch::tensor({1.0f, 1.0f, 1.015625f})));
  EXPECT_EQ(optimizer.slots()[0].master[3].item<float>(), 0.3f);
  EXPECT_NE(p[3].item<float>(), 0.3f);
}

TEST(AdamW, SmallUpdatesAddUpInTheMasters) {
  OptimizerConfig config{};
  config.learning_rate = 1e-4;  // a bf16 step just below 1 is 2^-8, 39 times as much
  torch::Tensor p = torch::tensor({1.0f}).requires_grad_();
  AdamW optimizer({{"p", p}}, config);
  int first_change = 0;
  for (int n = 1; n <= 40 && first_change == 0; ++n) {
    p.mutable_grad() = torch::tensor({1.0f});
    optimizer.step();
    if (p.item<float>() != 1.0f) first_change = n;
  }
  EXPECT_NEAR(first_change, 20, 1);  // half a step below 1 is 2^-9 = 0.00195
}

TEST(AdamW, TheRateRisesAndFallsByItsSchedule) {
  const auto rates = [](Schedule schedule, double final_share) {
    OptimizerConfig config{};
    config.learning_rate = 0.8;
    config.warmup_updates = 2;
    config.schedule = schedule;
    config.updates_expected = 6;
    config.final_share = final_share;
    torch::Tensor p = torch::zeros({1}).requires_grad_();
    AdamW optimizer({{"p", p}}, config);
    std::vector<double> all;
    for (int n = 0; n < 8; ++n) {
      p.mutable_grad() = torch::ones({1});
      all.push_back(optimizer.step().learning_rate);
    }
    return all;
  };
  const auto expect = [](const std::vector<double>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
  };
  expect(rates(Schedule::kConstant, 0), {0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8});
  expect(rates(Schedule::kLinear, 0.5), {0.4, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4});
  const double half = 0.4 * std::sqrt(0.5);
  expect(rates(Schedule::kCosine, 0), {0.4, 0.8, 0.8, 0.4 + half, 0.4, 0.4 - half, 0.0, 0.0});
}

// Noisy gradients of a bowl, some elements a thousand times as steep as others: 8-bit moments converge as closely as
// 32-bit ones.
TEST(AdamW, MomentsInEightBitsDoNearlyAsWell) {
  torch::manual_seed(5);
  const torch::Tensor wanted = torch::randn({3, 700}), steep = torch::pow(10.0, torch::rand({3, 700}) * 3 - 1.5);
  const auto distance = [&](Moments moments, double beta2) {
    OptimizerConfig config{};
    config.learning_rate = 0.02;
    config.beta2 = beta2;
    config.gradient_norm_max = 1e6;
    config.schedule = Schedule::kLinear;
    config.updates_expected = 400;
    config.moments = moments;
    torch::manual_seed(6);
    torch::Tensor p = torch::zeros({3, 700}).requires_grad_();
    AdamW optimizer({{"p", p}}, config);
    for (int n = 0; n < 400; ++n) {
      p.mutable_grad() = steep * (optimizer.slots()[0].master - wanted + 0.3 * torch::randn({3, 700}));
      optimizer.step();
    }
    const AdamW::Slot& slot = optimizer.slots()[0];
    EXPECT_EQ(slot.moment1.element_size(), moments == Moments::kInt8 ? 1 : 4);
    EXPECT_EQ(slot.moment2.element_size(), moments == Moments::kInt8 ? 1 : 4);
    return (slot.master - wanted).square().mean().sqrt().item<double>();
  };
  for (const double beta2 : {0.95, 0.999}) {  // at 0.999 a change is a sixteenth of a step
    const double exact = distance(Moments::kFp32, beta2), coded = distance(Moments::kInt8, beta2);
    EXPECT_LT(exact, 0.1);
    EXPECT_LT(coded, 1.2 * exact) << beta2;
  }
}

TEST(AdamW, GradientsThatAreNotFiniteChangeNothing) {
  torch::Tensor p = torch::tensor({1.0f, 2.0f}).requires_grad_();
  AdamW optimizer({{"p", p}}, OptimizerConfig{});
  p.mutable_grad() = torch::tensor({std::numeric_limits<float>::quiet_NaN(), 1.0f});
  const UpdateReport report = optimizer.step();
  EXPECT_FALSE(report.applied);
  EXPECT_EQ(optimizer.updates(), 0);
  EXPECT_TRUE(torch::equal(p.detach(), torch::tensor({1.0f, 2.0f})));
  EXPECT_FALSE(p.grad().defined());
}

TEST(AdamW, ResetStartsAnotherPhaseFromThePublishedValues) {
  torch::Tensor p = torch::tensor({0.3f}).requires_grad_();
  AdamW optimizer({{"p", p}}, OptimizerConfig{});
  p.mutable_grad() = torch::tensor({1.0f});
  optimizer.step();
  const float published = p.item<float>();
  optimizer.reset(OptimizerConfig{});
  EXPECT_EQ(optimizer.updates(), 0);
  EXPECT_EQ(p.item<float>(), published);
  EXPECT_EQ(optimizer.slots()[0].master.item<float>(), published);
  EXPECT_EQ(optimizer.slots()[0].moment1.item<float>(), 0.0f);
}

// bf16 counts 1, 2, ..., 256 and stays there: its next value is 258.
TEST(AdamW, GradientsOfManyMicroBatchesAddUpInFp32) {
  torch::Tensor p = torch::zeros({4}, torch::kBFloat16).requires_grad_();
  AdamW optimizer({{"p", p}}, OptimizerConfig{});
  for (int i = 0; i < 1000; ++i) {
    p.sum().backward();
    optimizer.gather_gradients();
  }
  p.sum().backward();  // step() takes what was not gathered
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
      const auto run = [&](bool kernels) {
        model::training::use_kernels(kernels);
        torch::manual_seed(4);
        const auto options = torch::TensorOptions().device(torch::kCUDA);
        NamedParameters parameters;
        for (const auto& shape : shapes)
          parameters.emplace_back("p", torch::randn(shape, options).to(type).requires_grad_());
        AdamW optimizer(parameters, config);
        std::vector<torch::Tensor> all;
        for (int n = 0; n < 4; ++n) {
          for (int part = 0; part < 3; ++part) {
            for (std::size_t i = 0; i < parameters.size(); ++i) {
              if (i == 4 && n == 2) continue;  // no gradient in this update
              torch::Tensor& p = parameters[i].second;
              (p * torch::randn(shapes[i], options).to(type)).sum().backward();
            }
            optimizer.gather_gradients();
          }
          all.push_back(torch::tensor(optimizer.step().gradient_norm, torch::kDouble));
        }
        model::training::use_kernels(true);
        for (const AdamW::Slot& s : optimizer.slots())
          for (const torch::Tensor& t : {s.parameter, s.master, s.moment1, s.moment2, s.scale1, s.scale2})
            if (t.defined()) all.push_back(t.detach().cpu());
        return all;
      };
      const auto one = run(true), many = run(false);
      ASSERT_EQ(one.size(), many.size());
      for (std::size_t i = 0; i < one.size(); ++i) {
        if (i < 4)
          EXPECT_NEAR(one[i].item<double>() / many[i].item<double>(), 1, 1e-5);
        else
          EXPECT_TRUE(torch::equal(one[i], many[i]))
              << "tensor " << i << (moments == Moments::kInt8 ? " int8 " : " fp32 ") << type << ": "
              << (one[i] != many[i]).sum().item<std::int64_t>() << " of " << one[i].numel() << " differ, at most by "
              << (one[i].to(torch::kDouble) - many[i].to(torch::kDouble)).abs().max().item<double>();
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
