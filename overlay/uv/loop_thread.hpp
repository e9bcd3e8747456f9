// libuv's loop on a thread of its own, with work from other threads and one timer. Internal to overlay/uv.
#pragma once
#include <uv.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "base/clock.hpp"
#include "overlay/uv/driver_parts.hpp"
#include "overlay/uv/timer.hpp"

namespace echoline::overlay {

class LoopThread {
 public:
  using Work = PostedWork::Work;
  // Called on the loop thread.
  struct Events {
    std::function<void(TimePoint)> timer;
    // This process was suspended for this long. Messages that came meanwhile are read before `timer` is called.
    std::function<void(Duration)> paused;
    std::function<void()> after_work;  // after each piece of posted work
    std::function<void()> idle;        // all posted work is done
  };

  explicit LoopThread(Events events);
  // Call join() before. Closes the handles that are still open, and runs the loop on the caller's thread until that is
  // done.
  ~LoopThread();
  LoopThread(const LoopThread&) = delete;
  LoopThread& operator=(const LoopThread&) = delete;

  uv_loop_t& loop() { return loop_; }
  TimePoint now() const { return clock_.now(); }
  double unix_origin_s() const;  // wall-clock seconds at TimePoint zero

  void start(Work first);
  bool is_running() const { return thread_.joinable(); }
  // Runs `work` on the loop thread, in order. False if the loop does not run.
  bool post(Work work);
  // Like post(), and waits for the end of `work`. On the loop thread, it runs at once.
  bool post_and_wait(const std::function<void(TimePoint)>& work);
  // Waits until close() has ended the loop. Not from the loop thread.
  void join();

  // The following calls are for the loop thread only. arm() sets the one time of the timer; kNever: none.
  void arm(TimePoint at);
  // Refuses further work, so that the loop ends with its last handle. Returns false, and changes nothing, while posted
  // work waits; call it again after that work.
  bool close();

 private:
  bool is_here() const { return std::this_thread::get_id() == thread_id_.load(); }
  void on_async();
  void on_timer();

  Events events_;
  SystemClock clock_;
  uv_loop_t loop_{};
  Timer timer_;
  PauseDetector pauses_;
  uv_async_t async_{};
  PostedWork posted_;
  std::thread thread_;
  std::atomic<std::thread::id> thread_id_{};
};

}  // namespace echoline::overlay
