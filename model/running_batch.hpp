// A running batch: sequences join and leave it between passes, and each pass samples one token per running sequence
// (row). Keys and values are in a paged cache. A sequence that joins is prefilled: one pass stores those of all its
// tokens. This header does not need libtorch.
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
  // Optional; called after every token that does not end the sequence by itself. Returns true to end it, as for a stop
  // string.
  std::function<bool(std::span<const Token> response)> ends = {};
};

// The tokens from the previous span's `end` (or the beginning) up to `end` were sampled under `version`.
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
  Bytes cache_max{std::uint64_t{4} << 30};  // keys and values; allocated as needed and kept
  std::int64_t prefill_tokens_max = 8192;   // in one pass, padding included; a longer prompt has a pass of its own
  bool use_cuda_decoder = true;             // on a GPU: decodes by model/cuda/decoder; false: by libtorch's operations
};

// Errors are per sequence:
// kCorrupt: logits that are not finite.
// kExhausted: no memory, or no room in cache_max, even as the only row.
// kInternal: another exception of libtorch in a pass (for all sequences in it), or of `ends`.
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
  // Drops a sequence; false if it does not exist.
  bool abort(std::uint64_t id);
  // Ends all sequences with their tokens so far (kInterrupted), in order of arrival.
  std::vector<Ended> interrupt();
  // Sets the version that spans of later tokens name (0 until the first call). Call it after each change of the
  // weights: stored keys and values stay, but later prompts do not share them.
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
