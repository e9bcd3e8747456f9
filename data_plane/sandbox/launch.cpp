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
constexpr unsigned kNobody = 65534;  // the program's user id inside the sandbox
constexpr int kFirstFd = 3;
constexpr rlim_t kAddressesPerMemory = 16;

constexpr const char* kPasswd = "nobody:x:65534:65534:nobody:/tmp:/bin/false\n";
constexpr const char* kGroup = "nogroup:x:65534:\n";

Error system_error(std::string_view what) { return fail(Code::kIo, kOperation, "{}: {}", what, std::strerror(errno)); }

Status pipe_ends(Fd& reads, Fd& writes) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return system_error("make a pipe");
  reads = Fd(ends[0]);
  writes = Fd(ends[1]);
  return ok();
}

void set_nonblocking(const Fd& fd) { ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK); }

// Descriptors passed to bubblewrap, numbered from 3 on.
class Handed {
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
class Words {
 public:
  template <class... Texts>
  void add(const Texts&... texts) {
    ((text_.append(texts), text_ += '\0'), ...);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The system's programs and libraries. On most systems /bin and similar folders are links into /usr.
void add_system(Words& words) {
  words.add("--ro-bind", "/usr", "/usr");
  for (const char* name : {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}) {
    std::error_code ec;
    const std::filesystem::path path(name);
    if (std::filesystem::is_symlink(path, ec))
      words.add("--symlink", std::filesystem::read_symlink(path, ec).string(), path.string());
    else if (std::filesystem::is_directory(path, ec))
      words.add("--ro-bind", path.string(), path.string());
  }
  for (const char* path : {"/etc/ld.so.cache", "/etc/alternatives"}) words.add("--ro-bind-try", path, path);
}

// Harmless devices only. /dev/zero is left out: mapped, it is memory that outlives the process charged for it.
void add_devices(Words& words) {
  words.add("--size", "65536", "--tmpfs", "/dev");
  for (const char* name : {"null", "full", "random", "urandom"}) {
    const std::string path = std::string("/dev/") + name;
    words.add("--dev-bind", path, path);
  }
  words.add("--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin");
  words.add("--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr");
  words.add("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev");
}

Status add_files(Words& words, Handed& handed, const Command& command, bool binds_descriptors) {
  const auto add = [&](const std::string& path, std::string_view content) -> Status {
    ECHO_ASSIGN(Fd file, memory_file(content));
    words.add("--perms", "0555", "--file", handed.add(std::move(file)), path);
    return ok();
  };
  ECHO_TRY(add("/etc/passwd", kPasswd));
  ECHO_TRY(add("/etc/group", kGroup));
  for (const auto& path : command.read_only) {
    Fd source(::open(path.c_str(), O_PATH | O_CLOEXEC));
    if (!source)
      return fail(Code::kInvalid, kOperation, "{}: cannot be shown to the program: {}", path.string(),
                  std::strerror(errno));
    if (binds_descriptors)  // bubblewrap closes them before the program starts
      words.add("--ro-bind-fd", handed.add(std::move(source)), path.string());
    else
      words.add("--ro-bind", path.string(), path.string());
  }
  for (const auto& [path, content] : command.files) ECHO_TRY(add(path, content));
  return ok();
}

Result<std::string> words_of(const Settings& settings, const Command& command, Handed& handed, Fd status, Fd filter) {
  Words words;
  words.add("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
            "--unshare-cgroup-try");
  words.add("--uid", std::to_string(kNobody), "--gid", std::to_string(kNobody), "--hostname", "sandbox");
  words.add("--die-with-parent", "--new-session");
  words.add("--json-status-fd", handed.add(std::move(status)), "--seccomp", handed.add(std::move(filter)));
  add_system(words);
  words.add("--proc", "/proc");
  words.add("--perms", "1777", "--size", std::to_string(command.limits.scratch.count), "--tmpfs", "/tmp");
  ECHO_TRY(add_files(words, handed, command, settings.binds_descriptors));
  add_devices(words);
  words.add("--remount-ro", "/", "--chdir", "/tmp");
  return words.text();
}

bool is_absolute(const std::string& path) {
  return path.size() > 1 && path[0] == '/' && std::filesystem::path(path).lexically_normal() == path;
}

Status check(const Command& command) {
  const auto wrong = [](std::string_view what) { return fail(Code::kInvalid, kOperation, "{}", what); };
  if (command.argv.empty() || !is_absolute(command.argv[0])) return wrong("expected the program by its absolute path");
  if (command.files.size() + command.read_only.size() > kFilesMax)
    return fail(Code::kInvalid, kOperation, "expected at most {} files and folders for the program", kFilesMax);
  std::size_t bytes = 0;
  const auto count = [&](const std::string& text) {
    bytes += text.size() + 1;
    return text.find('\0') == std::string::npos;
  };
  bool sound = true;
  for (const std::string& word : command.argv) sound = count(word) && sound;
  for (const auto& [name, value] : command.environment)
    sound = count(name) && count(value) && !name.empty() && name.find('=') == std::string::npos && sound;
  for (const auto& [path, content] : command.files)
    sound = count(path) && is_absolute(path) && content.size() <= kFileBytesMax && sound;
  for (const auto& path : command.read_only) sound = count(path.string()) && is_absolute(path.string()) && sound;
  if (!sound || bytes > kWordsBytesMax)
    return wrong(
        "expected words, names and absolute paths of files without NUL, below 1 MiB in all, and files below 64 MiB "
        "each");
  if (command.limits.scratch.count < 4096 || command.limits.processes == 0)
    return wrong("expected a scratch folder of 4096 bytes or more, and a process or more");
  return ok();
}

// Everything needed between clone() and exec(), where memory is shared with all threads of this process. So the child
// must not allocate and must make system calls directly (the C library's setuid() stops all threads).
struct Child {
  const char* program;
  char** argv;
  char** environment;
  std::array<int, 3> standard;
  const int* handed;
  std::size_t handed_count;
  int* moved;  // scratch space for as many descriptors
  int group_procs;
  const std::optional<uid_t>* as_user;
  pid_t parent;
  const char* failed = nullptr;
  int error = 0;
};

int give_up(Child& child, const char* what) {
  child.error = errno;
  child.failed = what;
  ::_exit(127);
}

bool become_user(uid_t user) {
  return ::syscall(SYS_setgroups, 0, nullptr) == 0 && ::syscall(SYS_setresgid, user, user, user) == 0 &&
         ::syscall(SYS_setresuid, user, user, user) == 0;
}

int become(void* argument) {
  Child& child = *static_cast<Child*>(argument);
  ::setsid();
  struct sigaction normal {};
  normal.sa_handler = SIG_DFL;
  for (const int s : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGTTIN, SIGTTOU})
    ::sigaction(s, &normal, nullptr);
  // Moves the descriptors above the target range first, so that none is overwritten.
  const int above = kFirstFd + static_cast<int>(child.handed_count);
  for (std::size_t i = 0; i < child.handed_count; ++i)
    if ((child.moved[i] = ::fcntl(child.handed[i], F_DUPFD, above)) < 0)
      return give_up(child, "hand over a descriptor");
  std::array<int, 3> standard{};
  for (std::size_t i = 0; i < 3; ++i)
    if ((standard[i] = ::fcntl(child.standard[i], F_DUPFD, above)) < 0) return give_up(child, "hand over a descriptor");
  if (child.group_procs >= 0 && ::write(child.group_procs, "0", 1) != 1) return give_up(child, "enter the cgroup");
  for (int i = 0; i < 3; ++i) ::dup2(standard[static_cast<std::size_t>(i)], i);
  for (std::size_t i = 0; i < child.handed_count; ++i) ::dup2(child.moved[i], kFirstFd + static_cast<int>(i));
  ::syscall(SYS_close_range, static_cast<unsigned>(above), ~0U, 0);
  if (*child.as_user && !become_user(**child.as_user))
    return give_up(child, "switch to another user, which root must do");
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // after become_user(), which would reset it
  if (::getppid() != child.parent) ::_exit(127);
  if (::chdir("/") != 0) return give_up(child, "enter /");
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execve(child.program, child.argv, child.environment);
  return give_up(child, "run bubblewrap");
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> all;
  for (std::string& s : strings) all.push_back(s.data());
  all.push_back(nullptr);
  return all;
}

// fork() would copy the page tables of a process that may hold a model. This call shares memory until exec() or exit,
// like posix_spawn(), while the calling thread waits. Returns the child's process id, or -1.
template <class Argument>
pid_t clone_sharing(int (*what)(void*), Argument& argument, bool changes_user) {
  constexpr std::size_t kStack = 64u << 10;
  const std::unique_ptr<char[]> stack(new char[kStack]);
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const int dumpable = ::prctl(PR_GET_DUMPABLE);
  const pid_t pid = ::clone(what, stack.get() + kStack, CLONE_VM | CLONE_VFORK | SIGCHLD, &argument);
  const int why = errno;
  if (dumpable == 1 && changes_user)
    ::prctl(PR_SET_DUMPABLE, 1);  // restored, because the flag belongs to the shared memory
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = why;
  return pid;
}

Result<pid_t> spawn(Child& child) {
  const pid_t pid = clone_sharing(become, child, child.as_user->has_value());
  if (pid < 0) return system_error("clone");
  if (child.failed == nullptr) return pid;
  ::waitpid(pid, nullptr, 0);
  return fail(Code::kUnavailable, kOperation, "{} ({}): {}", child.failed, child.program, std::strerror(child.error));
}

struct Limiting {
  pid_t pid;
  const Limits& limits;
  const std::optional<uid_t>& as_user;
  int error = 0;
};

bool set_limits(pid_t pid, const Limits& limits) {
  const auto set = [&](auto resource, std::uint64_t soft, std::uint64_t hard) {
    rlimit both{};
    if (::prlimit(pid, resource, nullptr, &both) != 0) return false;
    both = {std::min(soft, both.rlim_max), std::min(hard, both.rlim_max)};  // at most this process's own limits
    return ::prlimit(pid, resource, &both, nullptr) == 0;
  };
  const auto same = [&](auto resource, std::uint64_t value) { return set(resource, value, value); };
  const std::uint64_t cpu = limits.cpu ? static_cast<std::uint64_t>(seconds(*limits.cpu)) + 2 : 0;
  return same(RLIMIT_NPROC, limits.processes + 1) &&  // one more for bubblewrap
         same(RLIMIT_AS, limits.memory.count * kAddressesPerMemory) && same(RLIMIT_FSIZE, limits.file.count) &&
         same(RLIMIT_NOFILE, limits.open_files) && same(RLIMIT_CORE, 0) && same(RLIMIT_MEMLOCK, 65536) &&
         same(RLIMIT_MSGQUEUE, 0) && same(RLIMIT_NICE, 0) && same(RLIMIT_RTPRIO, 0) && same(RLIMIT_SIGPENDING, 1024) &&
         (!limits.cpu || set(RLIMIT_CPU, cpu, cpu + 1));
}

int set_limits_as_user(void* argument) {
  Limiting& limiting = *static_cast<Limiting*>(argument);
  if (!become_user(*limiting.as_user) || !set_limits(limiting.pid, limiting.limits)) limiting.error = errno;
  ::_exit(0);
}

}  // namespace

Result<Fd> memory_file(std::string_view content) {
  Fd file(::memfd_create("sandbox", MFD_CLOEXEC));
  if (!file) return system_error("make a file in memory");
  for (std::size_t at = 0; at < content.size();) {
    const ssize_t n = ::write(file.get(), content.data() + at, content.size() - at);
    if (n <= 0) return system_error("write a file in memory");
    at += static_cast<std::size_t>(n);
  }
  // Opens the file again, read-only.
  Fd reads(::open(fmt::format("/proc/self/fd/{}", file.get()).c_str(), O_RDONLY | O_CLOEXEC));
  if (!reads) return system_error("open a file in memory");
  return reads;
}

Result<Launched> launch(const Settings& settings, const Command& command, const std::string* input, int group_procs) {
  ECHO_TRY(check(command));
  Launched launched;
  launched.as_user = settings.as_user;
  Handed handed;
  Fd status, filter, in, out, err;
  ECHO_TRY(pipe_ends(launched.status, status));
  // bubblewrap reads its filter last. If this process dies before it has set the limits, the pipe is empty, and the
  // kernel refuses an empty filter.
  ECHO_TRY(pipe_ends(filter, launched.filter));
  ECHO_TRY(pipe_ends(launched.out, out));
  ECHO_TRY(pipe_ends(launched.err, err));
  if (input != nullptr) {
    ECHO_ASSIGN(in, memory_file(*input));
  } else {
    // A socket, because writing to a pipe without a reader raises a signal.
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return system_error("make a socket");
    launched.in = Fd(ends[0]);
    in = Fd(ends[1]);
    ::shutdown(in.get(), SHUT_WR);
  }
  for (const Fd* fd : {&launched.status, &launched.out, &launched.err, &launched.in})
    if (*fd) set_nonblocking(*fd);

  ECHO_ASSIGN(const std::string words, words_of(settings, command, handed, std::move(status), std::move(filter)));
  ECHO_ASSIGN(Fd words_file, memory_file(words));
  std::vector<std::string> argv{settings.bubblewrap, "--args", handed.add(std::move(words_file)), "--"};
  argv.insert(argv.end(), command.argv.begin(), command.argv.end());
  std::vector<std::string> environment;
  std::map<std::string, std::string> all{{"PATH", "/usr/local/bin:/usr/bin:/bin"}, {"HOME", "/tmp"}};
  for (const auto& [name, value] : command.environment) all[name] = value;
  for (const auto& [name, value] : all) environment.push_back(name + "=" + value);
  std::vector<char*> argv_pointers = pointers(argv), environment_pointers = pointers(environment);
  std::vector<int> numbers;
  for (const Fd& fd : handed.all()) numbers.push_back(fd.get());
  std::vector<int> moved(numbers.size());
  Child child{settings.bubblewrap.c_str(),
              argv_pointers.data(),
              environment_pointers.data(),
              {in.get(), out.get(), err.get()},
              numbers.data(),
              numbers.size(),
              moved.data(),
              group_procs,
              &settings.as_user,
              ::getpid()};
  ECHO_ASSIGN(launched.pid, spawn(child));
  launched.pidfd = Fd(static_cast<int>(::syscall(SYS_pidfd_open, launched.pid, 0)));
  if (launched.pidfd) return launched;
  const Error error =
      fail(Code::kUnavailable, kOperation, "pidfd_open: {}; Linux 5.4 or newer is needed", std::strerror(errno));
  ::kill(launched.pid, SIGKILL);
  ::waitpid(launched.pid, nullptr, 0);
  return error;
}

Status limit(pid_t pid, const Limits& limits, const std::optional<uid_t>& as_user) {
  // Without CAP_SYS_RESOURCE, as in many containers, root may not set the limits; the program's own user may.
  Limiting limiting{pid, limits, as_user};
  if (as_user) {
    const pid_t child = clone_sharing(set_limits_as_user, limiting, true);
    if (child < 0) return system_error("clone");
    ::waitpid(child, nullptr, 0);
  } else if (!set_limits(pid, limits)) {
    limiting.error = errno;
  }
  if (limiting.error != 0) return fail(Code::kIo, kOperation, "limit the program: {}", std::strerror(limiting.error));
  return ok();
}

}  // namespace echoline::sandbox
