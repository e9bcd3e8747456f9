// Events of a worker's node, from the node's thread to the agent's. Private to worker/.
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
struct Arrived {
  overlay::Publication publication;
  TimePoint at;
};
struct Message {
  std::string bytes;
};
struct Away {
  std::string reason;
};
struct Disconnected {
  std::string reason;
  bool in_order = false;
};
struct TaskAnswered {};
struct PartsArrived {};

}  // namespace event

using Event = std::variant<event::Joined, event::Arrived, event::Message, event::Away, event::Disconnected,
                           event::TaskAnswered, event::PartsArrived>;

class Inbox {
 public:
  static constexpr std::size_t kEventsMax = 4096;

  // For the node, which this inbox must outlive.
  overlay::WorkerEvents node_events();
  // Any thread. After kEventsMax, generation has hung for minutes: further events are lost, and overflow() says so.
  void post(Event event) {
    if (!events_.try_push(std::move(event))) overflowed_ = true;
  }
  // Any thread. Wakes pop(); lost where the inbox is full, which is awake then.
  void wake() { events_.try_push(event::TaskAnswered{}); }

  // The agent's thread: the oldest event, waiting for at most `wait`.
  std::optional<Event> pop(Duration wait);
  // Bytes of arriving publications since the last call. The node bounds them (overlay::kPartsUnreadMax).
  std::vector<overlay::PublicationPart> take_parts();
  Status overflow() const;
  // A publication waits for pop().
  const std::atomic<bool>& news() const { return news_; }
  void close() { events_.close(); }

 private:
  SystemClock clock_;
  BoundedQueue<Event> events_{kEventsMax};
  std::atomic<bool> overflowed_ = false;
  std::atomic<bool> news_ = false;
  std::mutex mutex_;
  std::vector<overlay::PublicationPart> parts_;  // under mutex_
};

}  // namespace echoline::worker
