// The engine that comes with echoline: the Qwen3-family transformer of model/, one running batch.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "model/config.hpp"
#include "model/generation.hpp"
#include "worker/engine.hpp"

namespace echoline::worker {

struct BuiltinOptions {
  model::ModelConfig model;
  model::Sampling sampling;  // of every sequence, but for its seed and tokens_max
  std::function<bool(std::span<const model::Token> response)>
      ends;                                 // whether its last token ends it; empty: ending tokens alone
  std::string device = "cpu";               // where it computes: cpu, cuda, cuda:N
  int threads = 1;                          // of libtorch, and that decode policies
  std::size_t rows_max = 256;               // sequences at once
  Bytes cache_max{std::uint64_t{4} << 30};  // their keys and values
  const std::atomic<bool>* news = nullptr;  // as EngineHost's
};

// Draws by itself, in the thread that calls poll(). kExhausted: the weights do not fit into memory; kUnavailable:
// libtorch sees no such device.
Result<std::unique_ptr<Engine>> make_builtin_engine(const BuiltinOptions& options);

}  // namespace echoline::worker
