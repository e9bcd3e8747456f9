// Implements DeviceWeights over delta::cuda::Device.
#include "model/device_weights.hpp"

#include <torch/cuda.h>

#include <utility>

#include "base/log.hpp"
#include "model/policy.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

// Waits for libtorch's kernels, because they run in other streams than delta::cuda::Device's.
void wait_for(const Transformer& model) {
  if (model.device().is_cuda()) torch::cuda::synchronize(model.device().index());
}

// A policy whose tensors are views of the model's own weights.
Result<delta::StateView> view_of(const Transformer& model) {
  ECHO_ASSIGN(delta::StateView view, policy_layout(model.config()));
  const auto parameters = model.named_parameters();
  for (delta::TensorView& tensor : view) {
    const torch::Tensor* weight = parameters.find(tensor.name);
    ECHO_CHECK(weight != nullptr && weight->sizes() == tensor.shape, "{} differs from the policy's layout",
               tensor.name);
    if (weight->scalar_type() != torch::kBFloat16 || !weight->is_contiguous())
      return fail(Code::kInvalid, "attach to weights", "'{}' is not in bf16, or not contiguous", tensor.name);
    tensor.bytes = {static_cast<const std::byte*>(weight->data_ptr()), weight->nbytes()};
  }
  return view;
}

}  // namespace

std::optional<DeviceWeights> DeviceWeights::of(std::shared_ptr<Transformer> model, unsigned threads) {
  if (!model->device().is_cuda() || model->dtype() != torch::kBFloat16) return std::nullopt;
  delta::cuda::DeviceOptions options;
  options.ordinal = model->device().index();
  options.threads = threads;
  const auto open_and_attach = [&]() -> Result<DeviceWeights> {
    ECHO_ASSIGN(delta::cuda::Device device, delta::cuda::Device::open(options));
    return attach(std::move(model), std::move(device));
  };
  Result<DeviceWeights> weights = open_and_attach();
  if (weights) return std::move(*weights);
  log::info("weights are copied between the GPU and the host as a whole: {}", weights.error().message());
  return std::nullopt;
}

Result<DeviceWeights> DeviceWeights::attach(std::shared_ptr<Transformer> model, delta::cuda::Device device) {
  ECHO_ASSIGN(const delta::StateView view, view_of(*model));
  ECHO_ASSIGN(delta::cuda::DeviceState weights, device.attach(view));
  return DeviceWeights(std::move(model), std::move(device), std::move(weights));
}

Status DeviceWeights::on_weights_replaced() {
  wait_for(*model_);
  ECHO_ASSIGN(const delta::StateView view, view_of(*model_));
  ECHO_ASSIGN(weights_, device_.attach(view));
  return ok();
}

Result<delta::SharedState> DeviceWeights::policy() {
  wait_for(*model_);
  std::optional<delta::OwnedState> memory;
  {
    const std::lock_guard lock(released_->mutex);
    if (!released_->policies.empty()) {
      memory = std::move(released_->policies.back());
      released_->policies.pop_back();
    }
  }
  if (!memory) {
    ECHO_ASSIGN(memory, device_.pinned_like(weights_.layout()));
  }
  ECHO_TRY(device_.download(weights_, *memory));
  const auto keep_or_free = [released = released_](delta::OwnedState* policy) {
    const std::unique_ptr<delta::OwnedState> owner(policy);
    const std::lock_guard lock(released->mutex);
    if (released->policies.size() < ReleasedPolicies::kPoliciesMax) released->policies.push_back(std::move(*policy));
  };
  return delta::SharedState(
      std::shared_ptr<delta::OwnedState>(new delta::OwnedState(*std::move(memory)), keep_or_free));
}

bool DeviceWeights::all_finite() const {
  torch::NoGradGuard no_gradient;
  // A single infinite value or NaN makes the norm of its tensor infinite or NaN.
  return torch::stack(torch::_foreach_norm(model_->parameters())).isfinite().all().item<bool>();
}

Status DeviceWeights::apply(std::span<const delta::TensorWrite> written, const delta::Digest& expected_digest) {
  wait_for(*model_);
  ECHO_TRY(device_.apply(written, expected_digest, weights_));
  return ok();
}

}  // namespace echoline::model
