// Which engine generates on a worker, and what is to be known of it.
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
  std::size_t rollouts_at_once = 256;  // responses generated together, at most
  // That decode policies, and of libtorch; 0: as many as the machine has. Absent: 1 where the built-in engine computes
  // on a CPU, which several workers may share, otherwise 0.
  std::optional<unsigned> threads;

  // Built in. It is empty in a program without libtorch, otherwise make_builtin_engine().
  std::function<Result<std::unique_ptr<Engine>>(const BuiltinOptions&)> builtin;
  std::string device = "cpu";      // where it computes: cpu, cuda, cuda:N
  std::optional<Bytes> cache_max;  // for keys and values; absent: as many as the engine takes

  // A server of its own. Exactly one of the two: a shell command that starts it, in which {model} and {port} stand for
  // the folder of the policy and the port to listen on, or the address of one that runs already and reads that folder.
  std::string command, url;
  std::filesystem::path folder;                  // of the policy; empty: a new one in memory
  Duration patience = std::chrono::minutes(10);  // with its start, with the loading of a policy, with an answer
  // With a call that only has it stop or go on: one that is dead behind its server may keep it open for ever.
  Duration control_patience = std::chrono::seconds(30);
  Duration retry_first = std::chrono::milliseconds(250);  // doubled from one attempt to the next
};

// At least 1.
unsigned threads_of(const EngineOptions& options);

// kInvalid: options that do not go together.
Result<EngineMaker> engine_maker(EngineOptions options);

}  // namespace echoline::worker
