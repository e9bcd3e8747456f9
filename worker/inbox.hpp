// Passes the events of a worker's overlay node from the node's thread to the agent's thread. Private to worker/.
#pragma once
#include <atomic>
#include <mutex>
#include <variant>
#include <vector>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::worker {

namespace event {

struct Joined {
  WorkerId id;
};
struct PolicyArrived {  // its publication is complete
  overlay::Publication publication;
  TimePoint arrived_at;
};
struct Message {  // from the learner
  std::string bytes;
};
struct Away {  // the learner cannot be reached for now
  std::string reason;
};
struct Disconnected {  // the node has left the overlay; `cleanly`: as in Ending::on_disconnected()
  std::string reason;
  bool cleanly = false;
};
struct EnvironmentAnswered {};  // Groups::advance() has answers of the environment
struct PartsArrived {};         // take_parts() has parts of a publication

}  // namespace event

using Event = std::variant<event::Joined, event::PolicyArrived, event::Message, event::Away, event::Disconnected,
                           event::EnvironmentAnswered, event::PartsArrived>;

class Inbox {
 public:
  static constexpr std::size_t kEventsMax = 4096;

  // Callbacks for the node. The inbox must outlive the node.
  overlay::WorkerEvents node_events();
  // On any thread. If kEventsMax events wait already, the event is lost, and check_overflow() returns an error. That
  // happens only if the agent's thread has hung for minutes.
  void post(Event event) {
    if (!events_.try_push(std::move(event))) overflowed_ = true;
  }
  // On any thread: the environment has answered. Does nothing if the inbox is full: pop() returns the other events
  // without a wait, and Groups::advance() takes the answer after them.
  void wake() { events_.try_push(event::EnvironmentAnswered{}); }

  // The functions below are for the agent's thread.
  // Removes and returns the oldest event. Waits for an event for at most `wait`; absent if none has come.
  std::optional<Event> pop(Duration wait);
  // Takes the parts of publications that have arrived since the last call. The node bounds them
  // (overlay::kPartsUnreadMax).
  std::vector<overlay::PublicationPart> take_parts();
  Status check_overflow() const;
  // Whether a complete publication waits for pop(). A reference, because the engine watches the flag while it generates
  // (EngineHost::policy_waits).
  const std::atomic<bool>& policy_waits() const { return policy_waits_; }
  void close() { events_.close(); }

 private:
  SystemClock clock_;
  BoundedQueue<Event> events_{kEventsMax};
  std::atomic<bool> overflowed_ = false;
  std::atomic<bool> policy_waits_ = false;
  std::mutex mutex_;
  std::vector<overlay::PublicationPart> parts_;  // under mutex_
};

}  // namespace echoline::worker
