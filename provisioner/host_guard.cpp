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

// The time of the last contact, in memory that both processes share.
using Contact = std::atomic<Duration::rep>;

Duration now() { return SystemClock().now().time_since_epoch(); }

}  // namespace

std::optional<int> guard_host(const HostGuardOptions& options, const std::atomic<bool>& stop,
                              std::function<void()>& on_contact) {
  void* const memory = ::mmap(nullptr, sizeof(Contact), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ECHO_CHECK(memory != MAP_FAILED, "no shared memory: {}", std::strerror(errno));
  auto* const contact = new (memory) Contact(now().count());
  static_assert(Contact::is_always_lock_free);
  std::fflush(nullptr);  // otherwise the child would write the buffered text again
  const pid_t child = ::fork();
  if (child < 0) {
    log::warn("no process can be started to guard this host: {}", std::strerror(errno));
    return std::nullopt;
  }
  if (child == 0) {
    on_contact = [contact] { contact->store(now().count(), std::memory_order_relaxed); };
    return std::nullopt;
  }
  bool stop_sent = false, was_silent = false;
  int status = 0;
  while (true) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child || (ended < 0 && errno != EINTR)) break;
    if (stop && !std::exchange(stop_sent, true)) ::kill(child, SIGTERM);
    const Duration silence = now() - Duration(contact->load(std::memory_order_relaxed));
    if (silence >= options.silence_max && !std::exchange(was_silent, true)) {
      log::warn("the worker has been out of touch with its learner for {}: it is killed", to_text(silence));
      ::kill(child, SIGKILL);
    }
    std::this_thread::sleep_for(kLookInterval);
  }
  const int code = WIFSIGNALED(status) ? kSignalStatus + WTERMSIG(status) : WEXITSTATUS(status);
  if (stop && !was_silent) return code;
  while (true) {
    const Status ended = options.end_instance();
    if (ended) return code;
    log::warn("this instance may continue to cost money: {}; another try follows in {}", ended.error().message(),
              to_text(options.retry_pause));
    for (Duration waited{}; waited < options.retry_pause && !stop; waited += kLookInterval)
      std::this_thread::sleep_for(kLookInterval);
    if (stop) return code;
  }
}

}  // namespace echoline::provisioner
