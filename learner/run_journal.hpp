// The records of a running learner: its folder, clock, status file and number of steps, and the wait while the disk
// refuses writes. Private to learner/.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "learner/run_clock.hpp"
#include "learner/run_record.hpp"
#include "learner/run_status.hpp"
#include "learner/service.hpp"

namespace echoline::learner {

// The run that the parts of the service work on; outlives them.
struct RunHost {
  const RunConfig& config;
  const ServiceOptions& options;
  const std::atomic<bool>& stop;
  const Clock& clock;
};

// For the main thread, except step(). record() and status() have the thread rules of their classes.
class RunJournal {
 public:
  // Called on the main thread while persist() waits.
  struct WhileWaiting {
    std::function<bool()> is_pointless;                           // true ends the wait
    std::function<Status(const std::string& reason)> keep_alive;  // an error ends the wait and is returned
  };
  static Result<std::unique_ptr<RunJournal>> open(const RunHost& run, WhileWaiting while_waiting);

  RunRecord& record() { return *record_; }
  RunClock& run_clock() { return *run_clock_; }
  RunStatus& status() { return status_; }

  // Learner steps done, which is the version that they produced.
  std::uint64_t step() const { return step_; }
  void set_step(std::uint64_t step) { step_ = step; }

  // Repeats `work`, which writes `part` of the run (such as "checkpoints") to the disk, until it succeeds; the run
  // waits meanwhile. Returns an error that is not the disk's, that lasts longer than DiskPatience, that WhileWaiting
  // returns, or that remains when the run must stop.
  Status persist(std::string_view part, const std::function<Status()>& work);
  // The time that persist() has waited since the last call.
  Duration take_disk_wait() { return std::exchange(disk_wait_, {}); }

 private:
  RunJournal(const RunHost& run, WhileWaiting while_waiting, std::unique_ptr<RunRecord> record,
             std::unique_ptr<RunClock> run_clock);

  const RunHost run_;
  const WhileWaiting while_waiting_;
  const std::unique_ptr<RunRecord> record_;
  const std::unique_ptr<RunClock> run_clock_;
  RunStatus status_;
  std::atomic<std::uint64_t> step_ = 0;
  Duration disk_wait_{};
};

}  // namespace echoline::learner
