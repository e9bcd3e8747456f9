#include "data_plane/sandbox/box.hpp"

#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/text.hpp"

namespace echoline::sandbox {
namespace {

constexpr std::string_view kOperation = "sandbox";
// Time between two measurements of resource use, for a program that computes and for an idle one.
constexpr auto kLook = std::chrono::milliseconds(10), kLookIdle = std::chrono::milliseconds(80);
constexpr auto kSetUp = std::chrono::seconds(30);  // from starting bubblewrap to starting the program
constexpr std::size_t kStatusMax = 4096;
constexpr int kReadsPerTurn = 16;
constexpr int kSignalled = 128;  // bubblewrap reports signal n as exit code 128 + n

bool is_readable(const Fd& fd) {
  pollfd one{fd.get(), POLLIN, 0};
  return fd && ::poll(&one, 1, 0) > 0;
}

void kill_by(const Fd& pidfd) {
  if (pidfd) ::syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0);
}

// The number after `"name": ` in bubblewrap's status.
std::optional<int> number_of(std::string_view status, std::string_view name) {
  const std::string key = fmt::format("\"{}\":", name);
  const auto at = status.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  const auto begin = status.find_first_not_of(' ', at + key.size());
  if (begin == std::string_view::npos) return std::nullopt;
  int value = 0;
  const auto parsed = std::from_chars(status.data() + begin, status.data() + status.size(), value);
  if (parsed.ec != std::errc{} || parsed.ptr == status.data() + status.size())
    return std::nullopt;  // may be incomplete
  return value;
}

}  // namespace

std::string_view to_string(Why why) {
  switch (why) {
    case Why::kExit:
      return "exit";
    case Why::kSignal:
      return "signal";
    case Why::kWallTime:
      return "wall time";
    case Why::kCpuTime:
      return "CPU time";
    case Why::kMemory:
      return "memory";
    case Why::kOutput:
      return "output";
    case Why::kStopped:
      return "stopped";
  }
  return "?";
}

std::string End::words() const {
  switch (why) {
    case Why::kExit:
      return fmt::format("exited with status {}", status);
    case Why::kSignal:
      return fmt::format("was killed by signal {}", status);
    case Why::kStopped:
      return "was stopped";
    default:
      return fmt::format("reached its limit of {}", to_string(why));
  }
}

Box::Box(Limits limits, Launched launched, std::optional<ControlGroups::Group> group, const std::string& filter)
    : limits_(limits),
      filter_(filter),
      launched_(std::move(launched)),
      group_(std::move(group)),
      begun_(SystemClock().now()),
      deadline_(begun_ + kSetUp),
      next_look_(deadline_),
      between_looks_(kLook) {}

std::shared_ptr<Shared> Box::share() {
  shared_ = std::make_shared<Shared>();
  shared_->in = std::move(launched_.in);
  shared_->out = std::move(launched_.out);
  shared_->limits = limits_;
  return shared_;
}

TimePoint Box::add_to(std::vector<pollfd>& fds) const {
  const std::size_t before = fds.size();
  for (const Fd* fd : {&launched_.out, &launched_.err, &launched_.status})
    if (*fd) fds.push_back({fd->get(), POLLIN, 0});
  // The end of either process kills the other; then only that one is awaited.
  const bool outer = is_readable(launched_.pidfd);
  if (const Fd& pidfd = outer ? first_ : launched_.pidfd) fds.push_back({pidfd.get(), POLLIN, 0});
  return fds.size() == before ? TimePoint{} : std::min(deadline_, next_look_);
}

void Box::kill(Why why) {
  if (!killed_) killed_ = why;
  kill_by(first_);
  kill_by(launched_.pidfd);
  deadline_ = next_look_ = TimePoint::max();
}

// Once the sandbox's process 1 is known, sets the limits and lets the program start.
void Box::release(pid_t first, TimePoint now) {
  first_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, first, 0)));
  Status limited = first_ ? limit(first, limits_, launched_.as_user)
                          : fail(Code::kIo, kOperation, "pidfd_open: {}", std::strerror(errno));
  // An empty pipe takes this write at once. If its reader is gone, the write fails: SIGPIPE is blocked on this thread.
  if (limited &&
      ::write(launched_.filter.get(), filter_.data(), filter_.size()) != static_cast<ssize_t>(filter_.size()))
    limited = fail(Code::kIo, kOperation, "the system call filter could not be passed to bubblewrap: {}",
                   std::strerror(errno));
  launched_.filter.reset();
  if (!limited) {
    // If bubblewrap has ended, its own error says more.
    if (!is_readable(launched_.pidfd)) error_ = std::move(limited).error();
    kill(Why::kStopped);
    return;
  }
  released_ = true;
  watch_.emplace(first);
  begun_ = now;
  deadline_ = limits_.wall ? now + *limits_.wall : TimePoint::max();
  next_look_ = now + kLook;
}

void Box::read_status(TimePoint now) {
  char block[512];
  while (launched_.status) {
    const ssize_t n = ::read(launched_.status.get(), block, sizeof block);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (n <= 0 || status_.size() > kStatusMax) {
      launched_.status.reset();
      break;
    }
    status_.append(block, static_cast<std::size_t>(n));
  }
  if (released_ || killed_) return;
  if (const auto first = number_of(status_, "child-pid")) release(*first, now);
}

void Box::read_output(Fd& fd, std::string& text, bool keep_end) {
  char block[65536];
  // The number of reads is limited, so that other programs get their turn.
  for (int turn = 0; fd && (ended_ || turn < kReadsPerTurn); ++turn) {
    const ssize_t n = ::read(fd.get(), block, sizeof block);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return fd.reset();
    text.append(block, static_cast<std::size_t>(n));
    if (text.size() <= limits_.output.count) continue;
    if (keep_end) {
      text.erase(0, text.size() - limits_.output.count);
    } else {
      text.resize(limits_.output.count);
      fd.reset();
      kill(Why::kOutput);
    }
  }
}

void Box::look(TimePoint now) {
  if (now < next_look_ || !watch_) return;
  if (const auto usage = watch_->look(limits_.memory)) {
    between_looks_ = usage->cpu > end_.cpu ? Duration(kLook) : std::min<Duration>(between_looks_ * 2, kLookIdle);
    end_.memory = std::max(end_.memory, usage->memory);
    end_.cpu = std::max(end_.cpu, usage->cpu);
    if (usage->memory > limits_.memory) return kill(Why::kMemory);
    if (limits_.cpu && usage->cpu > *limits_.cpu) return kill(Why::kCpuTime);
  }
  next_look_ = now + between_looks_;
}

// All processes have ended, so the pipes hold the rest of the output.
void Box::take_end() {
  ended_ = true;
  read_output(launched_.out, end_.out, false);
  read_output(launched_.err, end_.err, stays());
  ::waitid(P_PID, static_cast<id_t>(launched_.pid), nullptr, WEXITED);
  if (released_) end_.wall = SystemClock().now() - begun_;
  const auto code = number_of(status_, "exit-code");
  if (group_) {
    if (!killed_ && ControlGroups::ran_out_of_memory(*group_)) killed_ = Why::kMemory;
    group_->procs.reset();
    ControlGroups::remove(*group_);
  }
  if (killed_) {
    end_.why = *killed_;
  } else if (!code) {
    error_ = fail(Code::kUnavailable, kOperation, "bubblewrap could not start the program: {}", printable(end_.err));
  } else if (*code > kSignalled && *code <= kSignalled + 64) {
    const bool cpu = *code - kSignalled == SIGXCPU;
    end_.why = cpu ? Why::kCpuTime : Why::kSignal;
    end_.status = cpu ? 0 : *code - kSignalled;
  } else {
    end_.status = *code;
  }
}

bool Box::step(TimePoint now) {
  if (ended_) return false;
  if (shared_) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->stop && !killed_) kill(Why::kStopped);
  }
  read_output(launched_.out, end_.out, false);
  read_output(launched_.err, end_.err, stays());
  read_status(now);
  if (is_readable(launched_.pidfd)) {
    // The outer bubblewrap ended. Killing process 1 makes the kernel end all other processes before it reports its end.
    kill_by(first_);
    deadline_ = next_look_ = TimePoint::max();
    if (first_ && !is_readable(first_)) return false;
    read_status(now);
    take_end();
    return true;
  }
  look(now);
  if (now < deadline_) return false;
  if (released_) {
    kill(Why::kWallTime);
  } else {
    kill(Why::kStopped);
    error_ = fail(Code::kUnavailable, kOperation, "bubblewrap was not ready after {}: {}", to_text(Duration(kSetUp)),
                  printable(end_.err));
  }
  return false;
}

void Box::report() {
  if (done) {
    if (error_)
      done(std::move(*error_));
    else
      done(std::move(end_));
    return;
  }
  if (!shared_) return;
  if (error_) {
    end_.err += error_->message();
    if (end_.why == Why::kExit) end_.status = 127;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->end = std::move(end_);
  }
  shared_->changed.notify_all();
}

}  // namespace echoline::sandbox
