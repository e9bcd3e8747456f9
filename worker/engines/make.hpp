// The choice of a worker's engine, and its options.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/units.hpp"
#include "worker/engine.hpp"
#include "worker/engines/builtin.hpp"

namespace echoline::worker {

enum class EngineKind { kBuiltin, kSglang, kVllm };

struct EngineOptions {
  EngineKind kind = EngineKind::kBuiltin;
  std::size_t rollouts_at_once = 256;  // most responses that one engine generates at a time
  // Threads of policy decoding and of libtorch; 0: one per processor. Absent: 1 for the built-in engine on a CPU, which
  // several workers may share; otherwise 0.
  std::optional<unsigned> threads;

  // Makes the built-in engine: make_builtin_engine(), or empty in a program without libtorch.
  std::function<Result<std::unique_ptr<Engine>>(const BuiltinOptions&)> builtin_maker;
  std::string device = "cpu";      // cpu, cuda or cuda:N
  std::optional<Bytes> cache_max;  // memory for keys and values; absent: the default of BuiltinOptions::cache_max

  // For a server as engine, exactly one of `command` and `url` is set. `command`: a shell command that starts a server;
  // in it, {model}, {port} and {gpus} stand for the policy's folder, the port to listen on and gpus_per_engine. `url`:
  // the address of a running server that reads the folder.
  std::string command, url;
  std::size_t gpus_per_engine = 1;     // of a server that this worker starts
  std::optional<std::size_t> engines;  // number of servers to start; absent: GPUs of the machine / gpus_per_engine
  std::string visible_gpus;            // the server's CUDA_VISIBLE_DEVICES; empty: the value of this process
  std::filesystem::path folder;        // for the policy's files; empty: a new folder in memory
  Duration patience = std::chrono::minutes(10);  // timeout of the server's start, of loading a policy, and of an answer
  // Timeout of a call that only pauses or resumes generation. Without a timeout, the call may wait for ever: the server
  // may live on after the process in which it generates has died.
  Duration control_timeout = std::chrono::seconds(30);
  // Delay before a failed attempt to use a server is repeated; doubles with every failure.
  Duration first_retry_delay = std::chrono::milliseconds(250);
};

// The number of threads that the options ask for, at least 1.
unsigned threads_of(const EngineOptions& options);

// Returns a function that makes the chosen engine. kInvalid: contradictory options.
Result<EngineMaker> engine_maker(EngineOptions options);

}  // namespace echoline::worker
