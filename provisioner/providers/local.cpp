// The provider "local": its instances are processes on this machine, which end with this program.
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/files.hpp"
#include "provisioner/providers/registry.hpp"

extern char** environ;

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "local provider";
constexpr Duration kDestructorGrace = std::chrono::seconds(2);  // from SIGTERM to SIGKILL
constexpr std::string_view kLabelVariable = "ECHOLINE_INSTANCE";
constexpr std::size_t kLabelMax = 200;          // characters
constexpr std::uint64_t kEnvironMax = 4 << 20;  // bytes of a process's environment
constexpr Duration kReapInterval = std::chrono::milliseconds(5);

// The start time of a process in clock ticks since boot; absent if it is gone. Together with the pid it identifies a
// process uniquely. `zombies`: a process that has ended but was not reaped counts too.
std::optional<std::uint64_t> start_ticks(pid_t pid, bool zombies = false) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  if (!std::getline(file, stat)) return std::nullopt;
  const std::size_t after_name = stat.rfind(')');  // the name may hold spaces and parentheses
  if (after_name == std::string::npos) return std::nullopt;
  std::istringstream fields(stat.substr(after_name + 1));
  std::string field;
  constexpr int kStateField = 3, kStartTimeField = 22;  // proc(5); the state follows the name
  for (int i = kStateField; i <= kStartTimeField; ++i) {
    if (!(fields >> field)) return std::nullopt;
    const bool is_zombie = i == kStateField && field == "Z";
    if (is_zombie && !zombies) return std::nullopt;
  }
  std::uint64_t ticks = 0;
  const auto [end, ec] = std::from_chars(field.data(), field.data() + field.size(), ticks);
  if (ec != std::errc{} || end != field.data() + field.size()) return std::nullopt;
  return ticks;
}

InstanceId id_of(pid_t pid, std::uint64_t started_ticks) { return {fmt::format("local:{}:{}", pid, started_ticks)}; }

// The pid and the start time in an instance's id.
Result<std::pair<pid_t, std::uint64_t>> parse_id(const InstanceId& id) {
  const char* const end = id.text.data() + id.text.size();
  constexpr std::string_view kPrefix = "local:";
  std::pair<pid_t, std::uint64_t> parsed{};
  if (id.text.starts_with(kPrefix)) {
    const auto pid = std::from_chars(id.text.data() + kPrefix.size(), end, parsed.first);
    if (pid.ec == std::errc{} && pid.ptr != end && *pid.ptr == ':' && parsed.first > 1) {
      const auto ticks = std::from_chars(pid.ptr + 1, end, parsed.second);
      if (ticks.ec == std::errc{} && ticks.ptr == end) return parsed;
    }
  }
  return fail(Code::kInvalid, kOperation, "expected an instance id like local:1234:567890, found '{}'", id.text);
}

// The thread that forks all processes. The kernel sends the parent-death signal when the forking thread ends, so that
// thread must live as long as the provider.
class Spawner {
 public:
  Spawner() : thread_([this] { loop(); }) {}
  ~Spawner() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  // Runs `job` on the thread and waits for it.
  void run(const std::function<void()>& job) {
    std::unique_lock lock(mutex_);
    job_ = &job;
    wake_.notify_all();
    wake_.wait(lock, [this] { return job_ == nullptr; });
  }

 private:
  void loop() {
    sigset_t all_signals;  // other threads handle signals; exec_child() unblocks them for the child
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, nullptr);
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || job_ != nullptr; });
      if (job_ == nullptr) return;
      (*job_)();
      job_ = nullptr;
      wake_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void()>* job_ = nullptr;  // of the waiting run()
  bool stopping_ = false;
  std::thread thread_;  // last, because it uses the other members
};

// The arguments of exec_child(). Prepared before the fork, because only async-signal-safe calls are allowed between
// fork and exec.
struct Launch {
  std::vector<char*> argv;
  std::vector<char*> envp;
  int null_fd = -1;
  int log_fd = -1;
  int error_fd = -1;  // receives errno if exec fails; exec closes it
  pid_t parent = 0;
};

[[noreturn]] void exec_child(const Launch& launch) {
  setpgid(0, 0);
  // Another parent: this program died before prctl(), so the kernel would not send the signal.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == launch.parent) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    for (const int signal_number : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD}) signal(signal_number, SIG_DFL);
    if (dup2(launch.null_fd, 0) >= 0 && dup2(launch.log_fd, 1) >= 0 && dup2(launch.log_fd, 2) >= 0) {
      close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);  // the program keeps only stdin, stdout and stderr
      execve(launch.argv[0], launch.argv.data(), launch.envp.data());
    }
  }
  const int exec_errno = errno;
  [[maybe_unused]] const auto written = write(launch.error_fd, &exec_errno, sizeof(exec_errno));
  constexpr int kNotFoundStatus = 127;  // as shells report it
  _exit(kNotFoundStatus);
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

// This process's environment without credentials, overridden by `extra` and the label, as NAME=value.
std::vector<std::string> merged_environment(const std::vector<std::pair<std::string, std::string>>& extra,
                                            const std::string& label) {
  std::map<std::string, std::string> merged;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals != std::string_view::npos && !is_credential(text.substr(0, equals)))
      merged[std::string(text.substr(0, equals))] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : extra) merged[name] = value;
  merged[std::string(kLabelVariable)] = label;
  std::vector<std::string> entries;
  for (const auto& [name, value] : merged) entries.push_back(name + "=" + value);
  return entries;
}

// A null-terminated array of the strings, as exec takes it. The strings must outlive it.
std::vector<char*> exec_array(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

Status check(const LaunchSpec& spec) {
  if (spec.argv.empty() || spec.argv.front().find('/') == std::string::npos)
    return fail(Code::kInvalid, kOperation, "argv[0] must be the path of a program, found '{}'",
                spec.argv.empty() ? "" : spec.argv.front());
  const auto is_forbidden = [](unsigned char c) { return !std::isalnum(c) && !std::strchr("._-/", c); };
  if (spec.label.empty() || spec.label.size() > kLabelMax || spec.label.front() == '.' ||
      std::any_of(spec.label.begin(), spec.label.end(), is_forbidden))
    return fail(Code::kInvalid, kOperation, "a label is 1 to {} letters, digits, '.', '_', '-' and '/', found '{}'",
                kLabelMax, spec.label);
  for (const auto& [name, value] : spec.env)
    if (name.empty() || name.find('=') != std::string::npos)
      return fail(Code::kInvalid, kOperation, "'{}' cannot be the name of an environment variable", name);
  return ok();
}

// The label in the environment of a live process that leads its group; "" if there is none or it cannot be read.
std::string label_of(pid_t pid) {
  if (getpgid(pid) != pid) return "";
  const auto environment = read_file(fmt::format("/proc/{}/environ", pid), kEnvironMax);
  if (!environment) return "";
  for (std::size_t begin = 0; begin < environment->size();) {
    const std::size_t end = std::min(environment->find('\0', begin), environment->size());
    const std::string_view entry(environment->data() + begin, end - begin);
    if (entry.starts_with(kLabelVariable) && entry.substr(kLabelVariable.size()).starts_with('='))
      return std::string(entry.substr(kLabelVariable.size() + 1));
    begin = end + 1;
  }
  return "";
}

// Each instance is a process that leads its own process group. Its stdin is /dev/null; stdout and stderr are appended
// to <log_dir>/<label>.log ('/' in the label becomes '.'). stop() sends SIGTERM to the group, and SIGKILL after the
// grace, counted from the next poll(). When the leader exits, the rest of its group is killed. The kernel kills the
// leader when this program dies in any way. An instance id holds pid and start time, so a recycled pid is never
// signalled. The environment variable ECHOLINE_INSTANCE holds the label; by it, list() finds processes that other
// programs have started.
struct LocalProvider final : Provider {
  struct Process {
    pid_t pid = 0;
    std::uint64_t started_ticks = 0;  // as start_ticks() returns it
    std::string label;
    bool is_child = true;           // false: an earlier run of this program started it
    std::vector<Ticket> stops;      // tickets of stop() calls to answer
    std::optional<Duration> grace;  // stop() was called; the grace starts at the next poll()
    std::optional<TimePoint> kill_at;
  };

  std::filesystem::path log_dir;
  std::map<InstanceId, Process> processes;
  std::vector<ProviderEvent> events;
  Spawner spawner;

  // `dir`: where the instances' logs are written.
  explicit LocalProvider(std::filesystem::path dir) : log_dir(std::move(dir)) {}

  // Signals the process and its group. The pid of an unreaped child cannot be recycled. For any other process, checks
  // the start time first.
  static void send_signal(const Process& process, int signal_number) {
    if (!process.is_child && start_ticks(process.pid) != process.started_ticks) return;
    const bool leads_group = getpgid(process.pid) == process.pid;
    kill(leads_group ? -process.pid : process.pid, signal_number);
  }

  // Returns how a process ended; absent while it lives. Reaps a child that has ended, so do not call it for that child
  // again.
  static std::optional<std::string> reap(const Process& process) {
    if (!process.is_child) {
      if (start_ticks(process.pid) == process.started_ticks) return std::nullopt;
      return "gone";
    }
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(process.pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0) {
      if (info.si_pid == 0) return std::nullopt;  // it has not ended
      // The leader is a zombie, so its pid, which names the group, cannot be reused yet.
      kill(-process.pid, SIGKILL);
      int status = 0;
      if (waitpid(process.pid, &status, 0) == process.pid) {
        if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
        if (WIFSIGNALED(status)) return fmt::format("killed by signal {}", WTERMSIG(status));
      }
    }
    return "gone";
  }

  // Stops all processes: SIGTERM, then SIGKILL after kDestructorGrace. Returns when all are reaped.
  ~LocalProvider() override {
    for (const auto& [id, process] : processes) send_signal(process, SIGTERM);
    const auto deadline = std::chrono::steady_clock::now() + kDestructorGrace;
    bool killed = false;
    while (true) {
      std::erase_if(processes, [](const auto& entry) { return reap(entry.second).has_value(); });
      if (processes.empty()) return;
      if (!killed && std::chrono::steady_clock::now() >= deadline) {
        for (const auto& [id, process] : processes) send_signal(process, SIGKILL);
        killed = true;
      }
      std::this_thread::sleep_for(kReapInterval);
    }
  }

  // argv[0] is a path, not looked up in PATH. The process inherits this environment, overridden by spec.env. kInvalid
  // for a bad argv or label; kIo with the system's reason if the program cannot be started.
  void start(Ticket ticket, const LaunchSpec& spec) override {
    if (auto id = launch_process(spec))
      events.push_back(Started{.ticket = ticket, .instance = *id, .usd_per_hour = std::nullopt});
    else
      events.push_back(
          StartFailed{.ticket = ticket, .error = std::move(id).error(), .retryable = false, .perhaps_rented = false});
  }

  Result<InstanceId> launch_process(const LaunchSpec& spec) {
    ECHO_TRY(check(spec));
    ECHO_TRY(make_folders(log_dir));
    std::string name = spec.label + ".log";
    std::replace(name.begin(), name.end(), '/', '.');
    const std::filesystem::path log_path = log_dir / name;

    const Fd log(open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (log.get() < 0) return fail(Code::kIo, kOperation, "{}: {}", log_path.string(), std::strerror(errno));
    const Fd dev_null(open("/dev/null", O_RDONLY | O_CLOEXEC));
    int pipe_fds[2];  // the child writes errno to it if exec fails
    if (dev_null.get() < 0 || pipe2(pipe_fds, O_CLOEXEC) != 0)
      return fail(Code::kIo, kOperation, "start {}: {}", spec.label, std::strerror(errno));
    const Fd error_reader(pipe_fds[0]);
    Fd error_writer(pipe_fds[1]);

    std::vector<std::string> argv = spec.argv;
    std::vector<std::string> env = merged_environment(spec.env, spec.label);
    const Launch launch{.argv = exec_array(argv),
                        .envp = exec_array(env),
                        .null_fd = dev_null.get(),
                        .log_fd = log.get(),
                        .error_fd = error_writer.get(),
                        .parent = getpid()};
    pid_t pid = -1;
    int fork_errno = 0;
    spawner.run([&] {
      pid = fork();
      if (pid == 0) exec_child(launch);
      fork_errno = errno;
    });
    if (pid < 0) return fail(Code::kIo, kOperation, "start {}: {}", spec.label, std::strerror(fork_errno));
    error_writer.reset();  // so that the read ends once exec has closed the child's end
    int exec_errno = 0;
    ssize_t bytes_read = 0;
    do {
      bytes_read = ::read(error_reader.get(), &exec_errno, sizeof(exec_errno));
    } while (bytes_read < 0 && errno == EINTR);
    if (bytes_read == sizeof(exec_errno)) {
      waitpid(pid, nullptr, 0);
      return fail(Code::kIo, kOperation, "start {}: {}: {}", spec.label, spec.argv.front(), std::strerror(exec_errno));
    }
    // A child that has ended already is a zombie, because it is not reaped yet, so it still has an entry.
    const std::optional<std::uint64_t> ticks = start_ticks(pid, /*zombies=*/true);
    ECHO_CHECK(ticks.has_value(), "/proc/{}/stat cannot be read", pid);
    const InstanceId id = id_of(pid, *ticks);
    Process& process = processes[id];
    process.pid = pid;
    process.started_ticks = *ticks;
    process.label = spec.label;
    return id;
  }

  std::vector<ProviderEvent> poll(TimePoint now) override {
    std::vector<ProviderEvent> reported = std::exchange(events, {});
    for (auto it = processes.begin(); it != processes.end();) {
      Process& process = it->second;
      if (const auto how = reap(process)) {
        for (const Ticket ticket : process.stops)
          reported.push_back(Stopped{.ticket = ticket, .instance = it->first, .how = *how});
        if (process.stops.empty())
          reported.push_back(Exited{.instance = it->first, .label = process.label, .why = *how});
        it = processes.erase(it);
        continue;
      }
      if (process.grace) process.kill_at = now + *std::exchange(process.grace, std::nullopt);
      if (process.kill_at && now >= *process.kill_at) {
        send_signal(process, SIGKILL);
        process.kill_at.reset();
      }
      ++it;
    }
    return reported;
  }

  // Also accepts instances that an earlier process of this program has started (Ledger::orphans()).
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override {
    auto it = processes.find(instance);
    if (it == processes.end()) {
      const auto parsed = parse_id(instance);
      if (!parsed) {
        events.push_back(StopFailed{.ticket = ticket, .instance = instance, .error = parsed.error()});
        return;
      }
      const auto& [pid, started_ticks] = *parsed;
      if (start_ticks(pid) != started_ticks) {
        events.push_back(Stopped{.ticket = ticket, .instance = instance, .how = "gone"});
        return;
      }
      Process process;
      process.pid = pid;
      process.started_ticks = started_ticks;
      process.is_child = false;
      it = processes.emplace(instance, std::move(process)).first;
    }
    const bool is_stopping = !it->second.stops.empty();
    it->second.stops.push_back(ticket);
    if (is_stopping) return;
    it->second.grace = grace;
    send_signal(it->second, SIGTERM);
  }

  void list(Ticket ticket, const std::string& label_prefix) override {
    Listed listed;
    listed.ticket = ticket;
    listed.complete = true;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
      const std::string name = entry.path().filename();
      pid_t pid = 0;
      const auto [end, ec] = std::from_chars(name.data(), name.data() + name.size(), pid);
      if (ec != std::errc{} || end != name.data() + name.size() || pid <= 1) continue;
      const std::string label = label_of(pid);
      const auto ticks = start_ticks(pid);
      if (label.empty() || !label.starts_with(label_prefix) || !ticks) continue;
      listed.instances.push_back({.instance = id_of(pid, *ticks), .label = label, .usd_per_hour = std::nullopt});
    }
    if (error) {
      listed.complete = false;
      listed.error = fail(Code::kIo, kOperation, "/proc: {}", error.message());
    }
    events.push_back(std::move(listed));
  }
};

}  // namespace

const ProviderKind& local_kind() {
  static const ProviderKind kind{
      .name = "local",
      .meaning = "processes on this machine, held to their offer's speed and links",
      .make =
          [](const ProviderOptions& options) {
            return Result<std::unique_ptr<Provider>>(std::make_unique<LocalProvider>(options.log_folder));
          },
      .is_local = true};
  return kind;
}

}  // namespace echoline::provisioner
