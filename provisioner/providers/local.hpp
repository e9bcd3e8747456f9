// Offers as processes on this machine, none of which outlives the program.
#pragma once
#include <filesystem>
#include <memory>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Each instance is one process, leader of its own process group, with stdin from /dev/null and stdout and stderr
// appended to <log_dir>/<label>.log ('/' in the label becomes '.'). stop() sends SIGTERM to the group, and SIGKILL when
// the grace is over, which is counted from the next poll(); when a leader exits, what is left of its group is killed.
// The kernel kills a process when this program dies, however it dies. An instance id holds pid and start time, so a
// recycled pid is never signalled. A process knows its label (ECHOLINE_INSTANCE), by which list() finds those of other
// programs.
class LocalProvider final : public Provider {
 public:
  explicit LocalProvider(std::filesystem::path log_dir);
  // Stops everything: SIGTERM, up to 2 s, SIGKILL; returns when all are reaped.
  ~LocalProvider() override;

  // argv[0] is a path (it is not looked up in PATH). The environment of this process is passed on, with spec.env over
  // it. Fails with kInvalid for a bad argv or label; kIo with the system's reason when the program cannot be started.
  void start(Ticket ticket, const LaunchSpec& spec) override;
  // Also accepts ids of another program run (orphans of the ledger).
  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override;
  void list(Ticket ticket, const std::string& label_prefix) override;
  std::vector<ProviderEvent> poll(TimePoint now) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
