// Pool: one thread that starts all sandboxed programs and watches them (sandboxed_program.hpp), and the public calls
// that feed it.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "data_plane/sandbox/filter.hpp"
#include "data_plane/sandbox/sandboxed_program.hpp"

namespace echoline::sandbox {
namespace {

constexpr uid_t kNobody = 65534;  // the system's user without rights
constexpr std::string_view kOperation = "sandbox";
constexpr std::int64_t kPollMsMax = 60'000;  // poll() takes an int

Error shutting_down_error() { return fail(Code::kCancelled, kOperation, "the sandbox pool is shutting down"); }

// User ids for programs when this process is root: one per program, so that limits per user are limits per program.
// These ids own nothing. If the process's user namespace lacks them, programs run as user kNobody.
uid_t user_id_for(std::uint64_t program) {
  constexpr uid_t kFirstId = 0x70000000, kIdsPerProcess = 0x400;
  return kFirstId + static_cast<uid_t>(::getpid() % 0x10000) * kIdsPerProcess +
         static_cast<uid_t>(program % kIdsPerProcess);
}

}  // namespace

struct Pool::Impl {
  struct WaitingProgram {
    Command command;
    std::optional<std::string> input;         // absent: a long-lived program
    std::function<void(Result<End>)> on_end;  // for a program that runs to its end; a long-lived one sets `process`
    std::promise<Result<Process>> process;

    bool is_long_lived() const { return !input; }
  };

  PoolOptions options;
  LaunchSettings settings;
  std::string filter;
  std::optional<ControlGroups> groups;
  bool has_user_per_program = false;  // programs run as user_id_for()
  // Whether this bubblewrap has --ro-bind-fd. Pool::start() sets it while the thread already runs.
  std::atomic<bool> supports_ro_bind_fd = false;
  // An eventfd that wakes the thread. Each Process has a weak reference, so that it can wake the thread until the pool
  // is destroyed.
  std::shared_ptr<Fd> waker;

  std::mutex mutex;
  std::deque<WaitingProgram> waiting;
  std::size_t long_lived_count = 0;  // queued or running
  bool closed = false;

  // The following members are used by the thread only.
  std::vector<std::unique_ptr<SandboxedProgram>> programs;  // started and not ended
  std::uint64_t started_count = 0;
  std::thread thread;

  void wake_thread() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto ignored = ::write(waker->get(), &one, sizeof one);
  }

  Status submit(WaitingProgram program) {
    {
      const std::lock_guard lock(mutex);
      if (closed) return shutting_down_error();
      if (!program.is_long_lived()) {
        if (waiting.size() >= options.waiting_max)
          return fail(Code::kExhausted, kOperation, "{} programs are waiting already", options.waiting_max);
        waiting.push_back(std::move(program));
      } else {
        if (long_lived_count >= options.long_lived_max)
          return fail(Code::kExhausted, kOperation, "{} long-lived programs are running already",
                      options.long_lived_max);
        ++long_lived_count;
        // In front, because it needs none of the running_max slots that the others wait for.
        waiting.push_front(std::move(program));
      }
    }
    wake_thread();
    return ok();
  }

  // Takes the first waiting program if it may start now.
  std::optional<WaitingProgram> take_startable() {
    const auto running = static_cast<std::size_t>(std::count_if(
        programs.begin(), programs.end(), [](const auto& sandboxed) { return !sandboxed->is_long_lived(); }));
    const std::lock_guard lock(mutex);
    if (waiting.empty() || (!waiting.front().is_long_lived() && running >= options.running_max)) return std::nullopt;
    WaitingProgram program = std::move(waiting.front());
    waiting.pop_front();
    return program;
  }

  Result<std::unique_ptr<SandboxedProgram>> start(WaitingProgram& program) {
    settings.supports_ro_bind_fd = supports_ro_bind_fd;
    if (settings.as_user && has_user_per_program) settings.as_user = user_id_for(started_count);
    ++started_count;
    std::optional<ControlGroups::Group> group = groups ? groups->make_group(program.command.limits) : std::nullopt;
    auto launched = sandbox::launch(settings, program.command, program.input ? &*program.input : nullptr,
                                    group ? group->procs.get() : -1);
    if (!launched) {
      if (group) ControlGroups::remove(*group);
      return std::move(launched).error();
    }
    return std::make_unique<SandboxedProgram>(std::move(program.command.limits), std::move(*launched), std::move(group),
                                              filter);
  }

  void start_and_hand_over(WaitingProgram program) {
    auto sandboxed = start(program);
    if (!sandboxed && !program.is_long_lived()) {
      program.on_end(std::move(sandboxed).error());
    } else if (!sandboxed) {
      release_long_lived_slot();
      program.process.set_value(std::move(sandboxed).error());
    } else if (!program.is_long_lived()) {
      (*sandboxed)->on_end = std::move(program.on_end);
      programs.push_back(std::move(*sandboxed));
    } else {
      const std::weak_ptr<Fd> weak_waker = waker;
      program.process.set_value(Process(std::make_unique<Process::Impl>((*sandboxed)->connect_process(), weak_waker)));
      programs.push_back(std::move(*sandboxed));
    }
  }

  void release_long_lived_slot() {
    const std::lock_guard lock(mutex);
    --long_lived_count;
  }

  void finish(SandboxedProgram& sandboxed) {
    if (sandboxed.is_long_lived()) release_long_lived_slot();
    sandboxed.report_end();
  }

  bool is_closed() {
    const std::lock_guard lock(mutex);
    return closed;
  }

  void run_thread() {
    sigset_t all_signals;
    sigfillset(&all_signals);
    ::pthread_sigmask(SIG_SETMASK, &all_signals, nullptr);  // signals are for the other threads of this process
    while (!is_closed()) {
      while (auto program = take_startable()) start_and_hand_over(std::move(*program));
      advance_all();
    }
    for (const auto& sandboxed : programs) sandboxed->kill(EndReason::kStopped);
    while (!programs.empty()) advance_all();
    std::deque<WaitingProgram> unstarted;
    {
      const std::lock_guard lock(mutex);
      unstarted.swap(waiting);
    }
    for (WaitingProgram& program : unstarted)
      if (!program.is_long_lived())
        program.on_end(shutting_down_error());
      else
        program.process.set_value(shutting_down_error());
  }

  // Waits until an event or a deadline, then advances every program.
  void advance_all() {
    std::vector<pollfd> fds{{.fd = waker->get(), .events = POLLIN, .revents = 0}};
    auto next_advance_at = TimePoint::max();
    for (const auto& sandboxed : programs) next_advance_at = std::min(next_advance_at, sandboxed->prepare_poll(fds));
    int timeout_ms = -1;  // no time-out
    if (next_advance_at != TimePoint::max()) {
      const auto ms_left = std::chrono::ceil<std::chrono::milliseconds>(next_advance_at - SystemClock().now()).count();
      timeout_ms = static_cast<int>(std::clamp<std::int64_t>(ms_left, 0, kPollMsMax));
    }
    ::poll(fds.data(), fds.size(), timeout_ms);
    if (fds[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto ignored = ::read(waker->get(), &count, sizeof count);
    }
    const TimePoint now = SystemClock().now();
    for (const auto& sandboxed : programs)
      if (const bool just_ended = sandboxed->advance(now); just_ended) finish(*sandboxed);
    std::erase_if(programs, [](const auto& sandboxed) { return sandboxed->ended(); });
  }
};

namespace {

// Runs a first program, to check that this machine allows sandboxes and that programs see none of its processes. In a
// process namespace of its own the shell is process 2, after bubblewrap.
Status check_first_program(Pool& pool) {
  Command command{.argv = {"/bin/sh", "-c", "echo $$"}, .environment = {}, .files = {}, .read_only = {}, .limits = {}};
  auto end = pool.run(std::move(command));
  if (!end) return std::move(end).error();
  if (end->reason == EndReason::kExit && end->status == 0 && end->out == "2\n") return ok();
  return fail(Code::kUnavailable, kOperation, "a first program, /bin/sh, {} and wrote '{}' (expected '2'): {}",
              end->description(), end->out, end->err);
}

// Whether this bubblewrap supports an option; runs its --help inside a sandbox.
bool has_option(Pool& pool, const std::filesystem::path& bubblewrap, std::string_view option) {
  const auto end = pool.run(
      {.argv = {bubblewrap.string(), "--help"}, .environment = {}, .files = {}, .read_only = {}, .limits = {}});
  return end && end->out.find(option) != std::string::npos;
}

}  // namespace

Pool::Pool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Result<std::unique_ptr<Pool>> Pool::start(PoolOptions options) {
  if (::access(options.bubblewrap.c_str(), X_OK) != 0)
    return fail(Code::kUnavailable, kOperation,
                "{} is missing: install bubblewrap 0.8 or newer (Debian: apt-get install bubblewrap)",
                options.bubblewrap.string());
  ECHO_ASSIGN(const std::string filter, system_call_filter());
  const bool is_root = ::geteuid() == 0;
  std::optional<Error> first_error;
  // Tries cgroups and separate user ids first; the last combination has neither.
  for (const auto& [use_cgroups, separate_users] :
       {std::pair{true, true}, {true, false}, {false, true}, {false, false}}) {
    std::optional<ControlGroups> groups;
    if (separate_users && !is_root) continue;  // only root can switch users
    if (use_cgroups) {
      auto new_groups = ControlGroups::make();
      if (!new_groups) continue;
      groups.emplace(std::move(*new_groups));
    }
    auto impl = std::make_unique<Impl>();
    impl->options = options;
    impl->settings.bubblewrap = options.bubblewrap.string();
    if (is_root) impl->settings.as_user = kNobody;
    impl->filter = filter;
    impl->has_user_per_program = separate_users;
    if (groups) impl->groups.emplace(std::move(*groups));
    impl->waker = std::make_shared<Fd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!*impl->waker) return fail(Code::kIo, kOperation, "eventfd: {}", std::strerror(errno));
    Impl* const started_impl = impl.get();
    started_impl->thread = std::thread([started_impl] { started_impl->run_thread(); });
    std::unique_ptr<Pool> pool(new Pool(std::move(impl)));
    Status probed = check_first_program(*pool);
    if (probed) {
      started_impl->supports_ro_bind_fd = has_option(*pool, options.bubblewrap, "--ro-bind-fd");
      return pool;
    }
    if (!first_error) first_error = std::move(probed).error();  // of the strongest combination: the most useful one
  }
  return fail(
      Code::kUnavailable, kOperation,
      "this machine does not allow sandboxes for untrusted programs, so none is run: {}. Needed are bubblewrap 0.8 or "
      "newer, unprivileged "
      "user namespaces (sysctl user.max_user_namespaces and, where they exist, kernel.unprivileged_userns_clone=1 and "
      "kernel.apparmor_restrict_unprivileged_userns=0), and in a container a runtime that allows them, such as "
      "--security-opt seccomp=unconfined --security-opt systempaths=unconfined",
      first_error->detail);
}

void Pool::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closed = true;
  }
  impl_->wake_thread();
}

Pool::~Pool() {
  stop();
  impl_->thread.join();
}

Status Pool::run(Command command, std::string input, std::function<void(Result<End>)> on_end) {
  return impl_->submit(
      {.command = std::move(command), .input = std::move(input), .on_end = std::move(on_end), .process = {}});
}

Result<End> Pool::run(Command command, std::string input) {
  std::promise<Result<End>> promise;
  auto future = promise.get_future();
  ECHO_TRY(run(std::move(command), std::move(input), [&](Result<End> end) { promise.set_value(std::move(end)); }));
  return future.get();
}

Result<Process> Pool::launch(Command command) {
  std::promise<Result<Process>> promise;
  auto future = promise.get_future();
  ECHO_TRY(impl_->submit(
      {.command = std::move(command), .input = std::nullopt, .on_end = {}, .process = std::move(promise)}));
  return future.get();
}

}  // namespace echoline::sandbox
