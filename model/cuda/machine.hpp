// What a decoding step needs of a device. The tests have one that is the CPU. Internal to this folder.
#pragma once
#include <functional>
#include <memory>

#include "base/result.hpp"
#include "model/cuda/kernels.hpp"
#include "model/torch.hpp"

namespace echoline::model::cuda {

// Work is queued in the order of the calls, behind libtorch's of the current stream. Calls throw c10::Error.
class Machine {
 public:
  virtual ~Machine() = default;
  virtual unsigned processors() const = 0;

  virtual void run(const ReceiveJob& job) = 0;
  virtual void run(const EmbedJob& job) = 0;
  virtual void run(const NormJob& job) = 0;
  virtual void run(const ProductJob& job) = 0;
  virtual void run(const GateJob& job) = 0;
  virtual void run(const TurnJob& job, unsigned dim) = 0;
  virtual void run(const AttendJob& job, unsigned dim) = 0;
  virtual void run(const SampleJob& job) = 0;
  // out = x weight^T + bias, by libtorch; all bf16, bias undefined or [outputs].
  virtual void multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                        const torch::Tensor& out) = 0;

  // As attend_causally() of model/transformer.
  virtual torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) = 0;

  class Recording {
   public:
    virtual ~Recording() = default;
    virtual void replay() = 0;
    virtual std::size_t kernels() const = 0;  // a product of libtorch counts as one
  };
  // What `work` queues, to be queued again at the price of one call. The first call of a kind may do it once, too.
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work) = 0;
  // Returns when all that was queued is done.
  virtual void wait() = 0;
};

// kUnavailable: a device that the kernels are not for, or a program without them.
Result<std::unique_ptr<Machine>> open_machine(const torch::Device& device);

}  // namespace echoline::model::cuda
