// Finds GPUs without a driver's library, and distributes them over servers.
#include "worker/engines/gpus.hpp"

#include <algorithm>
#include <span>
#include <string_view>
#include <system_error>

namespace echoline::worker {
namespace {

constexpr std::string_view kGpuDevicePrefix = "nvidia";  // of device files; a number follows

bool is_gpu_device(std::string_view name) {
  if (!name.starts_with(kGpuDevicePrefix) || name.size() == kGpuDevicePrefix.size()) return false;
  return std::ranges::all_of(name.substr(kGpuDevicePrefix.size()), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

std::vector<std::string> find_gpus(const char* visible, const std::filesystem::path& device_folder) {
  std::vector<std::string> gpus;
  if (visible) {  // the user has chosen the GPUs
    std::string_view rest = visible;
    while (!rest.empty()) {
      const std::size_t comma = std::min(rest.find(','), rest.size());
      std::string_view name = rest.substr(0, comma);
      while (name.starts_with(' ')) name.remove_prefix(1);
      while (name.ends_with(' ')) name.remove_suffix(1);
      if (name.empty() || name.starts_with('-')) break;  // CUDA ignores a wrong entry and all that follow
      gpus.emplace_back(name);
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
    return gpus;
  }
  // Named 0, 1, ... as CUDA does. In a container, the device files may have other numbers, those of the host.
  std::error_code error;
  for (std::filesystem::directory_iterator it(device_folder, error), end; !error && it != end; it.increment(error))
    if (is_gpu_device(it->path().filename().string())) gpus.push_back(std::to_string(gpus.size()));
  return gpus;
}

Result<std::vector<std::string>> distribute_gpus(const std::vector<std::string>& gpus, std::size_t gpus_per_engine,
                                                 std::optional<std::size_t> engines) {
  const std::size_t count = engines.value_or(std::max<std::size_t>(1, gpus.size() / gpus_per_engine));
  // If this program finds no GPU, a single server may still compute on a CPU, or on a device of another vendor.
  const bool may_lack_gpus = count == 1 && gpus.empty();
  if (gpus.size() < count * gpus_per_engine && !may_lack_gpus) {
    const std::string engine_count = count == 1 ? "1 engine" : fmt::format("{} engines", count);
    const std::string_view need = count == 1 ? "needs" : "need";
    const std::string found =
        fmt::format("{}{}", gpus.size(), gpus.empty() ? "" : fmt::format(" ({})", fmt::join(gpus, ",")));
    return fail(Code::kInvalid, "engine",
                "{} with worker.gpus_per_engine {} {} {} GPUs, and this machine has {}: set worker.engines (--engines) "
                "or worker.gpus_per_engine (--gpus-per-engine) to what it has, or name its GPUs in {}",
                engine_count, gpus_per_engine, need, count * gpus_per_engine, found, kVisibleGpusVariable);
  }
  // A single server shares the GPUs with no other one, so it may use all that this process has.
  if (count == 1) return std::vector<std::string>{""};
  std::vector<std::string> gpu_lists;
  for (std::size_t i = 0; i < count; ++i)
    gpu_lists.push_back(
        fmt::format("{}", fmt::join(std::span(gpus).subspan(i * gpus_per_engine, gpus_per_engine), ",")));
  return gpu_lists;
}

}  // namespace echoline::worker
