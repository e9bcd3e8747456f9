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
  std::size_t rollouts_at_once = 256;  // most responses generated together
  // Threads of policy decoding and of libtorch; 0: one per processor. Absent: 1 for the built-in engine on a CPU, which
  // several workers may share; otherwise 0.
  std::optional<unsigned> threads;

  // The built-in engine. Empty in a program without libtorch, otherwise make_builtin_engine().
  std::function<Result<std::unique_ptr<Engine>>(const BuiltinOptions&)> builtin;
  std::string device = "cpu";      // cpu, cuda or cuda:N
  std::optional<Bytes> cache_max;  // for keys and values; absent: as much as the engine takes

  // A server as engine: exactly one of the two. `command`: a shell command that starts a server, in which {model} and
  // {port} stand for the policy's folder and the port to listen on. `url`: the address of a running server that reads
  // that folder.
  std::string command, url;
  std::filesystem::path folder;                  // of the policy; empty: a new folder in memory
  Duration patience = std::chrono::minutes(10);  // timeout of its start, of loading a policy, and of an answer
  // Timeout of a call that only pauses or resumes. Behind a live server, a dead engine may keep such a call open for
  // ever.
  Duration control_patience = std::chrono::seconds(30);
  Duration retry_first = std::chrono::milliseconds(250);  // doubles with every attempt
};

// At least 1.
unsigned threads_of(const EngineOptions& options);

// kInvalid: contradictory options.
Result<EngineMaker> engine_maker(EngineOptions options);

}  // namespace echoline::worker
