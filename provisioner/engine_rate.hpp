// The rate of an inference engine, computed from the data sheet of its GPU. A step of decoding reads the weights, keys
// and values once, and multiplies with every weight once for each sequence. The times of both are added.
#pragma once
#include "base/units.hpp"

namespace echoline::provisioner {

// The data sheet of one GPU, or the sum for several that compute as one engine.
struct GpuData {
  double memory_bytes = 0;
  double bytes_per_s = 0;  // of its memory
  double flops = 0;        // multiplications and additions a second, of dense bf16 matrices with sums in fp32

  GpuData times(int gpus) const { return {memory_bytes * gpus, bytes_per_s * gpus, flops * gpus}; }
};

// The work of one engine, with a policy in bf16.
struct EngineLoad {
  double parameters = 0;
  double kv_bytes_per_token = 0;                  // keys and values of all layers
  double prompt_tokens = 0, response_tokens = 1;  // mean numbers per sequence
  double sequences_max = 1;                       // most sequences that the engine generates at a time
};

// How close an engine comes to the data sheet, fitted to published measurements (configs/profiles/gpus.yaml).
struct EngineShares {
  double bandwidth = 1, compute = 1;  // shares of GpuData::bytes_per_s and flops that it reaches
  Duration step_overhead{};           // further time of a step: launching kernels, sampling
};

// Bytes of keys and values per token, for a model with grouped-query attention of which only the size is known: 128 KiB
// at 8e9 parameters, and in proportion to the square root of their number.
double usual_kv_bytes_per_token(double parameters);

// Number of sequences whose keys and values fit into the memory beside the policy: at least 1, at most
// `sequences_max`. A response is half done on average. A tenth of the memory and 2 GB stay free, as in vLLM.
double sequences_in_memory(const GpuData& gpu, const EngineLoad& load);

// Generated tokens a second of n sequences, in steps of
//   (W + n k (p + r / 2)) / (bandwidth b) + (2 P n + 2 P p n / r) / (compute f) + overhead
// with P parameters, W = 2 P bytes of weights, k bytes of keys and values a token, p and r tokens of prompt and
// response. In each step n / r responses end, so the engine also computes the prompts of n / r new sequences.
double engine_tokens_per_s(const GpuData& gpu, const EngineLoad& load, const EngineShares& shares);

}  // namespace echoline::provisioner
