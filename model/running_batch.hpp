// Sequences that enter and leave a running batch: one token for every running row at a time, over a paged cache of keys
// and values. Without libtorch in the header.
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
  // Optional; asked after every token unless that ends the sequence anyway: true ends it (a stop string).
  std::function<bool(std::span<const Token> response)> ends = {};
};

// The tokens from the previous span's `end` (or the beginning) up to `end` were drawn under `version`.
struct Span {
  std::uint64_t version = 0;
  std::size_t end = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

struct Ended {
  std::uint64_t id = 0;
  Result<Generation> generation;
  std::vector<Span> spans;
};

struct BatchLimits {
  std::int64_t rows_max = 64;
  Bytes cache_max{std::uint64_t{4} << 30};  // keys and values; taken as they are needed, kept from then on
  std::int64_t prefill_tokens_max = 8192;   // read in one pass, padding included; a longer prompt is read alone
  bool recorded = true;  // on a GPU, steps are recorded kernels (model/cuda/decoder); false: libtorch's operations
};

// What fails, fails alone: a sequence ends with
//   kCorrupt    logits that are not finite,
//   kExhausted  no memory, or no room in cache_max, even with nothing beside it,
//   kInternal   anything else that libtorch throws in a pass (all that were in it), or what `ends` throws.
// Where memory does not suffice for all running rows, the youngest go back into the queue and are read again later,
// with the tokens they have. One thread.
class RunningBatch {
 public:
  // The model must not be used by others during step().
  RunningBatch(std::shared_ptr<Transformer> model, BatchLimits limits);
  RunningBatch(RunningBatch&&) noexcept;
  RunningBatch& operator=(RunningBatch&&) noexcept;
  ~RunningBatch();

  // Queues it behind the others. kInvalid: as check_request(), or an id that is in the batch.
  Status add(Sequence sequence);
  // Draws one token for every running row, lets waiting ones in as far as rows and memory allow, and draws their first.
  std::vector<Ended> step();
  // Drops a sequence; false: it is not there.
  bool abort(std::uint64_t id);
  // Ends all with the tokens they have (kInterrupted), in the order they came in.
  std::vector<Ended> interrupt();
  // Tokens drawn from now on carry this version (until then 0). Call it whenever the weights have changed: keys and
  // values of tokens that were read stay as they are, but no prompt that comes in later shares them.
  void weights_are(std::uint64_t version);

  std::size_t running() const;
  std::size_t waiting() const;
  std::size_t rows_max() const;  // as memory has allowed so far
  Bytes cache_used() const;      // by keys and values of the running rows
  std::size_t kernels() const;   // of the last step of a recorded batch, reading aside; otherwise 0

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echoline::model
