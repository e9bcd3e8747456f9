// The GPUs of this machine, and their distribution over the inference servers that a worker starts. Private to
// worker/engines/.
#pragma once
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"

namespace echoline::worker {

// The environment variable that limits CUDA to some of the machine's GPUs.
inline constexpr const char* kVisibleGpusVariable = "CUDA_VISIBLE_DEVICES";

// Returns the names of the GPUs, as in CUDA_VISIBLE_DEVICES. `visible`: value of that variable; null if it is not set.
// If it is null, every device file nvidia<number> of `device_folder` counts as a GPU.
std::vector<std::string> find_gpus(const char* visible, const std::filesystem::path& device_folder);

// Returns the value of CUDA_VISIBLE_DEVICES for each server. A single server gets an empty value: it uses all GPUs that
// this process has. `gpus_per_engine`: not 0. `engines`: the number of servers; absent: the number of GPUs /
// `gpus_per_engine`, at least one. kInvalid: there are too few GPUs.
Result<std::vector<std::string>> distribute_gpus(const std::vector<std::string>& gpus, std::size_t gpus_per_engine,
                                                 std::optional<std::size_t> engines);

}  // namespace echoline::worker
