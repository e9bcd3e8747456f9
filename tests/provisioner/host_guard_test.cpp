// The supervisor of a rented host, with real processes, against the test's vast.ai.
#include "provisioner/host_guard.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "provisioner/providers/vast.hpp"
#include "vast_server.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;

class HostGuard : public testing::Test {
 protected:
  void SetUp() override {
    VastInstance instance;
    instance.id = 4321;
    server.put(instance);
    ASSERT_EQ(::pipe(worker_pid_), 0);
  }
  // Starts a host: a supervisor whose worker runs `work`. Returns when the worker has begun.
  void start(Duration silence_max, const std::function<int(const GuardedWorker&)>& work) {
    supervisor = ::fork();
    if (supervisor == 0) {
      std::signal(SIGTERM, [](int) { told = true; });
      HostGuardOptions options;
      options.silence_max = silence_max;
      options.retry_pause = milliseconds(50);
      options.end_instance = [this] { return end_own_vast_instance(server.url(), VastServer::kKey, "4321"); };
      GuardedWorker guarded;
      if (const auto code = guard_host(options, told, guarded)) ::_exit(*code);
      const pid_t pid = ::getpid();
      if (::write(worker_pid_[1], &pid, sizeof pid) != sizeof pid) ::_exit(126);
      ::_exit(work(guarded));
    }
    ASSERT_EQ(::read(worker_pid_[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  }
  static int work_for_ever(const GuardedWorker& guarded) {
    while (true) {
      guarded.on_contact();
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
  bool is_ended() {
    for (int i = 0; i < 3000; ++i) {
      if (server.rented().empty()) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }
  int exit_code() const {
    int status = 0;
    ::waitpid(supervisor, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  // SIGTERM arrived. The worker inherits the handler, so that no signal can come before it.
  static inline std::atomic<bool> told = false;
  VastServer server;
  pid_t supervisor = -1, worker = -1;
  int worker_pid_[2] = {-1, -1};
};

TEST_F(HostGuard, AKilledWorkerEndsTheInstanceInSpiteOfFaults) {
  server.fail_randomly(0.3, 3);
  start(std::chrono::minutes(10), work_for_ever);
  ASSERT_EQ(::kill(worker, SIGKILL), 0);
  EXPECT_TRUE(is_ended());
  EXPECT_EQ(exit_code(), 128 + SIGKILL);
}

TEST_F(HostGuard, AWorkerThatEndsEndsTheInstance) {
  start(std::chrono::minutes(10), [](const GuardedWorker&) { return 3; });
  EXPECT_TRUE(is_ended());
  EXPECT_EQ(exit_code(), 3);
}

// A frozen worker reports no contact, and neither does one whose learner is gone.
TEST_F(HostGuard, AFrozenWorkerIsKilledAndTheInstanceEnded) {
  start(std::chrono::seconds(1), work_for_ever);
  std::this_thread::sleep_for(milliseconds(1500));
  EXPECT_FALSE(server.rented().empty());  // it was in contact
  ASSERT_EQ(::kill(worker, SIGSTOP), 0);
  EXPECT_TRUE(is_ended());
  EXPECT_EQ(exit_code(), 128 + SIGKILL);
}

// A container that was outbid may come back, so its end is left to the sender of the signal.
TEST_F(HostGuard, SigtermIsPassedOnAndTheInstanceStays) {
  start(std::chrono::minutes(10), [](const GuardedWorker&) {
    while (!told) std::this_thread::sleep_for(milliseconds(10));
    return 0;
  });
  ASSERT_EQ(::kill(supervisor, SIGTERM), 0);
  EXPECT_EQ(exit_code(), 0);
  EXPECT_FALSE(server.rented().empty());
}

// The worker then ends the instance itself.
TEST_F(HostGuard, AWorkerNoticesThatItsSupervisorWasStoppedOrKilled) {
  for (const int signal : {0, SIGSTOP, SIGKILL}) {
    SCOPED_TRACE(signal);
    int answer[2];
    ASSERT_EQ(::pipe(answer), 0);
    start(std::chrono::minutes(10), [&](const GuardedWorker& guarded) {
      char go = 0;
      (void)!::read(answer[0], &go, 1);
      const char has_guard = guarded.has_guard() ? 'y' : 'n';
      (void)!::write(worker_pid_[1], &has_guard, 1);
      return 0;
    });
    ASSERT_EQ(::kill(supervisor, signal), 0);  // signal 0 does nothing
    ASSERT_EQ(::write(answer[1], "g", 1), 1);
    char has_guard = 0;
    ASSERT_EQ(::read(worker_pid_[0], &has_guard, 1), 1);
    EXPECT_EQ(has_guard, signal == 0 ? 'y' : 'n');
    ::kill(supervisor, SIGCONT);
    ::waitpid(supervisor, nullptr, 0);
  }
}

TEST_F(HostGuard, TriesUntilTheServiceConfirms) {
  server.fault({.kind = "destroy", .status = 403, .body = "no", .times = 4});
  start(std::chrono::minutes(10), [](const GuardedWorker&) { return 0; });
  EXPECT_TRUE(is_ended());
  EXPECT_EQ(exit_code(), 0);
  EXPECT_GE(server.count("destroy"), 5);
}

}  // namespace
}  // namespace echoline::provisioner
