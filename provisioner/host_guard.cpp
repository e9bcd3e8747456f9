// The supervisor of a rented host. `echoline worker` starts it in containers that may end themselves.
#include "provisioner/host_guard.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

#include "base/clock.hpp"
#include "base/log.hpp"

namespace echoline::provisioner {
namespace {

constexpr Duration kLookInterval = std::chrono::milliseconds(200);
constexpr int kSignalStatus = 128;  // added to a signal's number, as shells do

constexpr Duration kGuardSilenceMax = std::chrono::seconds(5);  // a guard that does not look for this long is gone

// Times of the worker's last contact with the learner and of the guard's last look, in memory that both processes
// share.
struct Shared {
  std::atomic<Duration::rep> contact_at, looked_at;
};

Duration now() { return SystemClock().now().time_since_epoch(); }

}  // namespace

std::optional<int> guard_host(const HostGuardOptions& options, const std::atomic<bool>& stop, GuardedWorker& worker) {
  void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ECHO_CHECK(memory != MAP_FAILED, "no shared memory: {}", std::strerror(errno));
  auto* const shared = new (memory) Shared{now().count(), now().count()};
  static_assert(std::atomic<Duration::rep>::is_always_lock_free);
  worker.has_guard = [] { return false; };  // unless the fork succeeds
  const pid_t guard = ::getpid();
  std::fflush(nullptr);  // otherwise the child would write the buffered text again
  const pid_t child = ::fork();
  if (child < 0) {
    log::warn("no process can be started to guard this host: {}", std::strerror(errno));
    return std::nullopt;
  }
  if (child == 0) {
    worker.on_contact = [shared] { shared->contact_at.store(now().count(), std::memory_order_relaxed); };
    worker.has_guard = [shared, guard] {
      const Duration::rep asked_at = now().count();
      for (Duration waited{}; waited < kGuardSilenceMax && ::getppid() == guard; waited += kLookInterval) {
        if (shared->looked_at.load(std::memory_order_relaxed) > asked_at) return true;
        std::this_thread::sleep_for(kLookInterval);
      }
      return false;
    };
    return std::nullopt;
  }
  bool stop_sent = false;           // SIGTERM was passed on
  bool killed_for_silence = false;  // the worker was out of touch for too long
  int status = 0;
  while (true) {
    const pid_t ended_pid = ::waitpid(child, &status, WNOHANG);
    if (ended_pid == child || (ended_pid < 0 && errno != EINTR)) break;
    if (stop && !std::exchange(stop_sent, true)) ::kill(child, SIGTERM);
    shared->looked_at.store(now().count(), std::memory_order_relaxed);
    const Duration silence = now() - Duration(shared->contact_at.load(std::memory_order_relaxed));
    if (silence >= options.silence_max && !std::exchange(killed_for_silence, true)) {
      log::warn("the worker has been out of touch with its learner for {}: it is killed", to_text(silence));
      ::kill(child, SIGKILL);
    }
    std::this_thread::sleep_for(kLookInterval);
  }
  const int code = WIFSIGNALED(status) ? kSignalStatus + WTERMSIG(status) : WEXITSTATUS(status);
  if (stop && !killed_for_silence) return code;  // the sender of the signal ends the instance
  for (Duration pause = options.retry_pause;; pause = std::min<Duration>(2 * pause, kGuardRetryMax)) {
    const Status instance_ended = options.end_instance();
    if (instance_ended) return code;
    log::warn("this instance may continue to cost money: {}; another try follows in {}",
              instance_ended.error().message(), to_text(pause));
    for (Duration waited{}; waited < pause && !stop; waited += kLookInterval)
      std::this_thread::sleep_for(kLookInterval);
    if (stop) return code;
  }
}

}  // namespace echoline::provisioner
