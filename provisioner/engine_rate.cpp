// The roofline of provisioner/engine_rate.hpp, used by throughput profiles.
#include "provisioner/engine_rate.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::provisioner {
namespace {

constexpr double kBytesPerParameter = 2;     // bf16
constexpr double kMemoryShare = 0.9;         // vLLM's default
constexpr double kEngineReserveBytes = 2e9;  // activations, CUDA graphs
constexpr double kOperationsPerWeight = 2;   // a multiplication and an addition

// Sequences begin at different times, so their responses are half done on average.
double mean_context_tokens(const EngineLoad& load) { return load.prompt_tokens + load.response_tokens / 2; }

}  // namespace

double usual_kv_bytes_per_token(double parameters) { return 131072 * std::sqrt(parameters / 8e9); }

double sequences_in_memory(const GpuData& gpu, const EngineLoad& load) {
  const double free_bytes =
      kMemoryShare * gpu.memory_bytes - kBytesPerParameter * load.parameters - kEngineReserveBytes;
  const double bytes_per_sequence = load.kv_bytes_per_token * mean_context_tokens(load);
  const double sequences_that_fit = free_bytes / bytes_per_sequence;
  return std::max(1.0, std::min(load.sequences_max, sequences_that_fit));
}

double engine_tokens_per_s(const GpuData& gpu, const EngineLoad& load, const EngineShares& shares) {
  const double sequences = sequences_in_memory(gpu, load);
  const double bytes_read =
      kBytesPerParameter * load.parameters + sequences * load.kv_bytes_per_token * mean_context_tokens(load);
  const double prompt_tokens_per_step = sequences / load.response_tokens * load.prompt_tokens;
  const double operations = kOperationsPerWeight * load.parameters * (sequences + prompt_tokens_per_step);
  const double step_s = bytes_read / (shares.bandwidth * gpu.bytes_per_s) + operations / (shares.compute * gpu.flops) +
                        seconds(shares.step_overhead);
  return sequences / step_s;  // one token of each sequence
}

}  // namespace echoline::provisioner
