// Properties of libtorch on this machine, without libtorch's headers.
#pragma once
#include <optional>
#include <string>

#include "base/units.hpp"

namespace echoline::model {

struct Runtime {
  std::string torch_version;
  std::string kernels;  // kernels of the built-in engine on a CPU: amx, avx512, avx2 or portable
  int threads = 1;      // per operation of libtorch
  int cuda_devices = 0;
};

Runtime runtime();

// Returns the total memory of the device "cuda" or "cuda:N", or nothing for the CPU, for an unknown device, and in a
// build without CUDA kernels.
std::optional<Bytes> device_memory(const std::string& device);
// Whether this libtorch was built with CUDA, with or without a GPU on this machine.
bool has_cuda();

// Makes malloc() keep freed memory in the process, except for blocks of 200 MiB and more, because returning it costs
// time. For long-running processes that compute in tensors. Call once, at the start.
void keep_freed_memory();

}  // namespace echoline::model
