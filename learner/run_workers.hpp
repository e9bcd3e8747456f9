// The workers of a running learner: their presence, the roster, and the messages that they get as they join. Private to
// learner/.
#pragma once
#include <atomic>
#include <memory>
#include <string>

#include "learner/attendance.hpp"
#include "learner/roster.hpp"
#include "learner/run_journal.hpp"
#include "learner/run_task.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::learner {

// Thread-safe. Begins without any worker.
class RunWorkers {
 public:
  // The arguments must outlive it.
  RunWorkers(const RunHost& run, const provisioner::Plan& plan, RunJournal& journal);

  Roster& roster() { return roster_; }
  Attendance& attendance() { return attendance_; }

  // The overlay's reports. Their texts come from other machines, and are made printable here.
  void on_joined(const overlay::MemberInfo& member);
  void on_away(WorkerId worker, const std::string& reason);
  void on_lost(WorkerId worker, const std::string& reason);
  void on_trouble(WorkerId worker, const std::string& what);

  // Sends present and joining workers a message to wait. From describe_run() on, they get the run's description
  // instead.
  void greet_workers(overlay::LearnerNode& node);
  Status describe_run(const RunTask& task, overlay::LearnerNode& node);

  // Copies the overlay's data on the workers into the roster, unless the attendance is closed.
  void refresh(const overlay::LearnerNode& node);

 private:
  void record_change(const PresenceChange& change);
  // Returns false if `id` is no node of the trainer.
  bool record_node_gone(WorkerId id, Presence presence, const std::string& reason);

  const RunHost run_;
  RunJournal& journal_;
  Roster roster_;
  Attendance attendance_;
  std::atomic<bool> is_run_described_ = false;
};

}  // namespace echoline::learner
