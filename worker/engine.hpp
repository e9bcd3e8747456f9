// Engine: the interface of the generator on a worker. The agent submits sequences, takes their outcomes, and installs
// policies in between. The interface has no tensors, so that the agent does not need libtorch. The engines are in
// worker/engines/.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/routed_experts.hpp"
#include "model/tokenizer.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// Settings of generation that one sequence has instead of the run's.
struct SequenceSampling {
  double temperature = 1;
  double top_p = 1;
  std::int64_t top_k = 0;                // 0: all tokens
  std::vector<model::Token> end_tokens;  // none: only `ends` and tokens_max end the response
  // Returns whether the last token ends the response; empty: only ending tokens do.
  std::function<bool(std::span<const model::Token> response)> ends;
};

// A request for one response.
struct Sequence {
  std::uint64_t id = 0;  // chosen by the caller, unique among the sequences in progress
  std::vector<model::Token> prompt;
  std::int64_t tokens_max = 0;                    // most tokens of the response, the ending token included
  std::uint64_t seed = 0;                         // built-in engine: equal prompt, policy and seed give equal responses
  std::optional<SequenceSampling> sampling = {};  // absent: the run's settings
};

// Tokens sampled under `version`: from the end of the previous span up to `end`.
struct Span {
  Version version;
  std::size_t end = 0;
};

struct Response {
  std::vector<model::Token> tokens;  // without the prompt; the ending token is the last
  std::vector<float> logprobs;       // nats, of each token when it was sampled: see model::Generation
  std::vector<Span> spans;           // the versions under which the tokens were sampled, in order
  bool ended = false;                // by an ending token or stop string, not by tokens_max
  // The experts that computed the tokens of the prompt and `tokens`, in this order. The last tokens may lack theirs,
  // and all do if the engine does not report experts.
  data_plane::RoutedExperts experts = {};
};

// The result of a sequence. kInvalid: the sequence does not fit the model. kExhausted: even alone, it does not fit into
// memory. Any other error: the engine failed.
struct Outcome {
  std::uint64_t id = 0;
  Result<Response> response;
  // The sequence failed because the policy's log-probabilities are not finite, not because of its prompt.
  bool caused_by_policy = false;
};

// The worker's services for an engine.
struct EngineHost {
  const std::atomic<bool>* stop = nullptr;  // true ends every wait
  std::function<void()> on_wait;            // called several times a second during long waits
  // True while a new policy waits to be installed. poll() then returns after the current token.
  const std::atomic<bool>* policy_waits = nullptr;
};

// Use from one thread. A failure of one sequence is its own outcome and affects no other sequence.
class Engine {
 public:
  virtual ~Engine() = default;

  // The most sequences that the engine computes at once. The engine lowers this number if they do not fit into memory.
  virtual std::size_t capacity() const = 0;
  // Number of sequences in progress: submitted, and neither returned nor aborted.
  virtual std::size_t sequences_in_progress() const = 0;
  // Sequences with equal prompts that are submitted together share the prefill.
  virtual void submit(Sequence sequence) = 0;
  // Generates, or waits for the server, until an outcome is ready, about `time` has passed, or a policy waits
  // (EngineHost::policy_waits). Returns at once if no sequence is in progress.
  virtual std::vector<Outcome> poll(Duration time) = 0;
  virtual void abort(std::uint64_t id) = 0;  // no outcome follows
  // Grows with every token and every other step of work: a sign of progress.
  virtual std::uint64_t progress() const = 0;

  // Receives bytes of a snapshot (a whole policy) or delta (its changes) that is still arriving. The engine may decode
  // them, so that install() takes less time. Parts may be missing: install() gets the whole publication.
  virtual void decode_part(const overlay::PublicationPart&) {}
  // Installs a snapshot, or a delta on the installed version. The digest of the result must match the publication.
  // Sequences in progress continue under the new policy. kStale: the delta needs another base. kCorrupt: bytes or
  // digest are wrong. kInvalid: the policy does not fit the model. After a failure, the engine still has the earlier
  // policy, or version() is absent if a part of that policy was overwritten. If `publication.activate` is false, the
  // engine need not generate with the policy; it suffices to keep it as a base for later deltas.
  virtual Status install(const overlay::Publication& publication) = 0;
  // Version and digest of the installed policy. The version is absent while there is none.
  virtual std::optional<Version> version() const = 0;
  virtual const overlay::Digest& digest() const = 0;
  // False while the engine cannot take sequences, for an unknown time.
  virtual bool can_take_work() const { return true; }
  // Returns an error if the engine is permanently broken.
  virtual Status status() const { return ok(); }
};

struct Task;
using EngineMaker = std::function<Result<std::unique_ptr<Engine>>(const Task&, const EngineHost&)>;

}  // namespace echoline::worker
