// What generates on a worker. The agent feeds it sequences, takes what came of them and installs policies in between;
// it knows no tensor. The engines are in worker/engines/.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "model/tokenizer.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// One response to be drawn.
struct Sequence {
  std::uint64_t id = 0;  // the caller's, unique among those inside
  std::vector<model::Token> prompt;
  std::int64_t tokens_max = 0;  // of the response, the ending token included
  std::uint64_t seed = 0;  // where the engine draws by itself, the same prompt, policy and seed give the same response
};

// Tokens up to `end`, from where the span before ended, were drawn under `version`.
struct Span {
  Version version;
  std::size_t end = 0;
};

struct Response {
  std::vector<model::Token> tokens;  // without the prompt; the ending token is the last
  std::vector<float> logprobs;       // nats, of each token as it was drawn: see model::Generation
  std::vector<Span> spans;           // versions grow
  bool ended = false;                // by itself, not by tokens_max
};

// What came of a sequence. kInvalid: it does not fit the model; kExhausted: not even alone into memory; anything else:
// the engine failed at it.
struct Outcome {
  std::uint64_t id = 0;
  Result<Response> response;
  bool of_policy = false;  // it failed because log-probabilities under the installed policy are not finite
};

// What an engine needs of the worker.
struct EngineHost {
  const std::atomic<bool>* stop = nullptr;  // ends every wait
  std::function<void()> waiting;            // called several times a second while it waits for others
  const std::atomic<bool>* news = nullptr;  // a new policy is there: poll() comes back after the token it is at
};

// One thread. What goes wrong with a sequence is its outcome and hurts no other one.
class Engine {
 public:
  virtual ~Engine() = default;

  // Sequences that may be inside at once, as memory has allowed so far.
  virtual std::size_t capacity() const = 0;
  // Submitted, and neither returned nor aborted.
  virtual std::size_t inside() const = 0;
  // Those of equal prompts that are submitted together share the reading of it.
  virtual void submit(Sequence sequence) = 0;
  // Works, or waits for whoever does, until something has come of a sequence, about `time` is over or there is news;
  // nothing inside: at once.
  virtual std::vector<Outcome> poll(Duration time) = 0;
  virtual void abort(std::uint64_t id) = 0;  // nothing comes of it
  // Grows with every token and other step of work, so that others see that it gets on.
  virtual std::uint64_t progress() const = 0;

  // Bytes of what will be installed if the rest of it comes, a delta or a snapshot. An engine may begin with it, so
  // that install() has little left to do; what is under way is not touched. Parts may be missing; install() is given
  // the whole publication.
  virtual void arriving(const overlay::PublicationPart&) {}
  // A snapshot, or a delta on top of the installed version; the digest of the result is the one the publication names.
  // What is inside goes on under the new policy. kStale: the delta needs another base; kCorrupt: bytes or digest are
  // wrong; kInvalid: it does not fit the model. On failure the installed policy stays as it is. One that is not to be
  // activated may be taken note of only, so that others can build on it.
  virtual Status install(const overlay::Publication& publication) = 0;
  virtual std::optional<Version> version() const = 0;
  virtual const overlay::Digest& digest() const = 0;
  // False while it cannot be asked for responses, and it is not known when it can be.
  virtual bool takes_work() const { return true; }
  // An error: it is broken for good, and nothing more comes of it.
  virtual Status state() const { return ok(); }
};

struct Task;
using EngineMaker = std::function<Result<std::unique_ptr<Engine>>(const Task&, const EngineHost&)>;

}  // namespace echoline::worker
