// The operations of a device that a decoding step uses. The tests implement it on the CPU. Internal to this folder.
#pragma once
#include <functional>
#include <memory>

#include "base/result.hpp"
#include "model/cuda/kernels.hpp"
#include "model/torch.hpp"

namespace echoline::model::cuda {

// Queues work in the order of the calls, after libtorch's work of the current stream. Calls throw c10::Error.
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
  // out = x weight^T + bias, by libtorch; all bf16, bias undefined or [outputs].
  virtual void multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                        const torch::Tensor& out) = 0;

  // Causal attention with the arguments and the result of attend_causally() in model/transformer.hpp.
  virtual torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) = 0;

  class Recording {
   public:
    virtual ~Recording() = default;
    virtual void replay() = 0;
    virtual std::size_t kernels() const = 0;  // number of kernels; a product by libtorch counts as one
  };
  // Records the kernels that `work` queues, for replay by a single call. Also runs `work` once without recording,
  // because libraries may have to allocate memory and load kernels first.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work) = 0;
  // Waits for all queued work.
  virtual void wait() = 0;
};

// kUnavailable: the device is not supported, or this program has no kernels.
Result<std::unique_ptr<DeviceBackend>> open_backend(const torch::Device& device);

}  // namespace echoline::model::cuda
