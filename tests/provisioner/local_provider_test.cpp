// Real processes: start, exit, stop, kill, groups, and nothing left behind.
#include "provisioner/local_provider.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "base/files.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

pid_t pid_of(const InstanceId& id) { return std::stoi(id.text.substr(id.text.find(':') + 1)); }

// Alive and not a zombie.
bool runs(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat[name_end + 2] != 'Z';
}

// Waits for real processes, bounded.
bool eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < deadline) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return condition();
}

class LocalProviderTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::temp_directory_path() / fmt::format("echoline-provider-{}", getpid());
    std::filesystem::remove_all(folder);
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  static StartRequest shell(const std::string& script, const std::string& label = "run/1") {
    StartRequest r;
    r.label = label;
    r.argv = {"/bin/sh", "-c", script};
    return r;
  }
  InstanceId started(LocalProvider& provider, const StartRequest& request) {
    auto id = provider.start(request);
    EXPECT_TRUE(id) << id.error().message();
    return *id;
  }
  std::vector<InstanceExit> exits(LocalProvider& provider, std::size_t count = 1) {
    std::vector<InstanceExit> all;
    eventually([&] {
      for (auto& e : provider.poll()) all.push_back(std::move(e));
      return all.size() >= count;
    });
    return all;
  }
  std::string log(const std::string& name = "run.1.log") { return read_file(folder / name).value(); }
  pid_t number_in_log() {
    pid_t pid = 0;
    eventually([&] {
      const auto text = read_file(folder / "run.1.log");
      return text && text->ends_with('\n') && (std::istringstream(*text) >> pid);
    });
    return pid;
  }

  std::filesystem::path folder;
  ManualClock clock;
};

TEST_F(LocalProviderTest, ReportsTheExitStatusOnceAndKeepsTheOutput) {
  LocalProvider provider(folder, clock);
  const auto id = started(provider, shell("echo out; echo err >&2; echo \"$MODE $HOME\"; exit 3"));
  EXPECT_THAT(id.text, testing::MatchesRegex("local:[0-9]+:[0-9]+"));
  EXPECT_EQ(provider.list()->size(), 1u);
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].instance, id);
  EXPECT_EQ(gone[0].label, "run/1");
  EXPECT_EQ(gone[0].status, 3);
  EXPECT_FALSE(gone[0].signal);
  EXPECT_FALSE(gone[0].requested);
  EXPECT_EQ(gone[0].to_text(), "exited with status 3");
  EXPECT_TRUE(provider.poll().empty());
  EXPECT_TRUE(provider.list()->empty());
  EXPECT_THAT(log(), HasSubstr("out\nerr\n"));
}

TEST_F(LocalProviderTest, PassesTheEnvironmentWithTheRequestOverIt) {
  setenv("ECHOLINE_TEST_KEPT", "kept", 1);
  setenv("ECHOLINE_TEST_SET", "old", 1);
  LocalProvider provider(folder, clock);
  auto request = shell("echo $ECHOLINE_TEST_KEPT $ECHOLINE_TEST_SET");
  request.env = {{"ECHOLINE_TEST_SET", "new value"}};
  started(provider, request);
  exits(provider);
  EXPECT_EQ(log(), "kept new value\n");
}

TEST_F(LocalProviderTest, ReportsTheSignalOfACrash) {
  LocalProvider provider(folder, clock);
  started(provider, shell("kill -SEGV $$"));
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].signal, SIGSEGV);
  EXPECT_FALSE(gone[0].status);
}

TEST_F(LocalProviderTest, StopAsksFirst) {
  LocalProvider provider(folder, clock);
  const auto id = started(provider, shell("trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_GT(number_in_log(), 0);  // the trap is set
  ASSERT_TRUE(provider.stop(id, std::chrono::seconds(5)));
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].status, 0);
  EXPECT_TRUE(gone[0].requested);
  EXPECT_THAT(log(), HasSubstr("bye"));
  EXPECT_TRUE(provider.stop(id, std::chrono::seconds(5)));  // already gone
}

TEST_F(LocalProviderTest, StopKillsAfterTheGraceAndNotBefore) {
  LocalProvider provider(folder, clock);
  const auto id = started(provider, shell("trap '' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_EQ(number_in_log(), pid_of(id));
  ASSERT_TRUE(provider.stop(id, std::chrono::seconds(5)));
  clock.advance(milliseconds(4999));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(provider.poll().empty());
  EXPECT_TRUE(runs(pid_of(id)));
  ASSERT_TRUE(provider.stop(id, std::chrono::hours(1)));  // a second stop does not prolong the grace
  clock.advance(milliseconds(1));
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].signal, SIGKILL);
}

TEST_F(LocalProviderTest, WhatTheLeaderLeavesBehindIsKilledWithIt) {
  LocalProvider provider(folder, clock);
  started(provider, shell("trap '' TERM; (trap '' TERM; while :; do sleep 0.01; done) & echo $!; exit 0"));
  const pid_t grandchild = number_in_log();
  ASSERT_GT(grandchild, 0);
  ASSERT_EQ(exits(provider).size(), 1u);
  EXPECT_TRUE(eventually([&] { return !runs(grandchild); }));
}

TEST_F(LocalProviderTest, TheDestructorLeavesNothingRunning) {
  std::vector<pid_t> pids;
  {
    LocalProvider provider(folder, clock);
    for (int i = 0; i < 4; ++i)
      pids.push_back(pid_of(started(provider, shell("exec sleep 100", fmt::format("run/{}", i)))));
    for (const pid_t pid : pids) EXPECT_TRUE(runs(pid));
  }
  for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), -1);
}

TEST_F(LocalProviderTest, BadRequestsAreRefused) {
  LocalProvider provider(folder, clock);
  StartRequest r = shell("true");
  r.argv = {};
  EXPECT_EQ(provider.start(r).error().code, Code::kInvalid);
  r.argv = {"sh"};
  EXPECT_EQ(provider.start(r).error().code, Code::kInvalid);
  for (const char* label : {"", "../x", "a b", "a\nb"}) {
    EXPECT_EQ(provider.start(shell("true", label)).error().code, Code::kInvalid) << label;
  }
  r = shell("true");
  r.env = {{"A=B", "c"}};
  EXPECT_EQ(provider.start(r).error().code, Code::kInvalid);
  r = shell("true");
  r.argv = {"/nonexistent/program"};
  const auto missing = provider.start(r);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kIo);
  EXPECT_THAT(missing.error().detail, HasSubstr("/nonexistent/program: No such file"));
  EXPECT_TRUE(provider.list()->empty());
  EXPECT_EQ(provider.stop({"vast:12"}, {}).error().code, Code::kInvalid);
  EXPECT_EQ(provider.stop({"local:12"}, {}).error().code, Code::kInvalid);
  EXPECT_EQ(provider.stop({"local:-1:5"}, {}).error().code, Code::kInvalid);
}

TEST_F(LocalProviderTest, ARecycledPidIsNeverSignalled) {
  // This very process, under another start time: must survive.
  LocalProvider provider(folder, clock);
  EXPECT_TRUE(provider.stop({fmt::format("local:{}:1", getpid())}, {}));
  EXPECT_TRUE(provider.list()->empty());
}

TEST_F(LocalProviderTest, AnInstanceOfAnEarlierRunCanBeStopped) {
  LocalProvider first(folder, clock);
  const auto id = started(first, shell("trap '' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_GT(number_in_log(), 0);
  LocalProvider second(folder, clock);
  ASSERT_TRUE(second.stop(id, std::chrono::seconds(1)));
  EXPECT_TRUE(second.poll().empty());
  clock.advance(std::chrono::seconds(1));
  second.poll();
  const auto gone = exits(first);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].signal, SIGKILL);
  const auto seen = exits(second);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].to_text(), "gone");
  EXPECT_TRUE(seen[0].requested);
}

// Starts a worker in a child process that is then killed; `how` starts it there.
void expect_worker_dies_with_its_program(const std::filesystem::path& folder,
                                         const std::function<void(LocalProvider&)>& how) {
  const pid_t program = fork();
  if (program == 0) {
    ManualClock clock;
    LocalProvider provider(folder, clock);
    how(provider);
    while (true) pause();
  }
  pid_t worker = 0;
  ASSERT_TRUE(eventually([&] {
    const auto text = read_file(folder / "run.1.log");
    return text && text->ends_with('\n') && (std::istringstream(*text) >> worker);
  }));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_TRUE(runs(worker));  // also when the thread that called start() has ended
  kill(program, SIGKILL);
  waitpid(program, nullptr, 0);
  EXPECT_TRUE(eventually([&] { return !runs(worker); }));
}

TEST_F(LocalProviderTest, AWorkerDiesWithAProgramThatIsKilled) {
  expect_worker_dies_with_its_program(folder, [](LocalProvider& provider) {
    (void)provider.start(shell("trap '' TERM HUP; echo $$; while :; do sleep 0.01; done"));
  });
}

TEST_F(LocalProviderTest, AWorkerOutlivesTheThreadThatStartedItButNotTheProgram) {
  expect_worker_dies_with_its_program(folder, [](LocalProvider& provider) {
    std::thread([&] { (void)provider.start(shell("echo $$; while :; do sleep 0.01; done")); }).join();
  });
}

TEST_F(LocalProviderTest, NoDescriptorsLeakEitherWay) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  int inheritable[2];
  ASSERT_EQ(pipe(inheritable), 0);  // without CLOEXEC
  {
    LocalProvider provider(folder, clock);
    started(provider, shell("ls /proc/self/fd | wc -l"));
    ASSERT_EQ(exits(provider).size(), 1u);
    for (int i = 0; i < 20; ++i) started(provider, shell("true", fmt::format("run/x{}", i)));
    EXPECT_EQ(exits(provider, 20).size(), 20u);
  }
  close(inheritable[0]);
  close(inheritable[1]);
  EXPECT_EQ(open_files(), before);
  EXPECT_EQ(std::stoi(log()), 4);  // stdin, stdout, stderr, and the folder that ls reads
}

}  // namespace
}  // namespace echoline::provisioner
