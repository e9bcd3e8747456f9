// The rented fleet of a running learner; empty for a run whose workers join by hand. Private to learner/.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "learner/attendance.hpp"
#include "learner/planning.hpp"
#include "learner/roster.hpp"
#include "learner/run_journal.hpp"
#include "overlay/uv/node.hpp"
#include "provisioner/fleet_driver.hpp"

namespace echoline::learner {

// For the main thread, except driver() and summary().
class RunFleet {
 public:
  // The arguments must outlive it.
  RunFleet(const RunHost& run, const provisioner::Plan& plan, RunJournal& journal)
      : run_(run), plan_(plan), journal_(journal) {}

  // Rents the plan's offers as workers that join `node`. Without a provider, logs how to start workers by hand.
  Status start(Roster& roster, Attendance& attendance, overlay::LearnerNode& node);
  // Ends every machine. Idempotent.
  void stop();
  // The folders of workers on this machine: their identity and publications.
  std::filesystem::path worker_folders() const { return journal_.record().folder() / "workers"; }

  // Null without a fleet, and before start(). Any thread.
  provisioner::FleetDriver* driver() const { return started_; }
  provisioner::FleetSummary summary() const;
  // Number of rented machines whose worker has not joined yet.
  std::size_t still_joining() const { return summary().numbers.joining; }
  // kExhausted once fleet.usd_max is spent.
  Status check_budget() const;
  // Waits until every rented worker has joined, or the join timeout is over and some have joined. The fleet replaces
  // machines that never join, a few times. Without a fleet, waits for one worker. `tick` is called a few times per
  // second.
  Status wait_for_workers(const Attendance& attendance,
                          const std::function<void(const std::string& phase)>& tick) const;
  // Returns text for an error about missing workers: the latest trouble, and the place of logs and decisions.
  std::string missing_workers_hint() const;

 private:
  const RunHost run_;
  const provisioner::Plan& plan_;
  RunJournal& journal_;
  std::string learner_address_;  // where rented machines look for the learner
  std::unique_ptr<provisioner::FleetDriver> fleet_;
  std::atomic<provisioner::FleetDriver*> started_ = nullptr;  // fleet_ once it runs, for other threads
};

}  // namespace echoline::learner
