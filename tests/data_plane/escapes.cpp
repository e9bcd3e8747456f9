// Attempts of a program in a sandbox to escape. `escapes NAME [WORDS]` prints its result, "stopped" if an attempt
// failed as it must. sandbox_test.cpp states the expected output.
#include <dirent.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/keyctl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <string>

namespace {

extern "C" char** environ;

bool all_stopped = true;

// Checks that a call's `result` is a failure with one of these errors. 0 stands for no further error.
void must_fail(const char* what, long result, int expected, int expected_too = 0, int third_expected = 0) {
  const int error = errno;  // not 0 after a failure
  if (result == -1 && (error == expected || error == expected_too || error == third_expected)) return;
  all_stopped = false;
  std::printf("%s: %s\n", what, result == -1 ? std::strerror(error) : "went through");
}

// Prints the result of all must_fail() and gives the exit status.
int verdict() {
  if (all_stopped) std::printf("stopped\n");
  return all_stopped ? 0 : 1;
}

[[noreturn]] void pause_for_ever() {
  for (;;) ::pause();
}

int fork_bomb(char**) {
  for (;;) ::fork();
}

int trace(char**) {
  must_fail("PTRACE_TRACEME", ::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr), EPERM);
  must_fail("PTRACE_ATTACH", ::ptrace(PTRACE_ATTACH, ::getppid(), nullptr, nullptr), EPERM);
  char block[8];
  iovec own_block{block, sizeof block}, parent_block{block, sizeof block};
  must_fail("process_vm_readv", ::syscall(SYS_process_vm_readv, ::getppid(), &own_block, 1, &parent_block, 1, 0),
            EPERM);
  must_fail("pidfd_getfd", ::syscall(SYS_pidfd_getfd, 0, 0, 0), EPERM);
  return verdict();
}

// WORDS: a process id outside.
int others(char** words) {
  const auto outside = static_cast<pid_t>(std::atol(words[0]));
  must_fail("kill", ::kill(outside, 0), ESRCH);
  must_fail("look", ::access(("/proc/" + std::string(words[0])).c_str(), F_OK), ENOENT);
  DIR* folder = ::opendir("/proc");
  int processes = 0;
  while (const dirent* entry = folder ? ::readdir(folder) : nullptr)
    processes += entry->d_name[0] >= '0' && entry->d_name[0] <= '9';
  std::printf("%d processes\n", processes);
  must_fail("/proc/sys", ::open("/proc/sys/kernel/hostname", O_WRONLY), EACCES, EROFS);
  must_fail("/proc/sysrq-trigger", ::open("/proc/sysrq-trigger", O_WRONLY), EACCES, EROFS, ENOENT);
  return verdict();
}

void print_file(const char* path) {
  const int fd = ::open(path, O_RDONLY);
  char block[4096];
  for (ssize_t bytes_read; (bytes_read = ::read(fd, block, sizeof block)) > 0;)
    for (ssize_t i = 0; i < bytes_read; ++i) std::putchar(block[i] == 0 ? '\n' : block[i]);
}

// WORDS: files that exist outside.
int read_files(char** words) {
  for (; *words; ++words) {
    must_fail(*words, ::open(*words, O_RDONLY), ENOENT);
    must_fail("through /proc", ::open(("/proc/1/root" + std::string(*words)).c_str(), O_RDONLY), ENOENT, EACCES);
    must_fail("through ..", ::open(("/tmp/../../../.." + std::string(*words)).c_str(), O_RDONLY), ENOENT);
  }
  for (char** entry = environ; *entry; ++entry) std::printf("%s\n", *entry);
  print_file("/proc/self/environ");
  print_file("/proc/1/environ");
  print_file("/proc/1/cmdline");
  return verdict();
}

// WORDS: a folder and a file that exist outside.
int links(char** words) {
  ::symlink("/", "/tmp/root");
  ::symlink("../../../../..", "/tmp/up");
  ::symlink(words[1], "/tmp/file");
  must_fail("symlink to a file", ::open("/tmp/file", O_RDONLY), ENOENT);
  for (const char* start : {"/tmp/root", "/tmp/up"}) {
    must_fail("through a symlink", ::open((std::string(start) + words[1]).c_str(), O_RDONLY), ENOENT);
    must_fail("make a file", ::open((std::string(start) + "/usr/escaped").c_str(), O_CREAT | O_WRONLY, 0600), EROFS);
    must_fail("make a folder", ::mkdir((std::string(start) + words[0] + "/escaped").c_str(), 0700), ENOENT, EROFS);
  }
  must_fail("hard link", ::link("/etc/passwd", "/tmp/passwd"), EXDEV, EPERM);
  must_fail("write /etc", ::open("/etc/passwd", O_WRONLY), EROFS, EACCES);
  must_fail("write /dev", ::open("/dev/escaped", O_CREAT | O_WRONLY, 0600), EROFS);
  must_fail("make a device", ::mknod("/tmp/mem", S_IFCHR | 0600, makedev(1, 1)), EPERM);
  return verdict();
}

// WORDS: an abstract name and a path of sockets that listen outside.
int sockets(char** words) {
  for (const int family : {AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_VSOCK, AF_ALG, AF_BLUETOOTH})
    must_fail("socket",
              ::socket(family,
                       family == AF_ALG                              ? SOCK_SEQPACKET
                       : family == AF_NETLINK || family == AF_PACKET ? SOCK_RAW
                                                                     : SOCK_STREAM,
                       0),
              EPERM);
  must_fail("socket, upper half", ::syscall(SYS_socket, (1ul << 32) | AF_INET, SOCK_STREAM, 0), EPERM);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = words[0];
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  must_fail("abstract socket", ::connect(fd, reinterpret_cast<sockaddr*>(&address), length), ECONNREFUSED);
  address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, words[1], sizeof address.sun_path - 1);
  must_fail("socket file", ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), ENOENT);
  return verdict();
}

int much_output(char**) {
  static char block[1 << 20];
  std::memset(block, 'x', sizeof block);
  for (int i = 0; i < 10 << 10; ++i)
    if (::write(1, block, sizeof block) < 0) return 1;
  return 0;
}

int much_memory(char**) {
  for (int i = 0; i < 10 << 10; ++i) {
    auto* volatile block = static_cast<volatile char*>(std::malloc(1 << 20));
    if (block == nullptr) return 1;
    for (int offset = 0; offset < 1 << 20; offset += 4096)
      block[offset] = 1;  // each page, because only used pages count
  }
  return 0;
}

int memory_at_once(char**) {
  void* memory = ::mmap(nullptr, 10ul << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  must_fail("10 GB", memory == MAP_FAILED ? -1 : 0, ENOMEM);
  return verdict();
}

// Memory that would outlive the process that fills it.
int hidden_memory(char**) {
  void* memory = ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  must_fail("shared memory", memory == MAP_FAILED ? -1 : 0, EPERM);
  must_fail("memfd_create", ::syscall(SYS_memfd_create, "m", 0), ENOSYS);
  must_fail("shmget", ::syscall(SYS_shmget, 0, 4096, 01600), EPERM);
  must_fail("mq_open", ::syscall(SYS_mq_open, "m", O_CREAT | O_RDWR, 0600, nullptr), EPERM);
  must_fail("/dev/zero", ::open("/dev/zero", O_RDWR), ENOENT);
  must_fail("mlock", ::mlock(std::malloc(1 << 20), 1 << 20), ENOMEM, EPERM);
  return verdict();
}

// A file in /tmp, as large as possible.
int huge_file(char**) {
  ::signal(SIGXFSZ, SIG_IGN);
  static char block[1 << 16];
  const int fd = ::open("/tmp/huge", O_CREAT | O_WRONLY, 0600);
  std::size_t bytes_written = 0;
  for (ssize_t n; (n = ::write(fd, block, sizeof block)) > 0;) bytes_written += static_cast<std::size_t>(n);
  std::printf("%zu bytes: %s\n", bytes_written, std::strerror(errno));
  return 0;
}

int many_files(char**) {
  for (int i = 0; i < 100'000'000; ++i) {
    const int fd = ::open(("/tmp/" + std::to_string(i)).c_str(), O_CREAT | O_WRONLY, 0600);
    if (fd < 0) return std::printf("%d files: %s\n", i, std::strerror(errno)), 0;
    ::close(fd);
  }
  return 0;
}

int spin(char**) {
  for (volatile unsigned long i = 0;;) i = i + 1;
}

// Processes one after another, each for less than the limit.
int spin_in_turn(char**) {
  for (;;) {
    if (::fork() == 0) {
      timespec cpu_time{};
      do ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_time);
      while (cpu_time.tv_nsec < 100'000'000);
      ::_exit(0);
    }
    ::wait(nullptr);
  }
}

int kill_all(char**) {
  ::kill(::getppid(), SIGKILL);
  ::kill(::getppid(), SIGSTOP);
  ::kill(1, SIGKILL);
  if (::fork() == 0) pause_for_ever();
  ::kill(-1, SIGKILL);
  std::printf("alive\n");
  return 5;
}

int survive(char**) {
  for (int i = 0; i < 4; ++i)
    if (::fork() == 0) {
      ::setsid();
      if (::fork() != 0) ::_exit(0);
      for (const int signal_number : {SIGTERM, SIGHUP, SIGINT, SIGPIPE}) ::signal(signal_number, SIG_IGN);
      if (i % 2 == 0)
        for (int fd = 0; fd < 100; ++fd) ::close(fd);
      pause_for_ever();
    }
  while (::wait(nullptr) > 0) {
  }
  std::printf("gone\n");
  return 0;
}

int close_output(char**) {
  for (int fd = 0; fd < 100; ++fd) ::close(fd);
  const timespec delay{.tv_sec = 0, .tv_nsec = 100'000'000};
  ::nanosleep(&delay, nullptr);
  return 7;
}

int many_descriptors(char**) {
  int opened = 0;
  while (::dup(0) >= 0) ++opened;
  std::printf("%d: %s\n", opened, std::strerror(errno));
  const rlimit higher{.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
  must_fail("raise the limit", ::setrlimit(RLIMIT_NOFILE, &higher), EPERM);
  must_fail("raise the limit", ::setrlimit(RLIMIT_NPROC, &higher), EPERM);
  return verdict();
}

int descriptors(char**) {
  for (int fd = 0; fd < 1024; ++fd)
    if (::fcntl(fd, F_GETFD) >= 0) std::printf("%d ", fd);
  return 0;
}

int system_calls(char**) {
  must_fail("mount", ::mount("none", "/tmp", "tmpfs", 0, nullptr), EPERM);
  must_fail("umount", ::umount2("/tmp", MNT_DETACH), EPERM);
  must_fail("fsopen", ::syscall(SYS_fsopen, "tmpfs", 0), EPERM);
  must_fail("chroot", ::chroot("/tmp"), EPERM);
  must_fail("pivot_root", ::syscall(SYS_pivot_root, "/tmp", "/tmp"), EPERM);
  for (const int flag : {CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET}) {
    must_fail("unshare", ::unshare(flag), EPERM);
    must_fail("clone", ::syscall(SYS_clone, static_cast<unsigned long>(flag) | SIGCHLD, nullptr, nullptr, nullptr, 0),
              EPERM);
  }
  char arguments[64]{};
  must_fail("clone3", ::syscall(SYS_clone3, arguments, sizeof arguments), ENOSYS);
  must_fail("setns", ::setns(::open("/proc/1/ns/user", O_RDONLY), 0), EPERM);
  must_fail("keyctl", ::syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_USER_KEYRING, 1), EPERM);
  must_fail("add_key", ::syscall(SYS_add_key, "user", "k", "v", 1, KEY_SPEC_USER_KEYRING), EPERM);
  must_fail("bpf", ::syscall(SYS_bpf, BPF_MAP_CREATE, arguments, sizeof arguments), EPERM);
  must_fail("userfaultfd", ::syscall(SYS_userfaultfd, 0), EPERM);
  must_fail("perf_event_open", ::syscall(SYS_perf_event_open, arguments, 0, -1, -1, 0), EPERM);
  must_fail("io_uring_setup", ::syscall(SYS_io_uring_setup, 1, arguments), ENOSYS);
  must_fail("open_by_handle_at", ::syscall(SYS_open_by_handle_at, 0, arguments, 0), EPERM);
  must_fail("kexec_load", ::syscall(SYS_kexec_load, 0, 0, 0, 0), EPERM);
  must_fail("init_module", ::syscall(SYS_init_module, 0, 0, ""), EPERM);
  must_fail("sethostname", ::sethostname("x", 1), EPERM);
  return verdict();
}

int terminal(char**) {
  char letter = 'x';
  must_fail("TIOCSTI", ::ioctl(0, TIOCSTI, &letter), EPERM);
  must_fail("TIOCSTI, upper half", ::syscall(SYS_ioctl, 0, (1ul << 32) | TIOCSTI, &letter), EPERM);
  must_fail("TIOCLINUX", ::ioctl(0, TIOCLINUX, &letter), EPERM);
  must_fail("/dev/tty", ::open("/dev/tty", O_RDWR), ENOENT);
  must_fail("/dev/ptmx", ::open("/dev/ptmx", O_RDWR), ENOENT);
  return verdict();
}

#ifdef __x86_64__
int other_architecture(char**) {
  long result = 20;  // the number of getpid for 32-bit programs
  asm volatile("int $0x80" : "+a"(result)::"memory", "cc");
  std::printf("went through: %ld\n", result);
  return 0;
}

// Calls through x32, the interface for 32-bit pointers on x86-64.
int x32(char**) {
  constexpr long kX32Bit = 0x40000000, kGetpid = 39;
  std::printf("went through: %ld\n", ::syscall(kX32Bit | kGetpid));
  return 0;
}
#endif

int wait_for_ever(char**) { pause_for_ever(); }

}  // namespace

int main(int count, char** words) {
  const std::map<std::string, int (*)(char**)> attempts{
      {"fork_bomb", fork_bomb},
      {"trace", trace},
      {"others", others},
      {"read_files", read_files},
      {"links", links},
      {"sockets", sockets},
      {"much_output", much_output},
      {"much_memory", much_memory},
      {"memory_at_once", memory_at_once},
      {"hidden_memory", hidden_memory},
      {"huge_file", huge_file},
      {"many_files", many_files},
      {"spin", spin},
      {"spin_in_turn", spin_in_turn},
      {"wait", wait_for_ever},
      {"kill_all", kill_all},
      {"survive", survive},
      {"close_output", close_output},
      {"many_descriptors", many_descriptors},
      {"descriptors", descriptors},
      {"system_calls", system_calls},
      {"terminal", terminal},
#ifdef __x86_64__
      {"other_architecture", other_architecture},
      {"x32", x32},
#endif
  };
  constexpr pid_t kSandboxedProcess = 2;  // the first process is bubblewrap
  constexpr uid_t kNobody = 65534;
  if (::getpid() != kSandboxedProcess || ::geteuid() != kNobody)
    return std::printf("only for a sandbox: it would do harm here\n"), 98;
  const auto it = count > 1 ? attempts.find(words[1]) : attempts.end();
  if (it == attempts.end()) return std::printf("no such attempt\n"), 99;
  return it->second(words + 2);
}
