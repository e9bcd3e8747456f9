// The operations of a device that a decoding step uses. The tests implement them on the CPU. Internal to this folder.
#pragma once
#include <functional>
#include <memory>

#include "base/result.hpp"
#include "model/cuda/kernels.hpp"
#include "model/torch.hpp"

namespace echoline::model::cuda {

// Each call queues work, after that of earlier calls and after libtorch's work on its current stream. Calls throw
// c10::Error if they fail.
class DeviceBackend {
 public:
  virtual ~DeviceBackend() = default;
  virtual unsigned processors() const = 0;  // number of multiprocessors of the device

  virtual void run(const ReceiveJob& job) = 0;
  virtual void run(const EmbedJob& job) = 0;
  virtual void run(const NormJob& job) = 0;
  virtual void run(const ProductJob& job) = 0;
  virtual void run(const GateJob& job) = 0;
  virtual void run(const RotateJob& job, unsigned dim) = 0;
  virtual void run(const AttendJob& job, unsigned dim) = 0;
  virtual void run(const SampleJob& job) = 0;
  // Computes out = x weight^T + bias by libtorch. All tensors are bf16; `bias` is [outputs] or undefined.
  virtual void multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                        const torch::Tensor& out) = 0;

  // Causal attention with the arguments and the result of attend_causally() in model/transformer.hpp.
  virtual torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) = 0;

  // Kernels that can be queued again by one call.
  class Recording {
   public:
    virtual ~Recording() = default;
    virtual void replay() = 0;
    virtual std::size_t kernels() const = 0;  // number of kernels; a product by libtorch counts as one
  };
  // Records the kernels that `work` queues. First runs `work` once without recording, because libraries may have to
  // allocate memory and load kernels.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work) = 0;
  // Waits for all queued work.
  virtual void wait() = 0;
};

// The backend for a CUDA device. kUnavailable if the device is not supported, or this program has no kernels.
Result<std::unique_ptr<DeviceBackend>> open_backend(const torch::Device& device);

}  // namespace echoline::model::cuda
