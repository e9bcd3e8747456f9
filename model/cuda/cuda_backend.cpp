// Implements DeviceBackend with CUDA: launches kernels on a stream and records them as CUDA graphs.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/version.h>

#include "model/cuda/backend.hpp"
#include "model/cuda/launch.hpp"
#include "model/transformer.hpp"

namespace echoline::model::cuda {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // clears the error; otherwise, later calls would report it again
  TORCH_CHECK(false, "CUDA: ", cudaGetErrorString(error));
}

class Graph final : public DeviceBackend::Recording {
 public:
  void replay() override { graph.replay(); }
  std::size_t kernels() const override { return launches; }

  at::cuda::CUDAGraph graph;
  std::size_t launches = 0;
};

class CudaBackend final : public DeviceBackend {
 public:
  CudaBackend(const torch::Device& device, const Launcher& launcher)
      : device_(device),
        launcher_(launcher),
        stream_(at::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  unsigned processors() const override { return launcher_.processors; }
  void run(const ReceiveJob& job) override { check(launch(next_launcher(), job)); }
  void run(const EmbedJob& job) override { check(launch(next_launcher(), job)); }
  void run(const NormJob& job) override { check(launch(next_launcher(), job)); }
  void run(const ProductJob& job) override { check(launch(next_launcher(), job)); }
  void run(const GateJob& job) override { check(launch(next_launcher(), job)); }
  void run(const RotateJob& job, unsigned dim) override { check(launch(next_launcher(), job, dim)); }
  void run(const AttendJob& job, unsigned dim) override { check(launch(next_launcher(), job, dim)); }
  void run(const SampleJob& job) override { check(launch(next_launcher(), job)); }
  void multiply(const torch::Tensor& x, const torch::Tensor& weight, const torch::Tensor& bias,
                const torch::Tensor& out) override {
    ++launches_;
    torch::Tensor target = out;
    if (bias.defined()) {
      at::addmm_out(target, bias, x, weight.t());
    } else {
      at::mm_out(target, x, weight.t());
    }
  }

  torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) override {
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
    const auto by_head = [](const torch::Tensor& t) { return t.transpose(1, 2); };
    return at::scaled_dot_product_attention(by_head(q), by_head(k), by_head(v), /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                            /*is_causal=*/true, /*scale=*/1.0, /*enable_gqa=*/true)
        .transpose(1, 2)
        .reshape({q.size(0) * q.size(1), q.size(2) * q.size(3)});
#else
    return attend_causally(q, k, v);
#endif
  }

  std::unique_ptr<Recording> record(const std::function<void()>& work) override {
    const c10::cuda::CUDAGuard guard(device_);
    check(cudaSetDevice(device_.index()));  // also for this program's own, static copy of the CUDA runtime
    at::cuda::getCurrentCUDAStream().synchronize();
    const c10::cuda::CUDAStreamGuard stream_guard(stream_);
    work();  // libraries allocate memory and load kernels here, which they cannot do while recording
    stream_.synchronize();
    auto out = std::make_unique<Graph>();
    launches_ = 0;
    out->graph.capture_begin(/*pool=*/{0, 0}, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      try {
        out->graph.capture_end();
      } catch (const std::exception&) {  // follows from the first failure, which is reported
      }
      throw;
    }
    out->graph.capture_end();
    out->launches = launches_;
    return out;
  }

  void wait() override { at::cuda::getCurrentCUDAStream(device_.index()).synchronize(); }

 private:
  // Counts a launch, and returns a launcher for libtorch's current stream.
  Launcher next_launcher() {
    ++launches_;
    Launcher launcher = launcher_;
    launcher.stream = at::cuda::getCurrentCUDAStream(device_.index());
    return launcher;
  }

  torch::Device device_;
  Launcher launcher_;
  std::size_t launches_ = 0;     // since the last recording began
  at::cuda::CUDAStream stream_;  // for recordings, which CUDA does not allow on the default stream
};

}  // namespace

Result<std::unique_ptr<DeviceBackend>> open_backend(const torch::Device& device) {
  try {
    Launcher launcher;
    const c10::cuda::CUDAGuard guard(device);
    check(make_launcher(device.index(), nullptr, launcher));
    return std::unique_ptr<DeviceBackend>(std::make_unique<CudaBackend>(device, launcher));
  } catch (const c10::Error& e) {
    return fail(Code::kUnavailable, "open decoder", "{}", e.what_without_backtrace());
  }
}

}  // namespace echoline::model::cuda
