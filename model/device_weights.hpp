// The weights of a Transformer in the memory of a GPU: policies leave it at the speed of the bus, and of a policy that
// comes only what changes crosses (delta/cuda).
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

// One thread, that of the model. Errors are those of delta::cuda::Device: kUnavailable when the device fails.
class DeviceWeights {
 public:
  // Of a model on a CUDA device, with bf16 weights, in a build that has the kernels; nothing otherwise, and libtorch
  // copies weights then. `threads` of the host check and copy changes; 0: as many as it has.
  static std::optional<DeviceWeights> of(std::shared_ptr<Transformer> model, unsigned threads = 0);
  // `model` has bf16 weights in the memory of `device`.
  static Result<DeviceWeights> attach(std::shared_ptr<Transformer> model, delta::cuda::Device device);

  // For who trains. The weights as a policy, in pinned memory that is used again when the policy is let go: at the
  // densities of training, fetching all of them takes less time than writing what has changed into another policy.
  Result<delta::SharedState> policy();
  // Whether all weights are numbers, found on the device. False also where only their squares are too large.
  bool all_finite() const;

  // For who generates. Puts `written` (delta::IncomingDelta) into the weights and proves that they are then the policy
  // with the digest `result`; on failure they are as before, or the device has failed.
  Status apply(std::span<const delta::TensorWrite> written, const delta::Digest& result);
  // All weights have been written by somebody else, which also mends what a failure of the device left half done.
  Status loaded();

 private:
  // Policies that were let go, by any thread.
  struct Unused {
    static constexpr std::size_t kKept = 2;  // one is published, one is made meanwhile
    std::mutex mutex;
    std::vector<delta::OwnedState> policies;
  };

  DeviceWeights(std::shared_ptr<Transformer> model, delta::cuda::Device device, delta::cuda::DeviceState weights)
      : model_(std::move(model)), device_(std::move(device)), weights_(std::move(weights)) {}

  std::shared_ptr<Transformer> model_;
  delta::cuda::Device device_;
  delta::cuda::DeviceState weights_;  // the model's own memory
  std::shared_ptr<Unused> unused_ = std::make_shared<Unused>();
};

}  // namespace echoline::model
