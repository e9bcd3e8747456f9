// Properties of libtorch on this machine, without libtorch's headers.
#pragma once
#include <optional>
#include <string>

#include "base/units.hpp"

namespace echoline::model {

struct Runtime {
  std::string torch_version;
  std::string kernels;  // kernels of the built-in engine on a CPU: amx, avx512, avx2 or portable
  int threads = 1;
  int cuda_devices = 0;
};

Runtime runtime();

// The total memory of the device "cuda" or "cuda:N". Nothing for the CPU, for an unknown device, and in a build without
// CUDA kernels.
std::optional<Bytes> device_memory(const std::string& device);

// For long-running processes that compute in tensors: freed memory stays in the process, except for the largest blocks
// (200 MiB). Call once, at the start.
void keep_freed_memory();

}  // namespace echoline::model
