// Programs in sandboxes: their attempts (escapes.cpp) and the required result of each, the number that runs at once,
// and their end.
#include "data_plane/sandbox/sandbox.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <sstream>
#include <thread>

#include "base/files.hpp"
#include "data_plane/sandbox/control_group.hpp"

namespace echoline::sandbox {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const std::filesystem::path kEscapes = ECHOLINE_ESCAPES;

// True if the kernel allows an unprivileged user a user namespace with a process namespace of its own.
bool kernel_allows() {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 &&
        (::setresgid(kNobody, kNobody, kNobody) != 0 || ::setresuid(kNobody, kNobody, kNobody) != 0))
      ::_exit(1);
    ::_exit(::unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET) == 0 ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  return status == 0;
}

// Number of this machine's processes that have `word` as an argument.
int processes_with(const std::string& word) {
  int processes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "cmdline");
    for (std::string argument; std::getline(file, argument, '\0');) processes += argument == word;
  }
  return processes;
}

class Sandbox : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto pool = Pool::start({.running_max = 2, .waiting_max = 3, .long_lived_max = 2});
    if (pool)
      pool_ = std::move(*pool);
    else
      refusal_ = pool.error().message();
  }
  static void TearDownTestSuite() { pool_.reset(); }
  void SetUp() override {
    if (pool_) return;
    if (!kernel_allows()) GTEST_SKIP() << "the kernel allows no user namespaces: " << refusal_;
    FAIL() << refusal_;
  }

  // Starts escapes.cpp with the name of an attempt and its arguments.
  static Command attempt(std::vector<std::string> words) {
    Command command;
    command.argv = {kEscapes.string()};
    command.argv.insert(command.argv.end(), words.begin(), words.end());
    command.read_only = {kEscapes};
    return command;
  }
  static Command shell(const std::string& script) {
    Command command;
    command.argv = {"/bin/sh", "-c", script};
    return command;
  }
  static End run(Command command, std::string input = {}) {
    auto end = pool_->run(std::move(command), std::move(input));
    EXPECT_TRUE(end) << end.error().message();
    return end ? *end : End{};
  }
  // Checks that the sandbox stopped everything that the attempt tried.
  static void expect_stopped(std::vector<std::string> words) {
    const std::string name = words[0];
    const End end = run(attempt(std::move(words)));
    EXPECT_TRUE(end.out.ends_with("stopped\n")) << name << ": " << end.out << end.err;
    EXPECT_EQ(end.description(), "exited with status 0") << name;
  }

  static inline std::unique_ptr<Pool> pool_;
  static inline std::string refusal_;  // the reason why there is no pool
};

TEST_F(Sandbox, RunsToTheEnd) {
  Command command = shell("cat; echo \"$WORD $HOME $PWD\" >&2; cat /given/file; exit 3");
  command.environment = {{"WORD", "a b"}};
  command.files = {{"/given/file", "content"}};
  const End end = run(std::move(command), std::string(300'000, 'i'));
  EXPECT_EQ(end.description(), "exited with status 3");
  EXPECT_EQ(end.out, std::string(300'000, 'i') + "content");
  EXPECT_EQ(end.err, "a b /tmp /tmp\n");
  EXPECT_GT(end.wall.count(), 0);
}

TEST_F(Sandbox, EndsAreDistinguished) {
  EXPECT_EQ(run(shell("kill -SEGV $$")).description(), "was killed by signal 11");
  EXPECT_EQ(run(shell("exit 255")).description(), "exited with status 255");
  const auto missing = pool_->run({{"/usr/bin/no-such-program"}, {}, {}, {}, {}});
  ASSERT_FALSE(missing);
  EXPECT_NE(missing.error().message().find("no-such-program"), std::string::npos) << missing.error().message();
  for (const Command& wrong :
       {Command{{"true"}, {}, {}, {}, {}}, Command{{}, {}, {}, {}, {}}, Command{{"/bin/../bin/true"}, {}, {}, {}, {}},
        Command{{"/bin/true"}, {{"a=b", ""}}, {}, {}, {}}, Command{{"/bin/true"}, {}, {{"file", ""}}, {}, {}},
        Command{{"/bin/true"}, {}, {}, {"/no/such/folder"}, {}}}) {
    const auto refused = pool_->run(wrong);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Code::kInvalid) << refused.error().message();
  }
}

TEST_F(Sandbox, AForkBombIsBoundedAndNothingIsLeft) {
  const std::string token = fmt::format("bomb-{}", ::getpid());
  Command command = attempt({"fork_bomb", token});
  command.limits.wall = seconds(1);
  command.limits.cpu = seconds(30);
  auto done = std::async(std::launch::async, [&] { return run(command); });
  int processes_max = 0;
  while (done.wait_for(milliseconds(20)) != std::future_status::ready)
    processes_max = std::max(processes_max, processes_with(token));
  EXPECT_EQ(done.get().reason, EndReason::kWallTime);
  EXPECT_GT(processes_max, 3);
  EXPECT_LE(processes_max, 34);  // the 32 allowed, and bubblewrap's two, outside and inside
  EXPECT_EQ(processes_with(token), 0);
}

TEST_F(Sandbox, OtherProcessesCannotBeReached) {
  expect_stopped({"trace"});
  const End end = run(attempt({"others", std::to_string(::getpid())}));
  EXPECT_EQ(end.out, "2 processes\nstopped\n") << end.err;
}

TEST_F(Sandbox, FilesAndSecretsOfTheMachineCannotBeRead) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("sandbox_test_{}", ::getpid());
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "secret") << "file-secret";
  ::setenv("ECHOLINE_TEST_SECRET", "environment-secret", 1);
  std::vector<std::string> words{"read_files", (folder / "secret").string(), "/etc/shadow", "/etc/hosts",
                                 "/proc/../etc/shadow"};
  for (const char* path : {"/root", "/home", "/var", "/sys", "/run", "/work", "/boot"})
    if (std::filesystem::exists(path) && !kEscapes.string().starts_with(path)) words.push_back(path);
  const End end = run(attempt(words));
  EXPECT_TRUE(end.out.ends_with("stopped\n")) << end.out;
  EXPECT_NE(end.out.find("HOME=/tmp"), std::string::npos);
  EXPECT_EQ(end.out.find("environment-secret"), std::string::npos) << end.out;
  EXPECT_EQ(end.out.find("ECHOLINE"), std::string::npos) << end.out;
  expect_stopped({"links", folder.string(), (folder / "secret").string()});
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
  std::filesystem::remove_all(folder);
  EXPECT_FALSE(std::filesystem::exists("/usr/escaped"));
}

TEST_F(Sandbox, ThereIsNoNetwork) {
  const std::string name = fmt::format("echoline-test-{}", ::getpid());
  const auto path = std::filesystem::temp_directory_path() / name;
  const auto listen_at = [](const std::string& text) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, text.data(), text.size());
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
    EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(::listen(fd, 1), 0);
    return fd;
  };
  const Descriptor abstract(listen_at('\0' + name)), file(listen_at(path.string()));
  expect_stopped({"sockets", name, path.string()});
  std::filesystem::remove(path);
}

TEST_F(Sandbox, TooMuchOutput) {
  for (const char* where : {"", " >&2"}) {
    const End end = run(shell(std::string("head -c 3000000 /dev/full") + where));
    EXPECT_EQ(end.reason, EndReason::kOutput);
    EXPECT_EQ(end.out.size() + end.err.size(), 1u << 20);
  }
  EXPECT_EQ(run(attempt({"much_output"})).reason, EndReason::kOutput);
  EXPECT_EQ(run(shell("head -c 1048576 /dev/full")).reason, EndReason::kExit);
}

TEST_F(Sandbox, TooMuchMemory) {
  Command command = attempt({"much_memory"});
  command.limits.memory = {64u << 20};
  const End end = run(command);
  EXPECT_EQ(end.reason, EndReason::kMemory) << end.description();
  EXPECT_LT(end.memory.count, 1u << 30);
  // Many processes, each below the limit. The ":" keeps each subshell, because a last command would replace the
  // subshell and free its memory.
  command = shell("for i in 1 2 3 4 5 6; do (x=$(head -c 15000000 /dev/urandom | base64); sleep 5; :) & done; wait");
  command.limits.memory = {64u << 20};
  EXPECT_EQ(run(command).reason, EndReason::kMemory);
  command = attempt({"memory_at_once"});
  command.limits.cpu = seconds(5);
  EXPECT_EQ(run(command).out, "stopped\n");
  expect_stopped({"hidden_memory"});
  // A forked process shares its memory with its children, which does not count twice.
  command = shell("x=$(head -c 20000000 /dev/urandom | base64 -w0); for i in 1 2 3 4; do (sleep 0.3; :) & done; wait");
  command.limits.memory = {160u << 20};
  EXPECT_EQ(run(command).description(), "exited with status 0");
}

TEST_F(Sandbox, TooLargeAFileAndTooMany) {
  Command command = attempt({"huge_file"});
  command.limits.file = {1u << 20};
  EXPECT_EQ(run(command).out, "1048576 bytes: File too large\n");
  command.limits.file = {1u << 30};
  command.limits.scratch = {2u << 20};
  EXPECT_EQ(run(command).out, "2097152 bytes: No space left on device\n");
  command = attempt({"many_files"});
  command.limits.memory = {16u << 20};  // an empty file takes some memory too
  const End end = run(command);
  EXPECT_EQ(end.reason, EndReason::kMemory) << end.description() << end.out;
}

TEST_F(Sandbox, TooLong) {
  Command command = attempt({"spin"});
  command.limits.cpu = milliseconds(300);
  command.limits.wall = seconds(200);
  EXPECT_EQ(run(command).reason, EndReason::kCpuTime);
  command.argv[1] = "spin_in_turn";
  const End in_turn = run(command);
  EXPECT_EQ(in_turn.reason, EndReason::kCpuTime);
  EXPECT_LT(in_turn.cpu, seconds(2));
  command = attempt({"wait"});
  command.limits.wall = milliseconds(100);
  const End end = run(command);
  EXPECT_EQ(end.reason, EndReason::kWallTime);
  EXPECT_GE(end.wall, milliseconds(100));
  EXPECT_LT(end.cpu, milliseconds(100));
}

TEST_F(Sandbox, AProgramCannotKillItsSandbox) {
  const End end = run(attempt({"kill_all"}));
  EXPECT_EQ(end.description(), "exited with status 5");
  EXPECT_EQ(end.out, "alive\n");
}

TEST_F(Sandbox, NoProcessSurvives) {
  const std::string token = fmt::format("survivor-{}", ::getpid());
  const End end = run(attempt({"survive", token}));
  EXPECT_EQ(end.description(), "exited with status 0");
  EXPECT_EQ(end.out, "gone\n");
  EXPECT_EQ(processes_with(token), 0);  // none remains when the end is reported
  Command command = attempt({"wait", token});
  command.limits.wall = milliseconds(50);
  run(std::move(command));
  EXPECT_EQ(processes_with(token), 0);
}

TEST_F(Sandbox, DescriptorsAreItsOwnAndFew) {
  EXPECT_EQ(run(attempt({"descriptors"})).out, "0 1 2 ");
  EXPECT_EQ(run(attempt({"close_output"})).description(), "exited with status 7");
  EXPECT_EQ(run(attempt({"many_descriptors"})).out, "125: Too many open files\nstopped\n");
}

TEST_F(Sandbox, SystemCallsOfNoUseAreRefused) {
  expect_stopped({"system_calls"});
  expect_stopped({"terminal"});
#ifdef __x86_64__
  EXPECT_EQ(run(attempt({"other_architecture"})).description(), fmt::format("was killed by signal {}", SIGSYS));
  EXPECT_EQ(run(attempt({"x32"})).description(), fmt::format("was killed by signal {}", SIGSYS));
#endif
}

TEST_F(Sandbox, NoMoreRunAtATimeThanMay) {
  // Two slow programs occupy both places. A third, quick one waits for the first of them to end.
  std::mutex mutex;
  std::condition_variable end_added;
  std::vector<std::string> ends;  // the programs' names, in the order of their ends
  const auto done = [&](std::string name) {
    return [&, name](const Result<End>&) {
      const std::lock_guard lock(mutex);
      ends.push_back(name);
      end_added.notify_one();  // under the lock: the waiter may destroy both as soon as the lock is released
    };
  };
  Command slow = shell("read line"), slower = shell("sleep 60");
  slow.argv = {"/bin/sleep", "60"};
  slow.limits.wall = milliseconds(200);
  slower.limits.wall = milliseconds(1500);
  ASSERT_TRUE(pool_->run(slow, "", done("slow")));
  ASSERT_TRUE(pool_->run(slower, "", done("slower")));
  ASSERT_TRUE(pool_->run(shell("true"), "", done("quick")));
  std::unique_lock lock(mutex);
  end_added.wait(lock, [&] { return ends.size() == 3; });
  EXPECT_EQ(ends, (std::vector<std::string>{"slow", "quick", "slower"}));
}

TEST_F(Sandbox, TheQueueIsBoundedAndEveryCommandEnds) {
  auto pool = Pool::start({.running_max = 1, .waiting_max = 2, .long_lived_max = 1});
  ASSERT_TRUE(pool) << pool.error().message();
  std::atomic<int> stopped = 0, cancelled = 0, refused = 0;
  const auto count_end = [&](const Result<End>& end) {
    if (!end)
      cancelled += end.error().code == Code::kCancelled;
    else
      stopped += end->reason == EndReason::kStopped;
  };
  Command slow = shell("sleep 60");
  auto launched = (*pool)->launch(slow);  // a launched program occupies no place in the queue
  ASSERT_TRUE(launched);
  EXPECT_EQ((*pool)->launch(slow).error().code, Code::kExhausted);
  for (int i = 0; i < 8; ++i) {
    const Status accepted = (*pool)->run(slow, "", count_end);
    if (!accepted) refused += accepted.error().code == Code::kExhausted;
  }
  EXPECT_GE(refused.load(), 5);  // one runs, or will soon; two wait
  pool->reset();
  EXPECT_EQ(launched->wait().reason, EndReason::kStopped);
  EXPECT_EQ(stopped + cancelled + refused, 8);
  EXPECT_LE(stopped.load(), 1);
}

TEST_F(Sandbox, AProgramThatStaysIsSpokenTo) {
  auto process = pool_->launch(shell("while read line; do echo \"<$line>\"; echo log >&2; done; exit 4"));
  ASSERT_TRUE(process) << process.error().message();
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(process->write(fmt::format("{}\n", i), seconds(10)));
    ASSERT_EQ(process->read_line(100, seconds(10)).value(), fmt::format("<{}>", i));
  }
  EXPECT_EQ(process->read_line(100, milliseconds(10)).error().code, Code::kStale);
  ASSERT_TRUE(process->write(std::string(200, 'x') + "\n", seconds(10)));
  EXPECT_EQ(process->read_line(100, seconds(10)).error().code, Code::kExhausted);
  EXPECT_FALSE(process->ended());
  const End end = process->wait();
  EXPECT_EQ(end.reason, EndReason::kStopped);
  EXPECT_EQ(end.err.substr(0, 8), "log\nlog\n");
}

TEST_F(Sandbox, AProgramThatStaysMayEndItself) {
  auto process = pool_->launch(shell("read line; echo $line; exit 4"));
  ASSERT_TRUE(process);
  EXPECT_TRUE(process->write("last\n", seconds(10)));
  EXPECT_EQ(process->read_line(100, seconds(10)).value(), "last");
  EXPECT_EQ(process->read_line(100, seconds(10)).error().code, Code::kUnavailable);
  while (!process->ended()) std::this_thread::yield();
  EXPECT_EQ(process->ended()->description(), "exited with status 4");
  Status written = ok();
  while (written) written = process->write("more\n", milliseconds(100));
  EXPECT_EQ(written.error().code, Code::kUnavailable);
  // A program that does not read delays the writer no longer than the given time.
  auto deaf = pool_->launch(attempt({"wait"}));
  ASSERT_TRUE(deaf);
  EXPECT_EQ(deaf->write(std::string(10u << 20, 'x'), milliseconds(50)).error().code, Code::kStale);
}

TEST_F(Sandbox, LimitsHoldForLaunchedPrograms) {
  Command command = shell("while :; do echo log >&2; done");
  command.limits.wall = std::nullopt;
  command.limits.cpu = milliseconds(300);
  auto process = pool_->launch(command);
  ASSERT_TRUE(process);
  while (!process->ended()) std::this_thread::yield();
  EXPECT_EQ(process->ended()->reason, EndReason::kCpuTime);
  EXPECT_LE(process->ended()->err.size(), 1u << 20);
}

TEST_F(Sandbox, AProgramDiesWithTheProcessThatStartedIt) {
  const std::string token = fmt::format("orphan-{}", ::getpid());
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    auto pool = Pool::start();
    auto process = (*pool)->launch(attempt({"wait", token}));
    while (processes_with(token) < 3) ::usleep(1000);  // bubblewrap outside and inside, and the program
    [[maybe_unused]] const auto bytes_written = ::write(pipe_ends[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(pipe_ends[0], &byte, 1), 1);
  EXPECT_GE(processes_with(token), 2);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const auto deadline = std::chrono::steady_clock::now() + seconds(30);
  while (processes_with(token) > 0 && std::chrono::steady_clock::now() < deadline) ::usleep(1000);
  EXPECT_EQ(processes_with(token), 0);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

TEST_F(Sandbox, WhereTheKernelAllowsNoneNothingIsRun) {
  // In a user namespace that allows no further ones, as in a container on a host that switched them off.
  // The child reports its new namespace in `child_ready`. The parent writes the maps, then allows it to go on in
  // `maps_set`.
  int child_ready[2], maps_set[2];
  ASSERT_EQ(::pipe(child_ready) + ::pipe(maps_set), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    if (::unshare(CLONE_NEWUSER) != 0 || ::write(child_ready[1], "x", 1) != 1 || ::read(maps_set[0], &byte, 1) != 1)
      ::_exit(10);
    std::ofstream("/proc/sys/user/max_user_namespaces") << 0 << std::flush;
    const auto pool = Pool::start();
    if (pool) ::_exit(11);
    ::_exit(pool.error().message().find("none is run") != std::string::npos ? 0 : 12);
  }
  char byte = 0;
  ASSERT_EQ(::read(child_ready[0], &byte, 1), 1);
  const auto write_map = [&](const char* file, const std::string& line) {
    std::ofstream(fmt::format("/proc/{}/{}", child, file)) << line << std::flush;
  };
  const std::string ids = ::geteuid() == 0 ? "0 0 4294967295\n" : fmt::format("0 {} 1\n", ::geteuid());
  write_map("uid_map", ids);
  write_map("gid_map", ids);
  ASSERT_EQ(::write(maps_set[1], "x", 1), 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const int fd : {child_ready[0], child_ready[1], maps_set[0], maps_set[1]}) ::close(fd);
}

TEST(SandboxRefusals, AreExplained) {
  const auto missing = Pool::start({.bubblewrap = "/no/such/bwrap"});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kUnavailable);
  EXPECT_NE(missing.error().message().find("install bubblewrap"), std::string::npos);
  const auto script = std::filesystem::temp_directory_path() / fmt::format("sandbox_test_bwrap_{}", ::getpid());
  std::ofstream(script) << "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n";
  std::filesystem::permissions(script, std::filesystem::perms(0755));
  const auto refused = Pool::start({.bubblewrap = script});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnavailable);
  for (const char* part : {"none is run", "No permissions to create a new namespace", "max_user_namespaces"})
    EXPECT_NE(refused.error().message().find(part), std::string::npos) << refused.error().message();
  std::filesystem::remove(script);
}

// Checks the written values and their files only, because this machine may lack the kernel's controllers.
TEST(ControlGroups, AreMadeWhereTheControllersAreHandedDown) {
  const auto root = std::filesystem::temp_directory_path() / fmt::format("sandbox_test_groups_{}", ::getpid());
  std::filesystem::create_directories(root / "slice/service");
  const auto write = [](const std::filesystem::path& file, const std::string& text) { std::ofstream(file) << text; };
  write(root / "own", "4:memory:/elsewhere\n0::/slice/service\n");
  EXPECT_FALSE(ControlGroups::make(root, root / "own"));
  write(root / "slice/cgroup.subtree_control", "cpu memory\n");
  write(root / "cgroup.subtree_control", "cpu memory pids\n");
  // A plain folder has no file to hand the controllers further down.
  EXPECT_FALSE(ControlGroups::make(root, root / "own"));
  EXPECT_FALSE(ControlGroups::make(root, root / "none"));
  write(root / "own", "0::/../../slice\n");
  EXPECT_FALSE(ControlGroups::make(root, root / "own"));
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace echoline::sandbox
