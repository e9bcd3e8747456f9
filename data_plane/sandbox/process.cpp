// Implements Process: the holder's side of a long-lived program, used from any thread.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "data_plane/sandbox/sandboxed_program.hpp"

namespace echoline::sandbox {
namespace {

constexpr std::string_view kOperation = "talk to a program";

// Waits until `fd` is ready. False after `until`.
bool wait_for(const Fd& fd, short events, TimePoint until) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SystemClock().now()).count();
    pollfd one{fd.get(), events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 600'000)));
    if (ready > 0) return true;
    if (left <= 0) return false;
  }
}

}  // namespace

Process::Process(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Process::Process(Process&&) noexcept = default;
Process& Process::operator=(Process&& other) noexcept {
  if (this != &other) {
    stop();
    impl_ = std::move(other.impl_);
  }
  return *this;
}
Process::~Process() { stop(); }

Status Process::write(std::string_view bytes, Duration wait) {
  const TimePoint until = SystemClock().now() + wait;
  const Fd& in = impl_->shared->in;
  while (!bytes.empty()) {
    const ssize_t n = ::send(in.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(n));
    } else if (errno == EAGAIN) {
      if (!wait_for(in, POLLOUT, until))
        return fail(Code::kStale, kOperation, "the program has not read its input within {}", to_text(wait));
    } else if (errno != EINTR) {
      return fail(Code::kUnavailable, kOperation, "the program reads no more input: {}", std::strerror(errno));
    }
  }
  return ok();
}

Result<std::string> Process::read_line(std::size_t bytes_max, Duration wait) {
  const TimePoint until = SystemClock().now() + wait;
  const Fd& out = impl_->shared->out;
  std::string& unread = impl_->unread;
  char block[65536];
  for (std::size_t looked = 0;;) {
    const auto end = unread.find('\n', looked);
    if (std::min(end, unread.size()) > bytes_max)
      return fail(Code::kExhausted, kOperation, "the program wrote a line longer than {} bytes", bytes_max);
    if (end != std::string::npos) {
      std::string line = unread.substr(0, end);
      unread.erase(0, end + 1);
      return line;
    }
    looked = unread.size();
    const ssize_t n = ::read(out.get(), block, sizeof block);
    if (n > 0) {
      unread.append(block, static_cast<std::size_t>(n));
    } else if (n == 0) {
      return fail(Code::kUnavailable, kOperation, "the program ended or closed its output");
    } else if (errno == EAGAIN) {
      if (!wait_for(out, POLLIN, until)) return fail(Code::kStale, kOperation, "no line came within {}", to_text(wait));
    } else if (errno != EINTR) {
      return fail(Code::kIo, kOperation, "{}", std::strerror(errno));
    }
  }
}

void Process::Impl::ask_to_stop() {
  {
    const std::lock_guard lock(shared->mutex);
    if (shared->stop || shared->end) return;
    shared->stop = true;
  }
  if (const auto fd = waker.lock()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(fd->get(), &one, sizeof one);
  }
}

void Process::stop() {
  if (impl_) impl_->ask_to_stop();
}

std::optional<End> Process::ended() const {
  const std::lock_guard lock(impl_->shared->mutex);
  return impl_->shared->end;
}

End Process::wait() {
  stop();
  std::unique_lock lock(impl_->shared->mutex);
  impl_->shared->changed.wait(lock, [&] { return impl_->shared->end.has_value(); });
  return *impl_->shared->end;
}

}  // namespace echoline::sandbox
