// The built-in engine: runs the transformer of model/ in this process, for a batch of sequences at a time.
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
  model::Sampling sampling;  // for every sequence, except seed and tokens_max
  // Returns whether the last token ends the response; empty: only ending tokens do.
  std::function<bool(std::span<const model::Token> response)> ends;
  std::string device = "cpu";                       // cpu, cuda or cuda:N
  int threads = 1;                                  // of libtorch and of policy decoding
  std::size_t rows_max = 256;                       // most sequences in the batch
  Bytes cache_max{std::uint64_t{4} << 30};          // memory for the keys and values of the sequences (4 GiB)
  bool records_experts = false;                     // fill in Response::experts, for a mixture of experts
  const std::atomic<bool>* policy_waits = nullptr;  // as in EngineHost
};

// Generates in the thread that calls poll(). kExhausted: the weights do not fit into memory. kUnavailable: libtorch
// does not have this device.
Result<std::unique_ptr<Engine>> make_builtin_engine(const BuiltinOptions& options);

}  // namespace echoline::worker
