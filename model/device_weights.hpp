// Copies weights between a Transformer in GPU memory and policies in host memory. A trainer's whole policy is copied to
// the host; of a generator's next policy, only the changes are copied to the device (delta/cuda).
#pragma once
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "delta/cuda/device.hpp"
#include "delta/patch.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// Use from the model's thread. Errors as those of delta::cuda::Device: kUnavailable if the device fails.
class DeviceWeights {
 public:
  // Attaches to a model on a CUDA device with bf16 weights, in a build with the kernels. Otherwise returns nothing, and
  // libtorch must copy the weights. `threads`: number of host threads that check and copy changes; 0: one per
  // processor.
  static std::optional<DeviceWeights> of(std::shared_ptr<Transformer> model, unsigned threads = 0);
  // As of(), on a device that is already open and holds the model's weights, in bf16.
  static Result<DeviceWeights> attach(std::shared_ptr<Transformer> model, delta::cuda::Device device);

  // For trainers: a copy of the weights as a policy, in pinned memory that is reused after the policy is released. All
  // weights are copied, because a training step changes so many that writing only the changes would take longer.
  Result<delta::SharedState> policy();
  // Whether all weights are finite, computed on the device. Also false if only their squares are too large.
  bool all_finite() const;

  // For generators: applies the changes `written` (from delta::IncomingDelta) to the weights and verifies that the
  // result has the expected digest. After an error the weights are unchanged, unless the device has failed.
  Status apply(std::span<const delta::TensorWrite> written, const delta::Digest& expected_digest);
  // Must be called after other code has written all weights. Also ends the failed state after an incomplete apply().
  Status on_weights_replaced();

 private:
  // Memory of released policies, for the next ones. Any thread may release a policy.
  struct ReleasedPolicies {
    static constexpr std::size_t kPoliciesMax = 2;  // because one is published while the next is made
    std::mutex mutex;
    std::vector<delta::OwnedState> policies;
  };

  DeviceWeights(std::shared_ptr<Transformer> model, delta::cuda::Device device, delta::cuda::DeviceState weights)
      : model_(std::move(model)), device_(std::move(device)), weights_(std::move(weights)) {}

  std::shared_ptr<Transformer> model_;
  delta::cuda::Device device_;
  delta::cuda::DeviceState weights_;  // refers to the model's memory
  std::shared_ptr<ReleasedPolicies> released_ = std::make_shared<ReleasedPolicies>();
};

}  // namespace echoline::model
