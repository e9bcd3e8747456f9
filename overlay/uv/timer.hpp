// A timer of an event loop with microsecond resolution. libuv's own timers count whole milliseconds: at 8 Mbit/s, every
// chunk would be up to a kilobyte late at every hop. Internal to overlay/uv.
#pragma once
#include <uv.h>

#include <functional>

#include "base/clock.hpp"

namespace echoline::overlay {

// Once the loop runs, only the loop's thread may use it.
class Timer {
 public:
  Timer() = default;
  ~Timer();  // call close() and run the loop before
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Call once. The timer calls `fire` at its time; `fire` may arm it again.
  void open(uv_loop_t& loop, std::function<void()> fire);
  // Sets the one time at which it fires, by SystemClock; kNever: none. The last call counts.
  void arm(TimePoint at);
  void close();

 private:
  int fd_ = -1;
  uv_poll_t poll_{};
  TimePoint armed_for_ = kNever;
  std::function<void()> fire_;
};

}  // namespace echoline::overlay
