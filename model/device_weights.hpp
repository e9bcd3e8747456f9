// The weights of a Transformer in the memory of a GPU: only what changes crosses to the host or back (delta/cuda).
#pragma once
#include <memory>
#include <optional>
#include <span>

#include "delta/cuda/device.hpp"
#include "delta/patch.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

// One thread, that of the model. Errors are those of delta::cuda::Device: kUnavailable when the device fails.
class DeviceWeights {
 public:
  // Of a model on a CUDA device, with bf16 weights, in a build that has the kernels; nothing otherwise, and weights are
  // copied as a whole then.
  static std::optional<DeviceWeights> of(std::shared_ptr<Transformer> model);
  // `model` has bf16 weights in the memory of `device`.
  static Result<DeviceWeights> attach(std::shared_ptr<Transformer> model, delta::cuda::Device device);

  // For who trains. The weights as a policy, made from the one that was returned last and what has changed since, which
  // is found on the device; the first time, and after a failure, all of them are fetched. Takes the weights' size once
  // more there.
  Result<delta::SharedState> policy();

  // For who generates. Puts `written` (delta::IncomingDelta) into the weights and proves that they are then the policy
  // with the digest `result`; on failure they are as before, or the device has failed.
  Status apply(std::span<const delta::TensorWrite> written, const delta::Digest& result);
  // All weights have been written by somebody else, which also mends what a failure of the device left half done.
  Status loaded();

 private:
  Result<delta::SharedState> whole_policy();
  Result<delta::SharedState> changed_policy();

  DeviceWeights(std::shared_ptr<Transformer> model, delta::cuda::Device device, delta::cuda::DeviceState weights)
      : model_(std::move(model)), device_(std::move(device)), weights_(std::move(weights)) {}

  std::shared_ptr<Transformer> model_;
  delta::cuda::Device device_;
  delta::cuda::DeviceState weights_;                  // the model's own memory
  std::optional<delta::cuda::DeviceState> exported_;  // what `last_` holds, on the device
  delta::SharedState last_;
};

}  // namespace echoline::model
