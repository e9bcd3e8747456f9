// Calls of the trainer API that come over a node, from ranks on another machine than the learner's. Both ends of the
// connection: NodeCalls at the learner, LearnerCalls at the node. A call's body travels in parts. After a broken
// connection it continues where it ended. The learner executes each call once, by its request id. Private to learner/.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "learner/external/arriving_body.hpp"
#include "overlay/slice.hpp"

namespace echoline::learner {

namespace node {  // node.proto
class Begin;
class FromNode;
class Part;
class ToNode;
}  // namespace node

inline constexpr std::size_t kNodePartBytes = 1 << 20;
inline constexpr std::size_t kNodeMessageBytesMax = kNodePartBytes + 4096;

// A call of a rank, with the answer that TrainerServer gives to it.
struct TrainerCall {
  std::string method, path;
  std::string request_id;  // Idempotency-Key
  overlay::Slice body;
};
struct TrainerAnswer {
  int status = 200;  // of HTTP
  std::string body;  // JSON
};
TrainerAnswer error_answer(int status, std::string_view code, const std::string& message);

// The learner's end. Thread-safe; on_message() never blocks.
class NodeCalls {
 public:
  static constexpr std::size_t kNodesMax = 64;
  static constexpr std::size_t kCallsMax = 64;  // of one node, answered ones included
  using Send = std::function<void(WorkerId node, std::string message)>;
  using Execute = std::function<TrainerAnswer(TrainerCall call)>;

  explicit NodeCalls(Send send) : send_(std::move(send)) {}
  ~NodeCalls() { close(); }

  // From now on, executes complete calls on a thread of its own, one after another. Bodies may have up to `body_max`
  // bytes; all that are arriving or waiting have at most twice that. Large ones are in files below `folder`.
  void open(Execute execute, Bytes body_max, const std::filesystem::path& folder = {});
  // The run has no trainer whose ranks could call: nodes end with this reason.
  void refuse(std::string reason);
  // Waits for the call that is being executed. No other call is executed.
  void close();

  void on_message(WorkerId node, std::string_view bytes);
  void on_lost(WorkerId node);  // the node does not come back: forgets its calls

  std::uint64_t bytes_held() const;  // of bodies that are arriving or waiting

 private:
  enum class State : std::uint8_t { kArriving, kWaiting, kAnswered };
  struct Call {
    TrainerCall call;              // without the body before that has arrived
    std::uint64_t body_bytes = 0;  // of the whole body
    ArrivingBody body;
    State state = State::kArriving;
    TrainerAnswer answer = {};
  };
  struct Node {
    std::optional<std::uint64_t> session;
    std::map<std::uint64_t, Call> calls;
  };
  void send_terms(WorkerId id);
  void begin(WorkerId id, const node::Begin& begin);
  void add_part(WorkerId id, const node::Part& part);
  void answer(WorkerId id, std::uint64_t call_id, const TrainerAnswer& answer);
  void report_received(WorkerId id, std::uint64_t call_id, std::uint64_t bytes);
  void on_arrived(WorkerId id, std::uint64_t call_id);
  void forget(Call& call);
  void send(WorkerId id, const node::ToNode& message);
  void execute_calls();

  const Send send_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  // Guarded by mutex_:
  Execute execute_;  // empty before open()
  std::string refusal_;
  Bytes body_max_{0};
  std::filesystem::path folder_;  // of bodies
  std::uint64_t bytes_held_ = 0;  // announced bytes of calls that are not answered
  std::map<WorkerId, Node> nodes_;
  std::deque<std::pair<WorkerId, std::uint64_t>> waiting_;  // complete calls
  bool closed_ = false;
};

// The node's end. Thread-safe.
class LearnerCalls {
 public:
  // Part bytes of one call that the learner has not confirmed yet.
  static constexpr std::uint64_t kWindowBytes = 4 * kNodePartBytes;
  using Send = std::function<void(std::string message)>;

  // `patience`: a call fails with 503 if the learner is out of reach for longer.
  LearnerCalls(const Clock& clock, Send send, Duration patience);

  // Sends the call to the learner and waits for the answer. Several threads may call it.
  TrainerAnswer execute(TrainerCall call);

  // Events of the overlay.
  void on_joined();
  void on_away();
  void on_message(std::string_view bytes);
  // Calls fail with this reason from now on.
  void end(const std::string& reason);

  // The greatest body; absent until the learner has accepted this node.
  std::optional<Bytes> body_max() const;
  // The learner's reason for refusing the node.
  std::optional<std::string> refusal() const;

 private:
  struct Pending {
    const TrainerCall* call = nullptr;  // belongs to execute()
    std::uint64_t sent = 0, confirmed = 0;
    bool accepted = false;  // the learner has said on this connection how much it has
    std::optional<TrainerAnswer> answer = {};
  };
  void begin(std::uint64_t id, const Pending& pending);
  void send_parts(std::uint64_t id, Pending& pending);
  void send(const node::FromNode& message) const;

  const Clock& clock_;
  const Send send_;
  const Duration patience_;
  const std::uint64_t session_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::uint64_t next_call_ = 1;
  std::map<std::uint64_t, Pending> pending_;
  std::optional<Bytes> body_max_;
  std::optional<std::string> refusal_, ended_;
  bool accepted_ = false;   // the learner has sent its terms on this connection
  TimePoint away_since_{};  // while not accepted_
};

}  // namespace echoline::learner
