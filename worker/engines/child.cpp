// Starts an inference server behind a guard process; the remote engine calls it.
#include "worker/engines/child.hpp"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

extern char** environ;

namespace echoline::worker {
namespace {

constexpr int kAliveFd = 3, kPollMs = 50, kGraceMs = 5000;
constexpr int kSignalled = 128;  // exit status of the guard, plus the signal

// Prepared before the fork, because only async-signal-safe calls are allowed after it.
struct Launch {
  std::vector<char*> argv, envp, remove;
  int alive = -1, null = -1;
};

[[noreturn]] void become_engine(const Launch& launch, pid_t guard) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != guard) ::_exit(127);
  ::dup2(launch.null, 0);
  ::dup2(2, 1);
  ::close_range(3, ~0U, 0);
  ::execve(launch.argv[0], launch.argv.data(), launch.envp.data());
  ::_exit(127);
}

// Waits until the engine ends or the socket's other end closes, which happens however this program ends. A byte before
// the close means that this program ended in order.
[[noreturn]] void guard(const Launch& launch) {
  ::setpgid(0, 0);
  for (const int s : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::signal(s, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const pid_t self = ::getpid();
  const pid_t engine = ::_Fork();
  if (engine == 0) become_engine(launch, self);
  if (engine < 0) ::_exit(127);
  ::setpgid(engine, engine);
  ::dup2(launch.alive, kAliveFd);
  ::close_range(kAliveFd + 1, ~0U, 0);  // in particular the socket's other end
  int status = 0;
  bool in_order = false, running = true;
  // The engine is started by a shell: after the shell has ended, its remaining processes must end, too.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (int left = -1;;) {
    for (int one = 0; const pid_t ended = ::waitpid(-1, &one, WNOHANG);) {
      if (ended < 0) break;
      if (ended == engine) running = false, status = one;
    }
    if (!running && ::kill(-engine, 0) != 0) break;
    if (!running && left < 0) left = kGraceMs, ::kill(-engine, SIGTERM);
    if (left == 0) ::kill(-engine, SIGKILL);
    pollfd alive{left < 0 ? kAliveFd : -1, POLLIN, 0};
    const int ready = ::poll(&alive, 1, kPollMs);
    if (left > 0) left = left > kPollMs ? left - kPollMs : 0;
    if (ready <= 0) continue;
    char byte = 0;
    if (::read(kAliveFd, &byte, 1) > 0) {
      in_order = true;
      continue;
    }
    left = kGraceMs;
    ::kill(-engine, SIGTERM);
  }
  pollfd alive{kAliveFd, POLLIN, 0};
  char byte = 0;
  while (!in_order && ::poll(&alive, 1, 0) > 0) {
    if (::read(kAliveFd, &byte, 1) <= 0) {  // this program has ended
      if (!launch.remove.empty()) ::execve(launch.remove[0], launch.remove.data(), launch.envp.data());
      break;
    }
    in_order = true;
  }
  ::_exit(WIFSIGNALED(status) ? kSignalled + WTERMSIG(status) : WEXITSTATUS(status));
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> all;
  for (std::string& s : strings) all.push_back(s.data());
  all.push_back(nullptr);
  return all;
}

}  // namespace

Result<std::unique_ptr<Child>> Child::start(const std::string& command,
                                            const std::vector<std::pair<std::string, std::string>>& environment,
                                            const std::filesystem::path& remove_after) {
  std::map<std::string, std::string> merged;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text(*entry);
    if (const auto equals = text.find('='); equals != std::string_view::npos)
      merged[std::string(text.substr(0, equals))] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : environment) merged[name] = value;
  std::vector<std::string> argv{"/bin/sh", "-c", command}, remove{"/bin/rm", "-rf", "--", remove_after.string()}, envp;
  for (const auto& [name, value] : merged) envp.push_back(name + "=" + value);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return fail(Code::kIo, "start engine", "{}", std::strerror(errno));
  Launch launch{pointers(argv), pointers(envp), {}, ends[0], ::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  if (!remove_after.empty()) launch.remove = pointers(remove);
  const pid_t pid = ::fork();
  if (pid == 0) guard(launch);
  const int why = errno;
  ::close(ends[0]);
  ::close(launch.null);
  if (pid > 0) return std::unique_ptr<Child>(new Child(pid, ends[1]));
  ::close(ends[1]);
  return fail(Code::kIo, "start engine", "{}", std::strerror(why));
}

Child::~Child() {
  const char in_order = 'e';
  [[maybe_unused]] const auto sent = ::send(socket_, &in_order, 1, MSG_NOSIGNAL);
  ::close(socket_);
  if (!ended_) ::waitpid(guard_, nullptr, 0);  // the guard kills the engine soon
}

std::optional<std::string> Child::ended() {
  int status = 0;
  if (ended_ || ::waitpid(guard_, &status, WNOHANG) != guard_) return ended_;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalled + WTERMSIG(status);
  ended_ = code > kSignalled ? fmt::format("killed by signal {}", code - kSignalled)
                             : fmt::format("exited with status {}", code);
  return ended_;
}

}  // namespace echoline::worker
