// The roofline of provisioner/engine_rate.hpp, used by throughput profiles.
#include "provisioner/engine_rate.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::provisioner {
namespace {

constexpr double kBytesPerParameter = 2;
constexpr double kMemoryShare = 0.9, kEngineReserveBytes = 2e9;  // vLLM's share; activations and graphs

// Sequences begin at different times, so their responses are half done on average.
double mean_context_tokens(const EngineLoad& load) { return load.prompt_tokens + load.response_tokens / 2; }

}  // namespace

double usual_kv_bytes_per_token(double parameters) { return 131072 * std::sqrt(parameters / 8e9); }

double sequences_in_memory(const GpuData& gpu, const EngineLoad& load) {
  const double free_bytes =
      kMemoryShare * gpu.memory_bytes - kBytesPerParameter * load.parameters - kEngineReserveBytes;
  const double bytes_per_sequence = load.kv_bytes_per_token * mean_context_tokens(load);
  return std::max(1.0, std::min(load.sequences_max, free_bytes / bytes_per_sequence));
}

double engine_tokens_per_s(const GpuData& gpu, const EngineLoad& load, const EngineShares& shares) {
  const double sequences = sequences_in_memory(gpu, load);
  const double bytes =
      kBytesPerParameter * load.parameters + sequences * load.kv_bytes_per_token * mean_context_tokens(load);
  const double prompt_tokens_per_step = sequences / load.response_tokens * load.prompt_tokens;
  const double operations = 2 * load.parameters * (sequences + prompt_tokens_per_step);
  return sequences / (bytes / (shares.bandwidth * gpu.bytes_per_s) + operations / (shares.compute * gpu.flops) +
                      seconds(shares.step_overhead));
}

}  // namespace echoline::provisioner
