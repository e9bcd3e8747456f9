// A timer of an event loop that keeps to the microsecond. libuv's own timers count whole milliseconds: at 8 Mbit/s,
// every chunk comes up to a kilobyte late to every hop. Internal to overlay/uv.
#pragma once
#include <uv.h>

#include <functional>

#include "base/clock.hpp"

namespace echoline::overlay {

// Used on the loop's thread only, once the loop runs.
class Timer {
 public:
  Timer() = default;
  ~Timer();  // close() must have been called and the loop have run since
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Once. `fire` is called when the time has come, and may arm it again.
  void open(uv_loop_t& loop, std::function<void()> fire);
  // For the one time that is last asked for; kNever: for none. Times of SystemClock.
  void arm(TimePoint at);
  void close();

 private:
  int fd_ = -1;
  uv_poll_t poll_{};
  TimePoint armed_ = kNever;
  std::function<void()> fire_;
};

}  // namespace echoline::overlay
