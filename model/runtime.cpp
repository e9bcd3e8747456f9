// Implements the properties of libtorch on this machine.
#include "model/runtime.hpp"

#include <malloc.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include "model/cuda/training_device.hpp"
#include "model/kernels.hpp"
#include "model/torch.hpp"
#include "model/transformer.hpp"

namespace echoline::model {

Runtime runtime() {
  Runtime result;
  result.torch_version = TORCH_VERSION;
  result.kernels = kernels().name;
  result.threads = at::get_num_threads();
  result.cuda_devices = static_cast<int>(torch::cuda::device_count());
  return result;
}

std::optional<Bytes> device_memory(const std::string& device) {
  const auto torch_device = device_named(device);
  if (!torch_device || !torch_device->is_cuda()) return std::nullopt;
  const std::optional<std::uint64_t> bytes = training::total_memory_of(torch_device->index());
  return bytes ? std::optional(Bytes{*bytes}) : std::nullopt;
}

bool has_cuda() { return at::Context::hasCUDART(); }

void keep_freed_memory() {
  // A step allocates a few large blocks, of the size of an embedding. If they were in the heap, smaller blocks would
  // fill their places before the next step, and the heap would grow. So each large block has a mapping of its own,
  // which is unmapped when the block is freed.
  constexpr int kLargeBlockBytes = 200 << 20, kFreeHeapBytesMax = 1 << 30;
  ::mallopt(M_MMAP_THRESHOLD, kLargeBlockBytes);
  ::mallopt(M_TRIM_THRESHOLD, kFreeHeapBytesMax);
}

}  // namespace echoline::model
