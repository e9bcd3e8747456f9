// Pool: one thread that starts all sandboxed programs and watches them (box.hpp), and the public calls that feed it.
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

#include "data_plane/sandbox/box.hpp"
#include "data_plane/sandbox/filter.hpp"

namespace echoline::sandbox {
namespace {

constexpr uid_t kNobody = 65534;
constexpr std::string_view kOperation = "sandbox";

Error closing() { return fail(Code::kCancelled, kOperation, "it is being shut down"); }

// User ids for programs when this process is root: one per program, so that limits per user are limits per program.
// These ids own nothing. If the process's user namespace lacks them, programs run as "nobody".
uid_t user_number(std::uint64_t program) {
  return 0x70000000u + static_cast<uid_t>(::getpid() % 0x10000) * 0x400u + static_cast<uid_t>(program % 0x400);
}

}  // namespace

struct Pool::Impl {
  struct Waiting {
    Command command;
    std::optional<std::string> input;  // absent: a long-lived program
    std::function<void(Result<End>)> done;
    std::promise<Result<Process>> stays;
  };

  PoolOptions options;
  Settings settings;
  std::string filter;
  std::optional<ControlGroups> groups;
  bool numbers_of_our_own = false;  // user_number() is usable
  std::atomic<bool> binds_descriptors = false;
  std::shared_ptr<Fd> waker;  // an eventfd that wakes the thread; a Process uses it while it exists

  std::mutex mutex;
  std::deque<Waiting> waiting;
  std::size_t staying = 0;  // long-lived programs, queued or running
  bool closed = false;

  std::vector<std::unique_ptr<Box>> boxes;  // this member and the following ones are used by the thread only
  std::uint64_t started = 0;
  std::thread thread;

  void poke() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto n = ::write(waker->get(), &one, sizeof one);
  }

  Status submit(Waiting program) {
    {
      const std::lock_guard lock(mutex);
      if (closed) return closing();
      if (program.input) {
        if (waiting.size() >= options.waiting_max)
          return fail(Code::kExhausted, kOperation, "{} programs are waiting already", options.waiting_max);
        waiting.push_back(std::move(program));
      } else {
        if (staying >= options.processes_max)
          return fail(Code::kExhausted, kOperation, "{} long-lived programs are running already",
                      options.processes_max);
        ++staying;
        waiting.push_front(std::move(program));  // it does not use one of the running_max slots
      }
    }
    poke();
    return ok();
  }

  std::optional<Waiting> next() {
    const auto running =
        static_cast<std::size_t>(std::count_if(boxes.begin(), boxes.end(), [](const auto& b) { return !b->stays(); }));
    const std::lock_guard lock(mutex);
    if (waiting.empty() || (waiting.front().input && running >= options.running_max)) return std::nullopt;
    Waiting program = std::move(waiting.front());
    waiting.pop_front();
    return program;
  }

  Result<std::unique_ptr<Box>> start(Waiting& program) {
    settings.binds_descriptors = binds_descriptors;
    if (settings.as_user && numbers_of_our_own) settings.as_user = user_number(started);
    ++started;
    std::optional<ControlGroups::Group> group = groups ? groups->make(program.command.limits) : std::nullopt;
    auto launched = sandbox::launch(settings, program.command, program.input ? &*program.input : nullptr,
                                    group ? group->procs.get() : -1);
    if (!launched) {
      if (group) ControlGroups::remove(*group);
      return std::move(launched).error();
    }
    return std::make_unique<Box>(std::move(program.command.limits), std::move(*launched), std::move(group), filter);
  }

  void begin(Waiting program) {
    auto box = start(program);
    if (!box && program.input) {
      program.done(std::move(box).error());
    } else if (!box) {
      forget_one_that_stayed();
      program.stays.set_value(std::move(box).error());
    } else if (program.input) {
      (*box)->done = std::move(program.done);
      boxes.push_back(std::move(*box));
    } else {
      const std::weak_ptr<Fd> wakes = waker;
      program.stays.set_value(Process(std::make_unique<Process::Impl>((*box)->share(), wakes)));
      boxes.push_back(std::move(*box));
    }
  }

  void forget_one_that_stayed() {
    const std::lock_guard lock(mutex);
    --staying;
  }

  void finish(Box& box) {
    if (box.stays()) forget_one_that_stayed();
    box.report();
  }

  bool is_closed() {
    const std::lock_guard lock(mutex);
    return closed;
  }

  void loop() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    while (!is_closed()) {
      while (auto program = next()) begin(std::move(*program));
      step_all();
    }
    for (const auto& box : boxes) box->kill(Why::kStopped);
    while (!boxes.empty()) step_all();
    std::deque<Waiting> left;
    {
      const std::lock_guard lock(mutex);
      left.swap(waiting);
    }
    for (Waiting& program : left)
      if (program.input)
        program.done(closing());
      else
        program.stays.set_value(closing());
  }

  // Waits until an event or a deadline, then steps every program.
  void step_all() {
    std::vector<pollfd> fds{{waker->get(), POLLIN, 0}};
    auto due = TimePoint::max();
    for (const auto& box : boxes) due = std::min(due, box->add_to(fds));
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
    for (const auto& box : boxes)
      if (box->step(now)) finish(*box);
    std::erase_if(boxes, [](const auto& box) { return box->ended(); });
  }
};

namespace {

// The first program: checks that this machine allows sandboxes and that nothing leaks into them.
Status probe(Pool& pool) {
  Command command{{"/bin/sh", "-c", "echo $$"}, {}, {}, {}, {}};
  auto end = pool.run(std::move(command));
  if (!end) return std::move(end).error();
  if (end->why == Why::kExit && end->status == 0 && end->out == "2\n") return ok();
  return fail(Code::kUnavailable, kOperation, "a first program, /bin/sh, {} and wrote '{}' (expected '2'): {}",
              end->words(), end->out, end->err);
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
  const bool root = ::geteuid() == 0;
  std::optional<Error> first;
  // Tries cgroups and separate user ids first; the last combination has neither.
  for (const auto& [grouped, numbered] : {std::pair{true, true}, {true, false}, {false, true}, {false, false}}) {
    std::optional<ControlGroups> groups;
    if (numbered && !root) continue;
    if (grouped) {
      auto made = ControlGroups::make();
      if (!made) continue;
      groups.emplace(std::move(*made));
    }
    auto impl = std::make_unique<Impl>();
    impl->options = options;
    impl->settings.bubblewrap = options.bubblewrap.string();
    if (root) impl->settings.as_user = kNobody;
    impl->filter = filter;
    impl->numbers_of_our_own = numbered;
    if (groups) impl->groups.emplace(std::move(*groups));
    impl->waker = std::make_shared<Fd>(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!*impl->waker) return fail(Code::kIo, kOperation, "eventfd: {}", std::strerror(errno));
    Impl* const raw = impl.get();
    raw->thread = std::thread([raw] { raw->loop(); });
    std::unique_ptr<Pool> pool(new Pool(std::move(impl)));
    Status probed = probe(*pool);
    if (probed) {
      raw->binds_descriptors = has_option(*pool, options.bubblewrap, "--ro-bind-fd");
      return pool;
    }
    if (!first) first = std::move(probed).error();
  }
  return fail(
      Code::kUnavailable, kOperation,
      "this machine does not let untrusted programs be locked up, so none is run: {}. Needed are bubblewrap 0.8 or "
      "newer, unprivileged "
      "user namespaces (sysctl user.max_user_namespaces and, where they exist, kernel.unprivileged_userns_clone=1 and "
      "kernel.apparmor_restrict_unprivileged_userns=0), and in a container a runtime that allows them, such as "
      "--security-opt seccomp=unconfined --security-opt systempaths=unconfined",
      first->detail);
}

void Pool::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closed = true;
  }
  impl_->poke();
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
