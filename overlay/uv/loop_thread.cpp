// The event loop's thread: posted work, the timer, and pauses of the process. Used by the driver.
#include "overlay/uv/loop_thread.hpp"

#include <csignal>
#include <future>

#include "base/priority.hpp"

namespace echoline::overlay {

LoopThread::LoopThread(Events events) : events_(std::move(events)) {
  ECHO_CHECK(uv_loop_init(&loop_) == 0, "no event loop");
  timer_.open(loop_, [this] { on_timer(); });
  uv_async_init(&loop_, &async_, [](uv_async_t* handle) { static_cast<LoopThread*>(handle->data)->on_async(); });
  async_.data = this;
}

LoopThread::~LoopThread() {
  ECHO_CHECK(!is_running(), "destroyed while running");
  uv_walk(
      &loop_,
      [](uv_handle_t* handle, void*) {
        if (!uv_is_closing(handle)) uv_close(handle, nullptr);
      },
      nullptr);
  while (uv_run(&loop_, UV_RUN_DEFAULT) != 0) {
  }
  uv_loop_close(&loop_);
}

double LoopThread::unix_origin_s() const { return clock_.unix_seconds() - seconds(clock_.now().time_since_epoch()); }

void LoopThread::start(Work first) {
  posted_.open(std::move(first));
  uv_async_send(&async_);
  thread_ = std::thread([this] {
    thread_id_ = std::this_thread::get_id();
    sigset_t pipe_signal;  // blocked, so that a write to a closed connection fails with an error code
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_signal, nullptr);
    request_short_time_slices();
    uv_run(&loop_, UV_RUN_DEFAULT);
  });
}

bool LoopThread::post(Work work) {
  return posted_.add(std::move(work), [this] { uv_async_send(&async_); });
}

bool LoopThread::post_and_wait(const std::function<void(TimePoint)>& work) {
  if (is_here()) {
    work(now());
    return true;
  }
  std::promise<void> done;
  if (!post([&](TimePoint called_at) {
        work(called_at);
        done.set_value();
      }))
    return false;
  done.get_future().wait();
  return true;
}

void LoopThread::join() {
  ECHO_CHECK(!is_here(), "the loop thread cannot wait for itself");
  thread_.join();
}

void LoopThread::on_async() {
  for (const Work& work : posted_.take()) {
    work(now());
    events_.after_work();
  }
  events_.idle();
}

void LoopThread::on_timer() {
  const TimePoint fired_at = now();
  if (const auto pause = pauses_.take(fired_at)) {
    events_.paused(*pause);
    timer_.arm(fired_at + std::chrono::milliseconds(1));  // the loop reads the sockets before this timer fires
    return;
  }
  events_.timer(fired_at);
}

void LoopThread::arm(TimePoint at) {
  pauses_.arm(at, now());
  timer_.arm(at);
}

bool LoopThread::close() {
  if (!posted_.close()) return false;  // on_async() runs again
  timer_.close();
  if (auto* const async = reinterpret_cast<uv_handle_t*>(&async_); !uv_is_closing(async)) uv_close(async, nullptr);
  return true;
}

}  // namespace echoline::overlay
