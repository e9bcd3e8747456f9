// Transfers between the learner's service and a Tinker client: sessions, the client's operations in their order, and
// the answers (futures) that the client fetches later.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "learner/external/tinker_requests.hpp"

namespace echoline::learner::tinker {

// The answer to a request: JSON, or a message of tinker.proto.
struct Answer {
  std::string bytes;
  bool is_protobuf = false;
};

// Answers by the id of their request. Thread-safe. An answer stays until newer ones need its place, because a client
// whose connection broke fetches it again.
class Futures {
 public:
  static constexpr std::size_t kPendingMax = 16'384, kAnswersMax = 16'384;
  static constexpr std::size_t kAnswerBytesMax = 512 << 20;  // of all answers

  enum class State { kUnknown, kPending, kAnswered };
  // Returns false if the request is known already: it was sent again. kExhausted: too many are pending.
  Result<bool> begin(const std::string& id);
  void answer(const std::string& id, Answer answer);
  void fail(const std::string& id, const Error& error);
  // Forgets a pending request that was not accepted.
  void drop(const std::string& id);
  // Waits until the request has an answer, `wait` has passed, or stop() was called.
  State wait(const std::string& id, Duration wait, Answer& answer);
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable answered_;
  // Guarded by mutex_.
  std::map<std::string, std::optional<Answer>> by_id_;
  std::deque<std::string> order_;  // of answers, oldest first
  std::size_t answer_bytes_ = 0;
  bool stopped_ = false;
};

// A model that a client trains. The run has at most one at a time.
struct ClientModel {
  std::string id, session;
  double last_request_unix_s = 0;
};

// The weights of a sampling session.
struct SamplerWeights {
  Version version;
  bool accepts_newer = false;
  std::string path;  // empty: the base model, or a session that was made at once
};

// The next operation in the client's order.
struct DueOperation {
  std::string id;  // of its answer
  std::string model, session;
  Operation operation;
};

struct LinkLimits {
  std::size_t sessions_max = 1024, samplers_max = 16'384, operations_max = 1024;
  Duration session_silence = std::chrono::seconds(60);  // then the session has ended; clients send a sign every 10 s
  Duration session_kept = std::chrono::hours(1);        // a silent session may go on
  Duration model_wait = std::chrono::minutes(3);        // for the end of another client's session
};

// Thread-safe: the service's thread executes operations, the API's threads make all other calls.
class TinkerLink {
 public:
  TinkerLink(const Clock& clock, LinkLimits limits = {}) : clock_(clock), limits_(limits) {}

  Futures& futures() { return futures_; }

  // ---- the API's threads ----

  // kExhausted: too many sessions.
  Result<std::string> create_session();
  // Whether the session exists; a sign of its life.
  bool renew_session(const std::string& session);
  // The session counts as silent until its next sign of life.
  void end_session(const std::string& session);
  // Queues the operation and returns its request's id. An operation that was sent again is queued once. kNotFound: no
  // such model or session. kExhausted: too many wait.
  Result<std::string> submit(Numbered request);
  std::optional<ClientModel> model() const;
  // kNotFound: no such session. kStale: its weights were replaced by newer ones.
  Result<std::string> create_sampler(const SamplingSession& request, const std::string& session_base_model);
  std::optional<SamplerWeights> sampler(const std::string& id) const;

  // ---- the service's thread ----

  // Returns the next operation in order; absent after `wait`.
  std::optional<DueOperation> next_operation(Duration wait);
  // Makes this the run's model. Operations on an earlier one fail.
  void set_model(const std::string& id, const std::string& session);
  // Registers weights for sampling. Both return what the client is told: a path, or the id of a sampling session.
  std::string add_sampler_path(const std::string& model, const std::string& name, Version version);
  std::string add_sampler(const std::string& session, std::uint64_t number, Version version, bool accepts_newer);
  void set_published(Version version);
  bool has_live_session() const;
  // Fails every operation, now and later.
  void stop(const std::string& reason);

 private:
  // These need the lock.
  // Returns the sampling session's id.
  std::string put_sampler(const std::string& session, std::uint64_t number, SamplerWeights weights);
  bool is_alive(const std::string& session) const;
  std::optional<DueOperation> take_due();
  void drop_operations(const std::string& reason);

  const Clock& clock_;
  const LinkLimits limits_;
  Futures futures_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::map<std::string, TimePoint> sessions_;  // the time of their last sign of life
  std::optional<ClientModel> model_;
  std::uint64_t next_number_ = 1;                              // of the model's operations
  std::map<std::uint64_t, Operation> operations_;              // on the model, that wait for their turn
  std::deque<std::pair<TimePoint, DueOperation>> new_models_;  // with the time of the request
  std::map<std::string, SamplerWeights> samplers_;             // by sampling session
  std::map<std::string, Version> sampler_paths_;
  Version published_;
  std::optional<std::string> stopped_;
};

// The ids that the client itself derives, too.
std::string model_id(const std::string& session, std::uint64_t number);
std::string request_id(const std::string& model, std::uint64_t number);

// An error as the client shows it.
Answer error_answer(const Error& error);
Answer json_answer(const nlohmann::json& value);

}  // namespace echoline::learner::tinker
