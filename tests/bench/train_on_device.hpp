// A learner step of the built-in trainer on a GPU: tokens a second, what its kernels are, and the same step in
// transformers. Part of train_bench.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

namespace echoline::bench {

struct OnDevice {
  std::string device = "cuda", preset = "qwen3-0.6b", python = "python3";
  std::int64_t groups = 8, members = 8, prompt = 128, response = 384, microbatch = 8192;
  int steps = 4;
  bool int8_moments = false, recompute = false, reference = false, bf16 = true;
  bool fused = true;      // kernels of model/cuda
  bool kernels = true;    // name them, in a step of its own
  bool baseline = true;   // transformers, in a process of its own
  bool gradients = true;  // their errors against transformers in fp32
};

// Prints tables; ends the program with a message where something fails.
void train_on_device(const OnDevice& run, const std::filesystem::path& folder);

}  // namespace echoline::bench
