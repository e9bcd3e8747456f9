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
  Runtime r;
  r.torch_version = TORCH_VERSION;
  r.kernels = kernels().name;
  r.threads = at::get_num_threads();
  r.cuda_devices = static_cast<int>(torch::cuda::device_count());
  return r;
}

std::optional<Bytes> device_memory(const std::string& device) {
  const auto named = device_named(device);
  if (!named || !named->is_cuda()) return std::nullopt;
  const std::optional<std::uint64_t> bytes = training::memory_of(named->index());
  return bytes ? std::optional(Bytes{*bytes}) : std::nullopt;
}

void keep_freed_memory() {
  // Larger blocks (the size of an embedding, a few per step) would leave holes that smaller ones fill before the next
  // large one. So each has its own mapping, which is unmapped.
  ::mallopt(M_MMAP_THRESHOLD, 200 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace echoline::model
