// Offers as processes on this machine, none of which outlives the program.
#pragma once
#include <filesystem>
#include <memory>

#include "base/clock.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

// Each instance is one process, leader of its own process group, with stdin from /dev/null and stdout and stderr
// appended to <log_dir>/<label>.log ('/' in the label becomes '.'). stop() sends SIGTERM to the group and SIGKILL when
// the grace is over; when a leader exits, what is left of its group is killed. The kernel kills a process when this
// program dies, however it dies. An instance id holds pid and start time, so a recycled pid is never signalled.
class LocalProvider final : public Provider {
 public:
  // `clock` times the graces and must outlive the provider.
  LocalProvider(std::filesystem::path log_dir, const Clock& clock);
  // Stops everything: SIGTERM, up to 2 s, SIGKILL; returns when all are reaped.
  ~LocalProvider() override;

  // argv[0] is a path (it is not looked up in PATH). The environment of this process is passed on, with request.env
  // over it. kInvalid for a bad argv or label; kIo with the system's reason when the program cannot be started.
  Result<InstanceId> start(const StartRequest& request) override;
  std::vector<InstanceExit> poll() override;
  // Also accepts ids of an earlier program run (orphans of the ledger).
  Status stop(const InstanceId& instance, Duration grace) override;
  Result<std::vector<InstanceInfo>> list() override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
