// The state of a run for people and other processes: status.json in the run's folder. Private to learner/.
#pragma once
#include <mutex>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "learner/policy_source.hpp"
#include "learner/roster.hpp"
#include "learner/run_clock.hpp"
#include "learner/run_record.hpp"
#include "provisioner/fleet_driver.hpp"

namespace echoline::learner {

// For the main thread, except newest(), set_published() and set_broadcast_time(), which are thread-safe.
class RunStatus {
 public:
  static constexpr Duration kWriteInterval = std::chrono::milliseconds(500);

  // The arguments must outlive it.
  RunStatus(const RunConfig& config, RunRecord& record, const RunClock& run_clock, const Clock& clock)
      : config_(config), record_(record), run_clock_(run_clock), clock_(clock) {}

  // The newest published policy.
  std::pair<Version, overlay::Digest> newest() const;
  void set_published(Version version, const overlay::Digest& digest, std::uint64_t bytes);
  void set_broadcast_time(Duration broadcast_time);
  // A learner step: its mean reward, its duration, and the part of that in which it waited for its batch.
  void add_step(double reward, Duration waiting_time, Duration step_time);

  // Sets the learner's current activity for the next write.
  void set_phase(const std::string& phase);
  bool is_write_due() const { return clock_.now() >= due_at_; }
  // Writes the file. `policy` is null before the first policy.
  void write(std::uint64_t step, const PolicySource* policy, const provisioner::FleetSummary& fleet,
             const Roster& roster);
  // Makes the next write, the last one, due at once.
  void make_write_due() { due_at_ = TimePoint{}; }

 private:
  const RunConfig& config_;
  RunRecord& record_;
  const RunClock& run_clock_;
  const Clock& clock_;
  std::string phase_;
  TimePoint due_at_{};
  double reward_ = 0;                      // mean reward of the newest step
  Duration waiting_time_{}, step_time_{};  // sums over all steps of this process

  mutable std::mutex mutex_;  // guards the members below
  Version version_;
  overlay::Digest digest_{};
  std::uint64_t delta_bytes_ = 0;  // of the newest publication
  Duration broadcast_time_{};      // of the newest broadcast
};

}  // namespace echoline::learner
