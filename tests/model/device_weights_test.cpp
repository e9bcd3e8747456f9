// Weights on an emulated GPU (tests/delta/cuda_emulation.hpp): exported and applied weights equal the CPU's, bit for
// bit.
#include "model/device_weights.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "delta/digest.hpp"
#include "model/weights.hpp"
#include "tests/model/on_device.hpp"

namespace echoline::model {
namespace {

class DeviceWeightsTest : public ::testing::Test {
 protected:
  DeviceWeightsTest() : model_(*init(*preset("tiny-64"), 2, torch::kCPU, torch::kBFloat16)), device_(model_) {}

  delta::Digest digest() { return export_policy(*model_)->digest(); }
  // Mimics a learner step: changes this share of the weights.
  void train(double share) {
    torch::NoGradGuard no_gradient;
    for (torch::Tensor& weight : model_->parameters())
      weight.add_((torch::rand(weight.sizes()) < share).to(torch::kBFloat16), 0.25);
  }

  std::shared_ptr<Transformer> model_;
  test::OnDevice device_;
};

TEST_F(DeviceWeightsTest, APolicyHoldsTheWeightsThatItWasMadeOf) {
  DeviceWeights weights = device_.attach();
  const delta::SharedState first = weights.policy().value();
  EXPECT_EQ(*delta::digest_state(first->view()), digest());
  const delta::Digest before = digest();
  for (const double share : {0.01, 0.0, 1.0}) {
    train(share);
    const delta::SharedState policy = weights.policy().value();
    EXPECT_EQ(*delta::digest_state(policy->view()), digest()) << share;
  }
  EXPECT_EQ(*delta::digest_state(first->view()), before) << "a holder of an older policy keeps it";
  EXPECT_NE(digest(), before);
}

TEST_F(DeviceWeightsTest, MemoryOfAReleasedPolicyIsReused) {
  std::set<const std::byte*> addresses;
  delta::SharedState published, newest;
  {
    DeviceWeights weights = device_.attach();
    for (int version = 0; version < 6; ++version) {
      train(0.1);
      newest = weights.policy().value();
      addresses.insert(newest->bytes(0).data());
      published = newest;  // releases the policy before
    }
    EXPECT_EQ(addresses.size(), 2u);
  }
  EXPECT_EQ(*delta::digest_state(published->view()), digest()) << "the policy outlives its source";
}

TEST_F(DeviceWeightsTest, WhetherWeightsAreFiniteIsFoundOnTheDevice) {
  const DeviceWeights weights = device_.attach();
  EXPECT_TRUE(weights.all_finite());
  torch::NoGradGuard no_gradient;
  torch::Tensor weight = model_->parameters().back().view(-1);
  for (const double value : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    const torch::Tensor before = weight[-1].clone();
    weight[-1] = value;
    EXPECT_FALSE(weights.all_finite()) << value;
    weight[-1].copy_(before);
    EXPECT_TRUE(weights.all_finite());
  }
}

TEST_F(DeviceWeightsTest, ChangesAreAppliedAndProven) {
  DeviceWeights weights = device_.attach();
  const auto old = *export_policy(*model_);
  train(0.02);
  const auto next = *export_policy(*model_);
  ASSERT_TRUE(load_policy(*model_, old.view()));
  ASSERT_TRUE(weights.on_weights_replaced());
  std::vector<delta::TensorWrite> written;
  std::vector<std::byte> patch;
  ASSERT_TRUE(delta::write_delta(old.view(), next.view(), [&](std::span<const std::byte> bytes) {
    patch.insert(patch.end(), bytes.begin(), bytes.end());
    return ok();
  }));
  ASSERT_TRUE(delta::resolve_delta(patch, old.view(), [&](delta::TensorWrite&& write) {
    written.push_back(std::move(write));
    return ok();
  }));
  const delta::Digest result = *delta::digest_state(next.view());
  EXPECT_EQ(weights.apply(written, delta::Digest{}).error().code, Code::kCorrupt);
  EXPECT_EQ(digest(), *delta::digest_state(old.view())) << "as before";
  ASSERT_TRUE(weights.apply(written, result));
  EXPECT_EQ(digest(), result);
  EXPECT_EQ(weights.apply(written, *delta::digest_state(old.view())).error().code, Code::kCorrupt);
  ASSERT_TRUE(weights.apply({}, result)) << "the recorded memory use is right";
}

TEST_F(DeviceWeightsTest, WithoutPinnedMemoryAPolicyTakesOther) {
  DeviceWeights weights = device_.attach();
  device_.backend().limit_memory(1000);
  EXPECT_EQ(*delta::digest_state(weights.policy().value()->view()), digest());
}

TEST_F(DeviceWeightsTest, AfterAFailureOfTheDeviceAPolicyIsExportedAgain) {
  DeviceWeights weights = device_.attach();
  ASSERT_TRUE(weights.policy());
  train(0.05);
  for (std::uint64_t calls = 0; calls < 6; ++calls) {
    device_.backend().fail_after(calls, 1);
    const auto failed = weights.policy();
    device_.backend().stop_failing();
    ASSERT_FALSE(failed);
    EXPECT_EQ(failed.error().code, Code::kUnavailable);
    EXPECT_EQ(*delta::digest_state(weights.policy().value()->view()), digest()) << calls;
    train(0.05);
  }
}

TEST_F(DeviceWeightsTest, AModelOnTheCpuHasNone) { EXPECT_FALSE(DeviceWeights::of(model_)); }

}  // namespace
}  // namespace echoline::model
