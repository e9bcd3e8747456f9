// The rate of an inference engine, computed from the data sheet of its GPU. A step of decoding reads the weights, keys
// and values once and multiplies every weight once for each sequence: a roofline of memory and arithmetic.
#pragma once
#include "base/units.hpp"

namespace echoline::provisioner {

// The data sheet of one GPU, or the sum for several that compute as one engine.
struct GpuData {
  double memory_bytes = 0;
  double bytes_per_s = 0;  // of its memory
  double flops = 0;        // multiplications and additions a second, dense, in bf16 with sums in fp32

  GpuData times(int gpus) const { return {memory_bytes * gpus, bytes_per_s * gpus, flops * gpus}; }
};

// The work of one engine, with a policy in bf16.
struct EngineLoad {
  double parameters = 0;
  double kv_bytes_per_token = 0;                  // keys and values of all layers
  double prompt_tokens = 0, response_tokens = 1;  // means
  double sequences_max = 1;                       // that the engine generates at a time, if its memory holds them
};

// The part of a data sheet that an engine reaches, fitted to published measurements (configs/profiles/gpus.yaml).
struct EngineShares {
  double bandwidth = 1, compute = 1;  // of the data sheet
  Duration step_overhead{};           // launching, sampling
};

// Keys and values per token of a model of this size with grouped-query attention, for models whose shape is not known:
// 128 KiB at 8e9 parameters, and in proportion to the square root of their number.
double usual_kv_bytes_per_token(double parameters);

// The sequences whose keys and values, half done on average, fit beside the policy: at least 1 and at most
// `sequences_max`. A tenth of the memory and 2 GB stay free, as in vLLM.
double sequences_in_memory(const GpuData& gpu, const EngineLoad& load);

// Generated tokens a second of n sequences, in steps of
//   (W + n k (p + r / 2)) / (bandwidth b) + (2 P n + 2 P p n / r) / (compute f) + overhead
// with W = 2 P bytes of weights, k bytes of keys and values a token, p and r tokens of prompt and response. In each
// step n / r new prompts are read.
double engine_tokens_per_s(const GpuData& gpu, const EngineLoad& load, const EngineShares& shares);

}  // namespace echoline::provisioner
