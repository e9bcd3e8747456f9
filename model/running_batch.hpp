// Generates with a running batch: sequences join and leave it between passes, and each pass samples one token per
// running sequence (row). Keys and values are in a paged cache. A sequence that joins is prefilled: one pass stores the
// keys and values of all its tokens. This header does not need libtorch.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/units.hpp"
#include "model/generation.hpp"

namespace echoline::model {

class Transformer;

struct Sequence {
  std::uint64_t id = 0;
  std::vector<Token> prompt;
  Sampling sampling;
  // Optional. Called after every token that does not end the sequence by itself. Returns true to end the sequence, for
  // example at a stop string.
  std::function<bool(std::span<const Token> response)> ends = {};
};

// The tokens from the previous span's `end` (or the beginning) up to `end` were sampled from this version of the
// policy.
struct Span {
  std::uint64_t version = 0;
  std::size_t end = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

// A sequence that has left the batch.
struct Ended {
  std::uint64_t id = 0;
  Result<Generation> generation;
  std::vector<Span> spans;
};

struct BatchLimits {
  std::int64_t rows_max = 64;
  Bytes cache_max{std::uint64_t{4} << 30};  // for keys and values; allocated as needed and kept
  std::int64_t prefill_tokens_max = 8192;   // in one pass, padding included; a longer text has a pass of its own
  bool use_cuda_decoder = true;             // on a GPU, use model/cuda/decoder; false: libtorch's operations
  bool records_experts = false;             // fill in Generation::experts, for a mixture of experts
};

// An error ends a single sequence, unless stated otherwise:
// - kCorrupt: its logits are not finite.
// - kExhausted: memory or cache_max does not suffice for it, even as the only row.
// - kInternal: its function `ends` threw an exception, or libtorch did in a pass; the latter ends all sequences of the
//   pass.
// If memory does not suffice for all running rows, the youngest return to the queue. Later they are prefilled again,
// with the tokens they already have. Use from one thread.
class RunningBatch {
 public:
  // No other user may run the model during step().
  RunningBatch(std::shared_ptr<Transformer> model, BatchLimits limits);
  RunningBatch(RunningBatch&&) noexcept;
  RunningBatch& operator=(RunningBatch&&) noexcept;
  ~RunningBatch();

  // Appends the sequence to the queue. kInvalid: see check_request(), or the id is already in the batch.
  Status add(Sequence sequence);
  // Samples one token for every running row, admits waiting ones within rows_max and memory, and samples their first
  // tokens. Returns the sequences that have ended.
  std::vector<Ended> step();
  // Removes a sequence without a result. False if the batch has none with this id.
  bool abort(std::uint64_t id);
  // Ends all sequences with their tokens so far (kInterrupted), in order of arrival.
  std::vector<Ended> interrupt();
  // Sets the version that the spans of later tokens name (0 until the first call). Must be called after each change of
  // the weights: running rows keep their keys and values, but later prompts do not share them.
  void set_weights_version(std::uint64_t version);

  std::size_t running() const;
  std::size_t waiting() const;
  std::size_t rows_max() const;  // current limit due to memory
  Bytes cache_used() const;      // by keys and values of the running rows
  std::size_t kernels() const;   // kernels of the CUDA decoder's last pass, without prefill; 0 without a CUDA decoder

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echoline::model
