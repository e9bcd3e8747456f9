// A learner step of the built-in trainer on a GPU: tokens per second, its kernels, and the same step in transformers.
// Part of train_bench.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "base/result.hpp"

namespace echoline::bench {

// Used by both files of train_bench: ends the program with the message.
[[noreturn]] inline void stop(const std::string& why) {
  fmt::print(stderr, "train_bench: {}\n", why);
  std::exit(1);
}

template <class T>
T must(Result<T> result) {
  if (!result) stop(result.error().message());
  return std::move(result).value();
}
inline void must(const Status& status) {
  if (!status) stop(status.error().message());
}

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

// Prints tables. Ends the program with a message on failure.
void train_on_device(const OnDevice& run, const std::filesystem::path& folder);

}  // namespace echoline::bench
