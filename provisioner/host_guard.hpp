// Guards a rented host: a process beside the worker ends the host's instance when the worker is gone.
#pragma once
#include <atomic>
#include <functional>
#include <optional>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

struct HostGuardOptions {
  std::function<Status()> end_instance;             // waits for the provider's answer
  Duration silence_max = std::chrono::minutes(15);  // a worker that reports no contact for this long is killed
  // The first pause after a failed end_instance(). Each further one is twice as long, at most kGuardRetryMax.
  Duration retry_pause = std::chrono::seconds(5);
};
inline constexpr Duration kGuardRetryMax = std::chrono::minutes(1);

// The worker's side of guard_host().
struct GuardedWorker {
  std::function<void()> on_contact;  // the worker calls it while it is in touch with its learner (any thread)
  // Waits until the guard has looked at the worker once more, a few seconds at most. False: the guard was killed or
  // does not run any more.
  std::function<bool()> has_guard;
};

// Forks; call before the process has threads. In the child, returns nothing, and sets `worker`. In the parent, waits
// until the child has ended and then ends the instance, again and again until the provider confirms; returns the
// child's exit code, 128 + signal if it was killed. If `stop` becomes true, passes SIGTERM on and leaves the instance
// to the sender of the signal. If the fork fails, returns nothing, and the calling process has no guard.
std::optional<int> guard_host(const HostGuardOptions& options, const std::atomic<bool>& stop, GuardedWorker& worker);

}  // namespace echoline::provisioner
