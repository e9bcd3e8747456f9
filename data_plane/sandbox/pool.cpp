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

constexpr uid_t kNobody = 65534;
constexpr std::string_view kOperation = "sandbox";

Error closing() { return fail(Code::kCancelled, kOperation, "it is being shut down"); }

// User ids for programs when this process is root: one per program, so that limits per user are limits per program.
// These ids own nothing. If the process's user namespace lacks them, programs run as "nobody".
uid_t user_id_for(std::uint64_t program) {
  return 0x70000000u + static_cast<uid_t>(::getpid() % 0x10000) * 0x400u + static_cast<uid_t>(program % 0x400);
}

}  // namespace

struct Pool::Impl {
  struct WaitingProgram {
    Command command;
    std::optional<std::string> input;  // absent: a long-lived program
    std::function<void(Result<End>)> done;
    std::promise<Result<Process>> process;
  };

  PoolOptions options;
  Settings settings;
  std::string filter;
  std::optional<ControlGroups> groups;
  bool has_user_per_program = false;  // programs run as user_id_for()
  std::atomic<bool> supports_ro_bind_fd = false;
  std::shared_ptr<Fd> waker;  // an eventfd that wakes the thread; a Process uses it while it exists

  std::mutex mutex;
  std::deque<WaitingProgram> waiting;
  std::size_t long_lived = 0;  // queued or running
  bool closed = false;

  // The following members are used by the thread only.
  std::vector<std::unique_ptr<SandboxedProgram>> programs;
  std::uint64_t started = 0;
  std::thread thread;

  void wake_thread() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(waker->get(), &one, sizeof one);
  }

  Status submit(WaitingProgram program) {
    {
      const std::lock_guard lock(mutex);
      if (closed) return closing();
      if (program.input) {
        if (waiting.size() >= options.waiting_max)
          return fail(Code::kExhausted, kOperation, "{} programs are waiting already", options.waiting_max);
        waiting.push_back(std::move(program));
      } else {
        if (long_lived >= options.processes_max)
          return fail(Code::kExhausted, kOperation, "{} long-lived programs are running already",
                      options.processes_max);
        ++long_lived;
        waiting.push_front(std::move(program));  // it does not use one of the running_max slots
      }
    }
    wake_thread();
    return ok();
  }

  std::optional<WaitingProgram> take_startable() {
    const auto running = static_cast<std::size_t>(
        std::count_if(programs.begin(), programs.end(), [](const auto& b) { return !b->is_long_lived(); }));
    const std::lock_guard lock(mutex);
    if (waiting.empty() || (waiting.front().input && running >= options.running_max)) return std::nullopt;
    WaitingProgram program = std::move(waiting.front());
    waiting.pop_front();
    return program;
  }

  Result<std::unique_ptr<SandboxedProgram>> start(WaitingProgram& program) {
    settings.supports_ro_bind_fd = supports_ro_bind_fd;
    if (settings.as_user && has_user_per_program) settings.as_user = user_id_for(started);
    ++started;
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
    if (!sandboxed && program.input) {
      program.done(std::move(sandboxed).error());
    } else if (!sandboxed) {
      release_long_lived_slot();
      program.process.set_value(std::move(sandboxed).error());
    } else if (program.input) {
      (*sandboxed)->done = std::move(program.done);
      programs.push_back(std::move(*sandboxed));
    } else {
      const std::weak_ptr<Fd> wakes = waker;
      program.process.set_value(Process(std::make_unique<Process::Impl>((*sandboxed)->make_long_lived(), wakes)));
      programs.push_back(std::move(*sandboxed));
    }
  }

  void release_long_lived_slot() {
    const std::lock_guard lock(mutex);
    --long_lived;
  }

  void finish(SandboxedProgram& sandboxed) {
    if (sandboxed.is_long_lived()) release_long_lived_slot();
    sandboxed.report_end();
  }

  bool is_closed() {
    const std::lock_guard lock(mutex);
    return closed;
  }

  void loop() {
    sigset_t all_signals;
    sigfillset(&all_signals);
    ::pthread_sigmask(SIG_SETMASK, &all_signals, nullptr);
    while (!is_closed()) {
      while (auto program = take_startable()) start_and_hand_over(std::move(*program));
      step_all();
    }
    for (const auto& sandboxed : programs) sandboxed->kill(EndReason::kStopped);
    while (!programs.empty()) step_all();
    std::deque<WaitingProgram> unstarted;
    {
      const std::lock_guard lock(mutex);
      unstarted.swap(waiting);
    }
    for (WaitingProgram& program : unstarted)
      if (program.input)
        program.done(closing());
      else
        program.process.set_value(closing());
  }

  // Waits until an event or a deadline, then steps every program.
  void step_all() {
    std::vector<pollfd> fds{{waker->get(), POLLIN, 0}};
    auto due = TimePoint::max();
    for (const auto& sandboxed : programs) due = std::min(due, sandboxed->add_poll_descriptors(fds));
    int timeout = -1;
    if (due != TimePoint::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(due - SystemClock().now()).count();
      timeout = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
    }
    ::poll(fds.data(), fds.size(), timeout);
    if (fds[0].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto n = ::read(waker->get(), &count, sizeof count);
    }
    const TimePoint now = SystemClock().now();
    for (const auto& sandboxed : programs)
      if (sandboxed->step(now)) finish(*sandboxed);
    std::erase_if(programs, [](const auto& sandboxed) { return sandboxed->ended(); });
  }
};

namespace {

// The first program: checks that this machine allows sandboxes and that nothing leaks into them.
Status probe(Pool& pool) {
  Command command{{"/bin/sh", "-c", "echo $$"}, {}, {}, {}, {}};
  auto end = pool.run(std::move(command));
  if (!end) return std::move(end).error();
  if (end->reason == EndReason::kExit && end->status == 0 && end->out == "2\n") return ok();
  return fail(Code::kUnavailable, kOperation, "a first program, /bin/sh, {} and wrote '{}' (expected '2'): {}",
              end->description(), end->out, end->err);
}

// Whether this bubblewrap supports an option; runs its --help inside a sandbox.
bool has_option(Pool& pool, const std::filesystem::path& bubblewrap, std::string_view option) {
  const auto end = pool.run({{bubblewrap.string(), "--help"}, {}, {}, {}, {}});
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
    if (separate_users && !is_root) continue;
    if (use_cgroups) {
      auto made_groups = ControlGroups::make();
      if (!made_groups) continue;
      groups.emplace(std::move(*made_groups));
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
    Impl* const raw = impl.get();
    raw->thread = std::thread([raw] { raw->loop(); });
    std::unique_ptr<Pool> pool(new Pool(std::move(impl)));
    Status probed = probe(*pool);
    if (probed) {
      raw->supports_ro_bind_fd = has_option(*pool, options.bubblewrap, "--ro-bind-fd");
      return pool;
    }
    if (!first_error) first_error = std::move(probed).error();
  }
  return fail(
      Code::kUnavailable, kOperation,
      "this machine does not let untrusted programs be locked up, so none is run: {}. Needed are bubblewrap 0.8 or "
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

Status Pool::run(Command command, std::string input, std::function<void(Result<End>)> done) {
  return impl_->submit({std::move(command), std::move(input), std::move(done), {}});
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
  ECHO_TRY(impl_->submit({std::move(command), std::nullopt, {}, std::move(promise)}));
  return future.get();
}

}  // namespace echoline::sandbox
