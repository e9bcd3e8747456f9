// What libtorch offers on this machine; torch-free for those who only want to know.
#pragma once
#include <optional>
#include <string>

#include "base/units.hpp"

namespace echoline::model {

struct Runtime {
  std::string torch_version;
  std::string kernels;  // of the built-in engine on a CPU: amx, avx512, avx2 or portable
  int threads = 1;
  int cuda_devices = 0;
};

Runtime runtime();

// The whole memory of the device "cuda" or "cuda:N". Nothing for the CPU, for a device that is not there, and in a
// build without CUDA kernels.
std::optional<Bytes> device_memory(const std::string& device);

// For processes that compute in tensors all day: freed memory stays in the process instead of going back to the system
// after every operation, but for the largest blocks (200 MiB). Call once, at start.
void keep_freed_memory();

}  // namespace echoline::model
