// One sandboxed program as the pool's thread sees it, and the state it shares with a Process. Private to this folder.
#pragma once
#include <poll.h>

#include <condition_variable>
#include <mutex>

#include "base/clock.hpp"
#include "data_plane/sandbox/control_group.hpp"
#include "data_plane/sandbox/usage.hpp"

namespace echoline::sandbox {

// The state that the pool's thread shares with the holder of a Process.
struct ProcessState {
  Fd in, out;  // the program's standard input and output; used by the holder only
  Limits limits;

  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false;       // requested by the holder
  std::optional<End> end;  // set by the pool's thread
};

struct Process::Impl {
  Impl(std::shared_ptr<ProcessState> shared_state, std::weak_ptr<Fd> pool_waker)
      : shared(std::move(shared_state)), waker(std::move(pool_waker)) {}
  void ask_to_stop();

  std::shared_ptr<ProcessState> shared;
  std::weak_ptr<Fd> waker;  // wakes the pool's thread; expired if the pool was destroyed
  std::string unread;       // output that does not yet form a line
};

// A program from its launch to its end. The pool's thread calls advance() when a descriptor or deadline is due.
class SandboxedProgram {
 public:
  // `filter` must outlive it.
  SandboxedProgram(Limits limits, LaunchedProgram launched, std::optional<ControlGroups::Group> group,
                   const std::string& filter);

  // Makes the program long-lived: returns the state for its Process, with the pipes to the program.
  std::shared_ptr<ProcessState> connect_process();
  bool is_long_lived() const { return shared_ != nullptr; }

  // Adds the descriptors to poll. Returns the time at which advance() is due at the latest.
  TimePoint prepare_poll(std::vector<pollfd>& fds) const;
  // Reads output, checks limits and kills the program if it exceeds one. Returns true once: in the call that finds that
  // all its processes have ended.
  bool advance(TimePoint now);
  void kill(EndReason reason);
  bool ended() const { return ended_; }
  // Reports the end to waiting callers, after advance() returned true.
  void report_end();

  std::function<void(Result<End>)> on_end;  // callback for a program that runs to its end

 private:
  void read_status(TimePoint now);
  // Once the sandbox's process 1 is known, sets the limits and lets the program start. `first_pid`: its id outside.
  void start_program(pid_t first_pid, TimePoint now);
  // `keep_end`: beyond the limit, drops the oldest output instead of killing the program.
  void read_output(Fd& fd, std::string& text, bool keep_end);
  void check_usage(TimePoint now);
  void collect_end();

  const Limits limits_;
  const std::string& filter_;
  LaunchedProgram launched_;
  std::optional<ControlGroups::Group> group_;
  std::shared_ptr<ProcessState> shared_;
  std::optional<UsageMeter> usage_meter_;
  Fd first_process_;                                  // pidfd of the sandbox's process 1
  std::string status_;                                // what bubblewrap has reported so far
  TimePoint begun_at_, deadline_, next_usage_check_;  // deadline_: of the start, then of the program (Limits::wall)
  Duration usage_interval_;
  bool program_started_ = false, ended_ = false;
  std::optional<EndReason> kill_reason_;
  std::optional<Error> error_;
  End end_;
};

}  // namespace echoline::sandbox
