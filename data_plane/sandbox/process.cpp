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
constexpr std::int64_t kPollMsMax = 600'000;  // poll() takes an int, so a longer wait is repeated
constexpr std::size_t kReadBlockBytes = 65536;

// Waits until `fd` is ready. False after `deadline`.
bool wait_for(const Fd& fd, short events, TimePoint deadline) {
  for (;;) {
    const auto ms_left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SystemClock().now()).count();
    pollfd entry{.fd = fd.get(), .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(ms_left, 0, kPollMsMax)));
    if (ready > 0) return true;
    if (ms_left <= 0) return false;
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
  const TimePoint deadline = SystemClock().now() + wait;
  const Fd& in = impl_->shared->in;
  while (!bytes.empty()) {
    const ssize_t bytes_sent = ::send(in.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes_sent > 0) {
      bytes.remove_prefix(static_cast<std::size_t>(bytes_sent));
    } else if (errno == EAGAIN) {
      if (!wait_for(in, POLLOUT, deadline))
        return fail(Code::kStale, kOperation, "the program has not read its input within {}", to_text(wait));
    } else if (errno != EINTR) {
      return fail(Code::kUnavailable, kOperation, "the program reads no more input: {}", std::strerror(errno));
    }
  }
  return ok();
}

Result<std::string> Process::read_line(std::size_t bytes_max, Duration wait) {
  const TimePoint deadline = SystemClock().now() + wait;
  const Fd& out = impl_->shared->out;
  std::string& unread = impl_->unread;
  char block[kReadBlockBytes];
  for (std::size_t searched = 0;;) {  // bytes of `unread` that contain no end of a line
    const auto end = unread.find('\n', searched);
    if (std::min(end, unread.size()) > bytes_max)
      return fail(Code::kExhausted, kOperation, "the program wrote a line longer than {} bytes", bytes_max);
    if (end != std::string::npos) {
      std::string line = unread.substr(0, end);
      unread.erase(0, end + 1);
      return line;
    }
    searched = unread.size();
    const ssize_t bytes_read = ::read(out.get(), block, sizeof block);
    if (bytes_read > 0) {
      unread.append(block, static_cast<std::size_t>(bytes_read));
    } else if (bytes_read == 0) {
      return fail(Code::kUnavailable, kOperation, "the program ended or closed its output");
    } else if (errno == EAGAIN) {
      if (!wait_for(out, POLLIN, deadline))
        return fail(Code::kStale, kOperation, "no line came within {}", to_text(wait));
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
    [[maybe_unused]] const auto ignored = ::write(fd->get(), &one, sizeof one);
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
