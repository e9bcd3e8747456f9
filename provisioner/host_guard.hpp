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
  Duration retry_pause = std::chrono::minutes(1);   // after a failed end_instance()
};

// Forks; call before the process has threads. In the child, returns nothing, and sets `on_contact`, which the worker
// calls while it is in touch with its learner (any thread). In the parent, waits until the child has ended and then
// ends the instance, again and again until the provider confirms; returns the child's exit code, 128 + signal if it was
// killed. If `stop` becomes true, passes SIGTERM on and leaves the instance to the sender of the signal.
std::optional<int> guard_host(const HostGuardOptions& options, const std::atomic<bool>& stop,
                              std::function<void()>& on_contact);

}  // namespace echoline::provisioner
