// A timerfd in a libuv loop. Used by the driver.
#include "overlay/uv/timer.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/result.hpp"

namespace echoline::overlay {

Timer::~Timer() {
  if (fd_ >= 0) ::close(fd_);
}

void Timer::open(uv_loop_t& loop, std::function<void()> fire) {
  fire_ = std::move(fire);
  fd_ = ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);  // SystemClock uses the same clock
  ECHO_CHECK(fd_ >= 0 && uv_poll_init(&loop, &poll_, fd_) == 0, "no timer: {}", std::strerror(errno));
  poll_.data = this;
  uv_poll_start(&poll_, UV_READABLE, [](uv_poll_t* poll, int, int) {
    Timer& timer = *static_cast<Timer*>(poll->data);
    std::uint64_t expirations = 0;
    if (::read(timer.fd_, &expirations, sizeof expirations) != sizeof expirations) return;  // armed again meanwhile
    timer.armed_for_ = kNever;
    timer.fire_();
  });
}

void Timer::arm(TimePoint at) {
  if (at == armed_for_ || uv_is_closing(reinterpret_cast<uv_handle_t*>(&poll_))) return;
  armed_for_ = at;
  itimerspec when{};  // zero: never
  if (at != kNever) {
    const auto ns = std::max<std::int64_t>(1, std::chrono::nanoseconds(at.time_since_epoch()).count());
    when.it_value = {ns / 1'000'000'000, ns % 1'000'000'000};
  }
  ::timerfd_settime(fd_, TFD_TIMER_ABSTIME, &when, nullptr);
}

void Timer::close() {
  if (auto* const poll = reinterpret_cast<uv_handle_t*>(&poll_); fd_ >= 0 && !uv_is_closing(poll))
    uv_close(poll, nullptr);
}

}  // namespace echoline::overlay
