// A model whose memory counts as that of an emulated device.
#pragma once
#include <memory>
#include <utility>

#include "model/device_weights.hpp"
#include "tests/delta/cuda_emulation.hpp"

namespace echoline::model::test {

class OnDevice {
 public:
  explicit OnDevice(std::shared_ptr<Transformer> model) : model_(std::move(model)) {
    for (const torch::Tensor& weight : model_->parameters()) backend_->adopt(weight.data_ptr(), weight.nbytes());
  }
  DeviceWeights attach() { return DeviceWeights::attach(model_, delta::cuda::Device(backend_, {})).value(); }
  delta::cuda::test::EmulatedBackend& backend() { return *backend_; }

 private:
  std::shared_ptr<Transformer> model_;
  std::shared_ptr<delta::cuda::test::EmulatedBackend> backend_ =
      std::make_shared<delta::cuda::test::EmulatedBackend>(5);
};

}  // namespace echoline::model::test
