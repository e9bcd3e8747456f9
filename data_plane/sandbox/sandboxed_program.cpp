// Implements SandboxedProgram, which pool.cpp steps on its thread. Two processes of bubblewrap belong to a program. The
// outer one is this process's child and reports progress on the status pipe. The other is process 1 of the sandbox's
// own process namespace; when it ends, the kernel ends every process in the sandbox.
#include "data_plane/sandbox/sandboxed_program.hpp"

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
// Between two measurements of resource use, for a program that computes and for an idle one.
constexpr auto kUsageInterval = std::chrono::milliseconds(10), kUsageIntervalIdle = std::chrono::milliseconds(80);
constexpr auto kSetUpTimeout = std::chrono::seconds(30);  // from starting bubblewrap to starting the program
constexpr std::size_t kStatusBytesMax = 4096;             // of bubblewrap's reports
constexpr std::size_t kReadBlockBytes = 65536;
constexpr int kReadsPerTurn = 16;  // of one output, in one call of advance()
constexpr int kSignalMax = 64;
constexpr int kNotStarted = 127;      // exit status reported if the program could not be started, as in shells
constexpr int kSignalExitBase = 128;  // bubblewrap reports signal n as exit code 128 + n

bool is_readable(const Fd& fd) {
  pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return fd && ::poll(&entry, 1, 0) > 0;
}

void kill_by(const Fd& pidfd) {
  if (pidfd) ::syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0);
}

// The number after `"name": ` in bubblewrap's status.
std::optional<int> number_in_status(std::string_view status, std::string_view name) {
  const std::string key = fmt::format("\"{}\":", name);
  const auto key_begin = status.find(key);
  if (key_begin == std::string_view::npos) return std::nullopt;
  const auto begin = status.find_first_not_of(' ', key_begin + key.size());
  if (begin == std::string_view::npos) return std::nullopt;
  int value = 0;
  const auto parsed = std::from_chars(status.data() + begin, status.data() + status.size(), value);
  if (parsed.ec != std::errc{} || parsed.ptr == status.data() + status.size())
    return std::nullopt;  // may be incomplete
  return value;
}

}  // namespace

std::string_view to_string(EndReason reason) {
  switch (reason) {
    case EndReason::kExit:
      return "exit";
    case EndReason::kSignal:
      return "signal";
    case EndReason::kWallTime:
      return "wall time";
    case EndReason::kCpuTime:
      return "CPU time";
    case EndReason::kMemory:
      return "memory";
    case EndReason::kOutput:
      return "output";
    case EndReason::kStopped:
      return "stopped";
  }
  return "?";
}

std::string End::description() const {
  switch (reason) {
    case EndReason::kExit:
      return fmt::format("exited with status {}", status);
    case EndReason::kSignal:
      return fmt::format("was killed by signal {}", status);
    case EndReason::kStopped:
      return "was stopped";
    default:
      return fmt::format("reached its limit of {}", to_string(reason));
  }
}

SandboxedProgram::SandboxedProgram(Limits limits, LaunchedProgram launched, std::optional<ControlGroups::Group> group,
                                   const std::string& filter)
    : limits_(limits),
      filter_(filter),
      launched_(std::move(launched)),
      group_(std::move(group)),
      begun_at_(SystemClock().now()),
      deadline_(begun_at_ + kSetUpTimeout),
      next_usage_check_(deadline_),  // not before the program has started
      usage_interval_(kUsageInterval) {}

std::shared_ptr<ProcessState> SandboxedProgram::connect_process() {
  shared_ = std::make_shared<ProcessState>();
  shared_->in = std::move(launched_.in);
  shared_->out = std::move(launched_.out);
  shared_->limits = limits_;
  return shared_;
}

TimePoint SandboxedProgram::prepare_poll(std::vector<pollfd>& fds) const {
  const std::size_t fds_before = fds.size();
  for (const Fd* fd : {&launched_.out, &launched_.err, &launched_.status})
    if (*fd) fds.push_back({.fd = fd->get(), .events = POLLIN, .revents = 0});
  // Waits for the outer process to end; after that, for process 1, which advance() has killed by then.
  const bool outer_ended = is_readable(launched_.pidfd);
  if (const Fd& pidfd = outer_ended ? first_process_ : launched_.pidfd)
    fds.push_back({.fd = pidfd.get(), .events = POLLIN, .revents = 0});
  // Without a descriptor nothing would wake the thread, so advance() is due at once.
  return fds.size() == fds_before ? TimePoint{} : std::min(deadline_, next_usage_check_);
}

void SandboxedProgram::kill(EndReason reason) {
  if (!kill_reason_) kill_reason_ = reason;
  kill_by(first_process_);
  kill_by(launched_.pidfd);
  deadline_ = next_usage_check_ = TimePoint::max();
}

void SandboxedProgram::start_program(pid_t first_pid, TimePoint now) {
  first_process_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, first_pid, 0)));
  Status limits_set = first_process_ ? set_limits(first_pid, limits_, launched_.as_user)
                                     : fail(Code::kIo, kOperation, "pidfd_open: {}", std::strerror(errno));
  // An empty pipe takes this write at once. If its reader is gone, the write fails: SIGPIPE is blocked on this thread.
  if (limits_set &&
      ::write(launched_.filter.get(), filter_.data(), filter_.size()) != static_cast<ssize_t>(filter_.size()))
    limits_set = fail(Code::kIo, kOperation, "the system call filter could not be passed to bubblewrap: {}",
                      std::strerror(errno));
  launched_.filter.reset();
  if (!limits_set) {
    // If bubblewrap has ended, its own error says more.
    if (!is_readable(launched_.pidfd)) error_ = std::move(limits_set).error();
    kill(EndReason::kStopped);
    return;
  }
  program_started_ = true;
  usage_meter_.emplace(first_pid);
  begun_at_ = now;
  deadline_ = limits_.wall ? now + *limits_.wall : TimePoint::max();
  next_usage_check_ = now + kUsageInterval;
}

void SandboxedProgram::read_status(TimePoint now) {
  char block[512];
  while (launched_.status) {
    const ssize_t bytes_read = ::read(launched_.status.get(), block, sizeof block);
    if (bytes_read < 0 && (errno == EAGAIN || errno == EINTR)) break;
    if (bytes_read <= 0 || status_.size() > kStatusBytesMax) {
      launched_.status.reset();
      break;
    }
    status_.append(block, static_cast<std::size_t>(bytes_read));
  }
  if (program_started_ || kill_reason_) return;
  if (const auto first_pid = number_in_status(status_, "child-pid")) start_program(*first_pid, now);
}

void SandboxedProgram::read_output(Fd& fd, std::string& text, bool keep_end) {
  char block[kReadBlockBytes];
  // The number of reads is limited, so that other programs get their turn.
  for (int turn = 0; fd && (ended_ || turn < kReadsPerTurn); ++turn) {
    const ssize_t bytes_read = ::read(fd.get(), block, sizeof block);
    if (bytes_read < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (bytes_read <= 0) return fd.reset();
    text.append(block, static_cast<std::size_t>(bytes_read));
    if (text.size() <= limits_.output.count) continue;
    if (keep_end) {
      text.erase(0, text.size() - limits_.output.count);
    } else {
      text.resize(limits_.output.count);
      fd.reset();
      kill(EndReason::kOutput);
    }
  }
}

void SandboxedProgram::check_usage(TimePoint now) {
  if (now < next_usage_check_ || !usage_meter_) return;
  if (const auto usage = usage_meter_->measure(limits_.memory)) {
    usage_interval_ =
        usage->cpu > end_.cpu ? Duration(kUsageInterval) : std::min<Duration>(usage_interval_ * 2, kUsageIntervalIdle);
    end_.memory = std::max(end_.memory, usage->memory);
    end_.cpu = std::max(end_.cpu, usage->cpu);
    if (usage->memory > limits_.memory) return kill(EndReason::kMemory);
    if (limits_.cpu && usage->cpu > *limits_.cpu) return kill(EndReason::kCpuTime);
  }
  next_usage_check_ = now + usage_interval_;
}

// All processes have ended, so the pipes hold the rest of the output.
void SandboxedProgram::collect_end() {
  ended_ = true;
  read_output(launched_.out, end_.out, /*keep_end=*/false);
  read_output(launched_.err, end_.err, /*keep_end=*/is_long_lived());
  ::waitid(P_PID, static_cast<id_t>(launched_.pid), nullptr, WEXITED);
  if (program_started_) end_.wall = SystemClock().now() - begun_at_;
  const auto code = number_in_status(status_, "exit-code");
  if (group_) {
    if (!kill_reason_ && ControlGroups::ran_out_of_memory(*group_)) kill_reason_ = EndReason::kMemory;
    group_->procs.reset();
    ControlGroups::remove(*group_);
  }
  if (kill_reason_) {
    end_.reason = *kill_reason_;
  } else if (!code) {
    error_ = fail(Code::kUnavailable, kOperation, "bubblewrap could not start the program: {}", printable(end_.err));
  } else if (*code > kSignalExitBase && *code <= kSignalExitBase + kSignalMax) {
    const bool by_cpu_limit = *code - kSignalExitBase == SIGXCPU;
    end_.reason = by_cpu_limit ? EndReason::kCpuTime : EndReason::kSignal;
    end_.status = by_cpu_limit ? 0 : *code - kSignalExitBase;
  } else {
    end_.status = *code;
  }
}

bool SandboxedProgram::advance(TimePoint now) {
  if (ended_) return false;
  if (shared_) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->stop && !kill_reason_) kill(EndReason::kStopped);
  }
  read_output(launched_.out, end_.out, /*keep_end=*/false);
  read_output(launched_.err, end_.err, /*keep_end=*/is_long_lived());
  read_status(now);
  if (is_readable(launched_.pidfd)) {
    // The outer bubblewrap ended. Killing process 1 makes the kernel end all other processes before it reports its end.
    kill_by(first_process_);
    deadline_ = next_usage_check_ = TimePoint::max();
    if (first_process_ && !is_readable(first_process_)) return false;
    read_status(now);
    collect_end();
    return true;
  }
  check_usage(now);
  if (now < deadline_) return false;
  if (program_started_) {
    kill(EndReason::kWallTime);
  } else {
    kill(EndReason::kStopped);
    error_ = fail(Code::kUnavailable, kOperation, "bubblewrap was not ready after {}: {}",
                  to_text(Duration(kSetUpTimeout)), printable(end_.err));
  }
  return false;
}

void SandboxedProgram::report_end() {
  if (on_end) {
    if (error_)
      on_end(std::move(*error_));
    else
      on_end(std::move(end_));
    return;
  }
  if (!shared_) return;
  if (error_) {
    end_.err += error_->message();
    if (end_.reason == EndReason::kExit) end_.status = kNotStarted;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->end = std::move(end_);
  }
  shared_->changed.notify_all();
}

}  // namespace echoline::sandbox
