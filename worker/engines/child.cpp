// Starts an inference server behind a guard process; the remote engine calls it.
#include "worker/engines/child.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>

#include "base/files.hpp"

extern char** environ;

namespace echoline::worker {
namespace {

constexpr int kParentFd = 3;    // file descriptor of the guard's end of the socket to this program
constexpr int kPollMs = 50;     // between two checks whether the engine (the inference server) has ended
constexpr int kGraceMs = 5000;  // from SIGTERM until SIGKILL

constexpr int kCannotStart = 127;  // exit status of a command that cannot be started, as in shells
constexpr int kSignalled = 128;    // plus the signal: exit status of the guard if a signal ended the engine

// Prepared before the fork, because only async-signal-safe calls are allowed after it.
struct Launch {
  std::vector<char*> argv, envp;             // of the engine
  std::vector<char*> remove_argv;            // command that removes a folder; empty: none
  int parent_socket = -1, null_device = -1;  // file descriptors
};

[[noreturn]] void become_engine(const Launch& launch, pid_t guard) {
  ::setpgid(0, 0);  // a process group of its own, which the guard can signal as a whole
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != guard) ::_exit(kCannotStart);  // the guard died before the line above took effect
  ::dup2(launch.null_device, STDIN_FILENO);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);  // standard output is this program's own, for its results
  ::close_range(STDERR_FILENO + 1, ~0U, 0);
  ::execve(launch.argv[0], launch.argv.data(), launch.envp.data());
  ::_exit(kCannotStart);
}

// Removes the ended children of the guard from the process table. Returns the engine's status if it is one of them.
std::optional<int> collect_ended_children(pid_t engine) {
  std::optional<int> engine_status;
  for (;;) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended <= 0) return engine_status;  // 0: the other children run; negative: there are none
    if (ended == engine) engine_status = status;
  }
}

// Whether this program has closed its end of the socket without a byte before; does not wait.
bool parent_closed_without_byte() {
  pollfd parent{kParentFd, POLLIN, 0};
  if (::poll(&parent, 1, 0) <= 0) return false;  // it still runs
  char byte = 0;
  return ::read(kParentFd, &byte, 1) <= 0;
}

// Runs in the guard process. Waits until the engine ends or this program closes its end of the socket; the kernel
// closes that end if this program is killed. A byte before the close, which ~Child() sends, means that this program was
// not killed.
[[noreturn]] void run_guard(const Launch& launch) {
  ::setpgid(0, 0);  // so that Ctrl-C in the terminal does not reach the guard before it has ended the engine
  for (const int number : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::signal(number, SIG_DFL);
  sigset_t no_signals;
  sigemptyset(&no_signals);
  ::sigprocmask(SIG_SETMASK, &no_signals, nullptr);
  const pid_t guard_pid = ::getpid();
  const pid_t engine = ::_Fork();
  if (engine == 0) become_engine(launch, guard_pid);
  if (engine < 0) ::_exit(kCannotStart);
  ::setpgid(engine, engine);  // here too, because the engine may not have run its own call yet
  ::dup2(launch.parent_socket, kParentFd);
  ::close_range(kParentFd + 1, ~0U, 0);  // in particular this process's copy of the socket's other end
  // `engine` is a shell. Processes of its group that outlive it become children of the guard, which then ends them.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  bool shell_runs = true;
  bool end_was_announced = false;  // by a byte
  int status = 0;                  // of the shell, once it has ended
  int grace_ms_left = -1;          // until SIGKILL; negative: the group was not asked to end
  for (;;) {
    if (const auto shell_status = collect_ended_children(engine)) {
      shell_runs = false;
      status = *shell_status;
    }
    // A negative number means the whole process group; signal 0 only looks for a process.
    const bool group_is_empty = !shell_runs && ::kill(-engine, 0) != 0;
    if (group_is_empty) break;
    if (!shell_runs && grace_ms_left < 0) {  // the shell has ended by itself: its other processes get time to end
      grace_ms_left = kGraceMs;
      ::kill(-engine, SIGTERM);
    }
    if (grace_ms_left == 0) ::kill(-engine, SIGKILL);
    // While the group ends, only its processes are awaited: with -1, poll() watches nothing and only waits.
    pollfd parent{grace_ms_left < 0 ? kParentFd : -1, POLLIN, 0};
    const int ready = ::poll(&parent, 1, kPollMs);
    if (grace_ms_left > 0) grace_ms_left = std::max(0, grace_ms_left - kPollMs);
    if (ready <= 0) continue;  // nothing from this program: it still runs
    char byte = 0;
    if (::read(kParentFd, &byte, 1) > 0) {
      end_was_announced = true;  // the close follows
      continue;
    }
    grace_ms_left = kGraceMs;  // this program has closed the socket, or has ended
    ::kill(-engine, SIGTERM);
  }
  // The last process of the group may have ended before the loop saw that the socket was closed.
  const bool parent_was_killed = !end_was_announced && parent_closed_without_byte();
  if (parent_was_killed && !launch.remove_argv.empty())  // the command that removes the folder replaces the guard
    ::execve(launch.remove_argv[0], launch.remove_argv.data(), launch.envp.data());
  ::_exit(WIFSIGNALED(status) ? kSignalled + WTERMSIG(status) : WEXITSTATUS(status));
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& string : strings) result.push_back(string.data());
  result.push_back(nullptr);  // as execve() expects
  return result;
}

// Quotes one shell word.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string replace_all(std::string text, std::string_view placeholder, const std::string& value) {
  for (std::size_t at = 0; (at = text.find(placeholder, at)) != std::string::npos; at += value.size())
    text.replace(at, placeholder.size(), value);
  return text;
}

}  // namespace

int free_port() {  // the kernel chooses one, because the port to bind to is 0
  const Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic_address = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener.get(), generic_address, size) != 0 || ::getsockname(listener.get(), generic_address, &size) != 0)
    return 0;
  return ntohs(address.sin_port);
}

std::string server_command(std::string command, const std::filesystem::path& model_folder, int port, std::size_t gpus) {
  command = replace_all(std::move(command), "{model}", quoted(model_folder.string()));
  command = replace_all(std::move(command), "{port}", std::to_string(port));
  return replace_all(std::move(command), "{gpus}", std::to_string(gpus));
}

Result<std::unique_ptr<Child>> Child::start(const std::string& command,
                                            const std::vector<std::pair<std::string, std::string>>& environment,
                                            const std::filesystem::path& remove_after) {
  std::map<std::string, std::string> variables;  // this process's, replaced and extended by `environment`
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text(*entry);
    if (const auto equals = text.find('='); equals != std::string_view::npos)
      variables[std::string(text.substr(0, equals))] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : environment) variables[name] = value;
  std::vector<std::string> argv{"/bin/sh", "-c", command}, remove{"/bin/rm", "-rf", "--", remove_after.string()}, envp;
  for (const auto& [name, value] : variables) envp.push_back(name + "=" + value);
  int socket_ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socket_ends) != 0)
    return fail(Code::kIo, "start engine", "{}", std::strerror(errno));
  Launch launch{.argv = pointers_to(argv),
                .envp = pointers_to(envp),
                .remove_argv = {},
                .parent_socket = socket_ends[0],
                .null_device = ::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  if (!remove_after.empty()) launch.remove_argv = pointers_to(remove);
  const pid_t pid = ::fork();
  if (pid == 0) run_guard(launch);
  const int fork_errno = errno;  // close() may change errno
  ::close(socket_ends[0]);
  ::close(launch.null_device);
  if (pid > 0) return std::unique_ptr<Child>(new Child(pid, socket_ends[1]));
  ::close(socket_ends[1]);
  return fail(Code::kIo, "start engine", "{}", std::strerror(fork_errno));
}

Child::~Child() {
  const char ended_in_order = 'e';  // any byte: see run_guard()
  [[maybe_unused]] const auto sent = ::send(socket_, &ended_in_order, 1, MSG_NOSIGNAL);
  ::close(socket_);
  if (!how_ended_) ::waitpid(guard_, nullptr, 0);  // else how_ended() has waited for it; the guard ends soon
}

std::optional<std::string> Child::how_ended() {
  int status = 0;
  // Unchanged if the guard was collected in an earlier call, or still runs.
  if (how_ended_ || ::waitpid(guard_, &status, WNOHANG) != guard_) return how_ended_;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalled + WTERMSIG(status);
  how_ended_ = code > kSignalled ? fmt::format("killed by signal {}", code - kSignalled)
                                 : fmt::format("exited with status {}", code);
  return how_ended_;
}

}  // namespace echoline::worker
