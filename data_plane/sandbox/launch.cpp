// Starts bubblewrap, which runs a program in namespaces of its own, with the arguments and descriptors for one program.
// pool.cpp calls it.
#include "data_plane/sandbox/launch.hpp"

#include <fcntl.h>
#include <grp.h>
#include <linux/close_range.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace echoline::sandbox {
namespace {

constexpr std::string_view kOperation = "start sandbox";
constexpr unsigned kUserInside = 65534;  // the program's user id inside the sandbox
constexpr int kFirstFd = 3;              // after standard input, output and error
constexpr int kNotStarted = 127;         // exit status of a child that could not run the program, as in shells

// Limits on the program.
constexpr rlim_t kAddressesPerMemory = 16;      // interpreters reserve much more address space than they use
constexpr std::uint64_t kCpuMarginSeconds = 2;  // UsageMeter stops the program first; the kernel's limit is a backstop
constexpr std::uint64_t kScratchBytesMin = 4096;  // of /tmp
constexpr std::uint64_t kLockedBytesMax = 65536, kPendingSignalsMax = 1024;

// Content of /etc/passwd and /etc/group in the sandbox, for programs that look up their own user.
constexpr const char* kPasswd = "nobody:x:65534:65534:nobody:/tmp:/bin/false\n";
constexpr const char* kGroup = "nogroup:x:65534:\n";

Error system_error(std::string_view what) { return fail(Code::kIo, kOperation, "{}: {}", what, std::strerror(errno)); }

Status make_pipe(Fd& read_end, Fd& write_end) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return system_error("make a pipe");
  read_end = Fd(ends[0]);
  write_end = Fd(ends[1]);
  return ok();
}

void set_nonblocking(const Fd& fd) { ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK); }

// Descriptors passed to bubblewrap, numbered from 3 on.
class InheritedDescriptors {
 public:
  std::string add(Fd fd) {
    fds_.push_back(std::move(fd));
    return std::to_string(kFirstFd + static_cast<int>(fds_.size()) - 1);
  }
  const std::vector<Fd>& all() const { return fds_; }

 private:
  std::vector<Fd> fds_;
};

// bubblewrap's arguments, separated by NUL as it reads them.
class BubblewrapArguments {
 public:
  template <class... Texts>
  void add(const Texts&... texts) {
    ((text_.append(texts), text_ += '\0'), ...);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Shows the system's programs and libraries. On most systems /bin and similar folders are links into /usr.
void add_system(BubblewrapArguments& arguments) {
  arguments.add("--ro-bind", "/usr", "/usr");
  for (const char* name : {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}) {
    std::error_code ignored;
    const std::filesystem::path path(name);
    if (std::filesystem::is_symlink(path, ignored))
      arguments.add("--symlink", std::filesystem::read_symlink(path, ignored).string(), path.string());
    else if (std::filesystem::is_directory(path, ignored))
      arguments.add("--ro-bind", path.string(), path.string());
  }
  for (const char* path : {"/etc/ld.so.cache", "/etc/alternatives"}) arguments.add("--ro-bind-try", path, path);
}

// Shows harmless devices only. /dev/zero is left out: mapped, it is memory that outlives the process charged for it.
void add_devices(BubblewrapArguments& arguments) {
  arguments.add("--size", "65536", "--tmpfs", "/dev");
  for (const char* name : {"null", "full", "random", "urandom"}) {
    const std::string path = std::string("/dev/") + name;
    arguments.add("--dev-bind", path, path);
  }
  arguments.add("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin");
  arguments.add("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr");
  arguments.add("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev");
}

Status add_files(BubblewrapArguments& arguments, InheritedDescriptors& inherited, const Command& command,
                 bool supports_ro_bind_fd) {
  const auto add = [&](const std::string& path, std::string_view content) -> Status {
    ECHO_ASSIGN(Fd file, make_memory_file(content));
    arguments.add("--perms", "0555", "--file", inherited.add(std::move(file)), path);
    return ok();
  };
  ECHO_TRY(add("/etc/passwd", kPasswd));
  ECHO_TRY(add("/etc/group", kGroup));
  for (const auto& path : command.read_only) {
    Fd source(::open(path.c_str(), O_PATH | O_CLOEXEC));
    if (!source)
      return fail(Code::kInvalid, kOperation, "{}: cannot be shown to the program: {}", path.string(),
                  std::strerror(errno));
    if (supports_ro_bind_fd)  // bubblewrap closes the descriptor before the program starts
      arguments.add("--ro-bind-fd", inherited.add(std::move(source)), path.string());
    else
      arguments.add("--ro-bind", path.string(), path.string());
  }
  for (const auto& [path, content] : command.files) ECHO_TRY(add(path, content));
  return ok();
}

Result<std::string> bubblewrap_arguments(const LaunchSettings& settings, const Command& command,
                                         InheritedDescriptors& inherited, Fd status, Fd filter) {
  BubblewrapArguments arguments;
  arguments.add("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                "--unshare-cgroup-try");
  arguments.add("--uid", std::to_string(kUserInside), "--gid", std::to_string(kUserInside), "--hostname", "sandbox");
  arguments.add("--die-with-parent", "--new-session");
  arguments.add("--json-status-fd", inherited.add(std::move(status)), "--seccomp", inherited.add(std::move(filter)));
  add_system(arguments);
  arguments.add("--proc", "/proc");
  arguments.add("--perms", "1777", "--size", std::to_string(command.limits.scratch.count), "--tmpfs", "/tmp");
  ECHO_TRY(add_files(arguments, inherited, command, settings.supports_ro_bind_fd));
  add_devices(arguments);
  arguments.add("--remount-ro", "/", "--chdir", "/tmp");
  return arguments.text();
}

bool is_absolute(const std::string& path) {
  return path.size() > 1 && path[0] == '/' && std::filesystem::path(path).lexically_normal() == path;
}

Status check(const Command& command) {
  const auto invalid = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
  if (command.argv.empty() || !is_absolute(command.argv[0]))
    return invalid("expected the program by its absolute path");
  if (command.files.size() + command.read_only.size() > kFilesMax)
    return fail(Code::kInvalid, kOperation, "expected at most {} files and folders for the program", kFilesMax);
  std::size_t bytes = 0;
  const auto count_bytes_and_check = [&](const std::string& text) {
    bytes += text.size() + 1;
    return text.find('\0') == std::string::npos;
  };
  bool valid = true;
  for (const std::string& word : command.argv) valid = count_bytes_and_check(word) && valid;
  for (const auto& [name, value] : command.environment)
    valid = count_bytes_and_check(name) && count_bytes_and_check(value) && !name.empty() &&
            name.find('=') == std::string::npos && valid;
  for (const auto& [path, content] : command.files)
    valid = count_bytes_and_check(path) && is_absolute(path) && content.size() <= kFileBytesMax && valid;
  for (const auto& path : command.read_only)
    valid = count_bytes_and_check(path.string()) && is_absolute(path.string()) && valid;
  if (!valid || bytes > kArgumentBytesMax)
    return invalid(
        "expected words, names and absolute paths of files without NUL, below 1 MiB in all, and files below 64 MiB "
        "each");
  if (command.limits.scratch.count < kScratchBytesMin || command.limits.processes == 0)
    return invalid("expected a scratch folder of 4096 bytes or more, and a process or more");
  return ok();
}

// Everything needed between clone() and exec(), where memory is shared with all threads of this process. So the child
// must not allocate and must make system calls directly (the C library's setuid() stops all threads).
struct Child {
  const char* program;
  char** argv;
  char** environment;
  std::array<int, 3> standard_fds;  // descriptors for its standard input, output and error
  const int* inherited;             // descriptors to pass on, as 3 and following
  std::size_t inherited_count;
  int* moved_fds;   // space for `inherited_count` descriptors, because the child must not allocate
  int group_procs;  // cgroup.procs of the group to enter; negative: none
  const std::optional<uid_t>* as_user;
  pid_t parent;
  const char* failed = nullptr;  // what failed, for the parent
  int error = 0;                 // its errno
};

int exit_with_error(Child& child, const char* what) {
  child.error = errno;
  child.failed = what;
  ::_exit(kNotStarted);
}

bool switch_user(uid_t user) {
  return ::syscall(SYS_setgroups, 0, nullptr) == 0 && ::syscall(SYS_setresgid, user, user, user) == 0 &&
         ::syscall(SYS_setresuid, user, user, user) == 0;
}

int run_child(void* argument) {
  Child& child = *static_cast<Child*>(argument);
  ::setsid();
  struct sigaction default_action {};
  default_action.sa_handler = SIG_DFL;
  // An ignored signal would stay ignored in the program.
  for (const int ignorable :
       {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGTTIN, SIGTTOU})
    ::sigaction(ignorable, &default_action, nullptr);
  // Moves the descriptors above the target range first, so that none is overwritten.
  const int first_free_fd = kFirstFd + static_cast<int>(child.inherited_count);
  for (std::size_t i = 0; i < child.inherited_count; ++i)
    if ((child.moved_fds[i] = ::fcntl(child.inherited[i], F_DUPFD, first_free_fd)) < 0)
      return exit_with_error(child, "hand over a descriptor");
  std::array<int, 3> standard_fds{};
  for (std::size_t i = 0; i < 3; ++i)
    if ((standard_fds[i] = ::fcntl(child.standard_fds[i], F_DUPFD, first_free_fd)) < 0)
      return exit_with_error(child, "hand over a descriptor");
  if (child.group_procs >= 0 && ::write(child.group_procs, "0", 1) != 1)  // 0: the process that writes
    return exit_with_error(child, "enter the cgroup");
  for (int i = 0; i < 3; ++i) ::dup2(standard_fds[static_cast<std::size_t>(i)], i);
  for (std::size_t i = 0; i < child.inherited_count; ++i) ::dup2(child.moved_fds[i], kFirstFd + static_cast<int>(i));
  ::syscall(SYS_close_range, static_cast<unsigned>(first_free_fd), ~0U, 0);
  if (*child.as_user && !switch_user(**child.as_user))
    return exit_with_error(child, "switch to another user, which root must do");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);                     // after switch_user(), which would reset it
  if (::getppid() != child.parent) ::_exit(kNotStarted);  // the parent has died
  if (::chdir("/") != 0) return exit_with_error(child, "enter /");
  sigset_t no_signals;
  sigemptyset(&no_signals);
  ::sigprocmask(SIG_SETMASK, &no_signals, nullptr);
  ::execve(child.program, child.argv, child.environment);
  return exit_with_error(child, "run bubblewrap");
}

std::vector<char*> null_terminated(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

// fork() would copy the page tables of a process that may hold a model. This call shares memory until exec() or exit,
// like posix_spawn(), while the calling thread waits. Returns the child's process id, or -1.
template <class Argument>
pid_t clone_sharing(int (*function)(void*), Argument& argument, bool changes_user) {
  constexpr std::size_t kStackBytes = 64u << 10;
  const std::unique_ptr<char[]> stack(new char[kStackBytes]);
  sigset_t all_signals, previous_mask;
  sigfillset(&all_signals);
  ::pthread_sigmask(SIG_SETMASK, &all_signals, &previous_mask);
  const int dumpable = ::prctl(PR_GET_DUMPABLE);
  const pid_t pid = ::clone(function, stack.get() + kStackBytes, CLONE_VM | CLONE_VFORK | SIGCHLD, &argument);
  const int clone_errno = errno;
  if (dumpable == 1 && changes_user)
    ::prctl(PR_SET_DUMPABLE, 1);  // restored, because the flag belongs to the shared memory
  ::pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
  errno = clone_errno;
  return pid;
}

Result<pid_t> spawn(Child& child) {
  const pid_t pid = clone_sharing(run_child, child, child.as_user->has_value());
  if (pid < 0) return system_error("clone");
  if (child.failed == nullptr) return pid;
  ::waitpid(pid, nullptr, 0);
  return fail(Code::kUnavailable, kOperation, "{} ({}): {}", child.failed, child.program, std::strerror(child.error));
}

// The argument of set_limits_as_user(), which runs in a process of its own that shares this memory.
struct LimitRequest {
  pid_t pid;
  const Limits& limits;
  const std::optional<uid_t>& as_user;
  int error = 0;
};

bool set_resource_limits(pid_t pid, const Limits& limits) {
  const auto set = [&](auto resource, std::uint64_t soft, std::uint64_t hard) {
    rlimit limit{};
    if (::prlimit(pid, resource, nullptr, &limit) != 0) return false;
    limit = {std::min(soft, limit.rlim_max), std::min(hard, limit.rlim_max)};  // at most this process's own limits
    return ::prlimit(pid, resource, &limit, nullptr) == 0;
  };
  const auto set_both = [&](auto resource, std::uint64_t value) { return set(resource, value, value); };
  const std::uint64_t cpu_s = limits.cpu ? static_cast<std::uint64_t>(seconds(*limits.cpu)) + kCpuMarginSeconds : 0;
  return set_both(RLIMIT_NPROC, limits.processes + 1) &&  // one more for bubblewrap
         set_both(RLIMIT_AS, limits.memory.count * kAddressesPerMemory) && set_both(RLIMIT_FSIZE, limits.file.count) &&
         set_both(RLIMIT_NOFILE, limits.open_files) && set_both(RLIMIT_CORE, 0) &&
         set_both(RLIMIT_MEMLOCK, kLockedBytesMax) && set_both(RLIMIT_MSGQUEUE, 0) && set_both(RLIMIT_NICE, 0) &&
         set_both(RLIMIT_RTPRIO, 0) && set_both(RLIMIT_SIGPENDING, kPendingSignalsMax) &&
         (!limits.cpu || set(RLIMIT_CPU, cpu_s, cpu_s + 1));  // SIGXCPU first, SIGKILL a second later
}

int set_limits_as_user(void* argument) {
  LimitRequest& request = *static_cast<LimitRequest*>(argument);
  if (!switch_user(*request.as_user) || !set_resource_limits(request.pid, request.limits)) request.error = errno;
  ::_exit(0);
}

}  // namespace

Result<Fd> make_memory_file(std::string_view content) {
  Fd file(::memfd_create("sandbox", MFD_CLOEXEC));
  if (!file) return system_error("make a file in memory");
  for (std::size_t written = 0; written < content.size();) {
    const ssize_t just_written = ::write(file.get(), content.data() + written, content.size() - written);
    if (just_written <= 0) return system_error("write a file in memory");
    written += static_cast<std::size_t>(just_written);
  }
  // Opens the file again, read-only and from its beginning.
  Fd read_end(::open(fmt::format("/proc/self/fd/{}", file.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!read_end) return system_error("open a file in memory");
  return read_end;
}

Result<LaunchedProgram> launch(const LaunchSettings& settings, const Command& command, const std::string* input,
                               int group_procs) {
  ECHO_TRY(check(command));
  LaunchedProgram launched;
  launched.as_user = settings.as_user;
  InheritedDescriptors inherited;
  Fd status, filter, in, out, err;
  ECHO_TRY(make_pipe(launched.status, status));
  // bubblewrap reads its filter last. If this process dies before it has set the limits, the pipe is empty, and the
  // kernel refuses an empty filter.
  ECHO_TRY(make_pipe(filter, launched.filter));
  ECHO_TRY(make_pipe(launched.out, out));
  ECHO_TRY(make_pipe(launched.err, err));
  if (input != nullptr) {
    ECHO_ASSIGN(in, make_memory_file(*input));
  } else {
    // A socket, because writing to a pipe without a reader raises a signal.
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return system_error("make a socket");
    launched.in = Fd(ends[0]);
    in = Fd(ends[1]);
    ::shutdown(in.get(), SHUT_WR);  // the program only reads from it
  }
  for (const Fd* fd : {&launched.status, &launched.out, &launched.err, &launched.in})
    if (*fd) set_nonblocking(*fd);

  ECHO_ASSIGN(const std::string arguments,
              bubblewrap_arguments(settings, command, inherited, std::move(status), std::move(filter)));
  ECHO_ASSIGN(Fd arguments_file, make_memory_file(arguments));
  std::vector<std::string> argv{settings.bubblewrap, "--args", inherited.add(std::move(arguments_file)), "--"};
  argv.insert(argv.end(), command.argv.begin(), command.argv.end());
  std::vector<std::string> environment;
  std::map<std::string, std::string> variables{{"PATH", "/usr/local/bin:/usr/bin:/bin"}, {"HOME", "/tmp"}};
  for (const auto& [name, value] : command.environment) variables[name] = value;
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<char*> argv_pointers = null_terminated(argv), environment_pointers = null_terminated(environment);
  std::vector<int> inherited_fds;
  for (const Fd& fd : inherited.all()) inherited_fds.push_back(fd.get());
  std::vector<int> moved_fds(inherited_fds.size());
  Child child{.program = settings.bubblewrap.c_str(),
              .argv = argv_pointers.data(),
              .environment = environment_pointers.data(),
              .standard_fds = {in.get(), out.get(), err.get()},
              .inherited = inherited_fds.data(),
              .inherited_count = inherited_fds.size(),
              .moved_fds = moved_fds.data(),
              .group_procs = group_procs,
              .as_user = &settings.as_user,
              .parent = ::getpid()};
  ECHO_ASSIGN(launched.pid, spawn(child));
  launched.pidfd = Fd(static_cast<int>(::syscall(SYS_pidfd_open, launched.pid, 0)));
  if (launched.pidfd) return launched;
  const Error error =
      fail(Code::kUnavailable, kOperation, "pidfd_open: {}; Linux 5.4 or newer is needed", std::strerror(errno));
  ::kill(launched.pid, SIGKILL);
  ::waitpid(launched.pid, nullptr, 0);
  return error;
}

Status set_limits(pid_t pid, const Limits& limits, const std::optional<uid_t>& as_user) {
  // Without CAP_SYS_RESOURCE, as in many containers, root may not set the limits; the program's own user may.
  LimitRequest request{.pid = pid, .limits = limits, .as_user = as_user};
  if (as_user) {
    const pid_t child = clone_sharing(set_limits_as_user, request, /*changes_user=*/true);
    if (child < 0) return system_error("clone");
    ::waitpid(child, nullptr, 0);
  } else if (!set_resource_limits(pid, limits)) {
    request.error = errno;
  }
  if (request.error != 0) return fail(Code::kIo, kOperation, "limit the program: {}", std::strerror(request.error));
  return ok();
}

}  // namespace echoline::sandbox
