// The options, callbacks and objects that all parts of the RolloutDesk share. The desk grants leases to workers and
// stores their trajectories. Private to learner/.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "learner/batch_request.hpp"
#include "learner/database_backlog.hpp"
#include "learner/desk_inbox.hpp"
#include "learner/offered_policies.hpp"
#include "learner/sample_desk.hpp"
#include "learner/submission_checker.hpp"
#include "replay_buffer/buffer.hpp"
#include "replay_buffer/job_ledger.hpp"

namespace echoline::learner {

struct DeskOptions {
  std::filesystem::path file;                           // the replay buffer's
  replay_buffer::Pacing pacing;                         // the sizes of groups and steps, and the staleness limits
  replay_buffer::LeaseLength lease;                     // how long leases are valid
  const Clock* clock = nullptr;                         // null: the system's clock
  Duration retry_every = std::chrono::seconds(1);       // between attempts while the database cannot store
  Duration database_patience = DiskPatience::kDefault;  // before errors other than a full disk end the run
  // The run ends if, for this long, no worker can generate with its policy and the batch is not whole.
  Duration stuck_max = std::chrono::minutes(1);
  // If set, workers generate these requests instead of groups of the run's task. Outlives the desk.
  SampleDesk* samples = nullptr;
};

// A group that cannot be generated and is never leased again.
struct GroupSetAside {
  GroupId group;
  std::string problem;  // its id; empty if the adapter cannot produce the problem
  std::string reason;   // a stable text, by which reports count
  std::string detail;   // for people
};

// Callbacks of the desk, on its thread or in RolloutDesk::receive(). They must not block. The first four are required,
// the others may be empty.
struct DeskEvents {
  std::function<void(WorkerId, std::string bytes)> send;  // a message for a worker
  // Trajectories of a worker are durable. `lease_seconds`: for how long the worker has held leases since its previous
  // trajectories.
  std::function<void(WorkerId, std::uint64_t rollouts, double lease_seconds)> accepted;
  std::function<void(WorkerId, const std::string& reason)> misbehaved;  // the worker should be expelled
  // The worker's machine ends, and it finishes its groups. Returns false if the worker is lost already.
  std::function<bool(WorkerId)> leaving;
  std::function<void(const GroupSetAside&)> set_aside;
  std::function<void(const PolicyUnusable&)> policy_unusable;
  // A worker without a lease requested work, and there was none for any worker.
  std::function<void(WorkerId)> turned_away;
  // Seconds since its last request for which the worker, or the free part of its capacity, waited for work.
  std::function<void(WorkerId, double seconds)> without_work;
  std::function<void(WorkerId)> drained;  // a retired worker without a lease requested work; may be called again
  // The database's error when it stops storing; null when it stores again.
  std::function<void(const Error*)> database_stalled;
};

// The referenced objects must outlive the context. Other threads use some of them as well.
struct DeskContext {
  const DeskOptions& options;
  const DeskEvents& events;
  LeaseClock& clock;
  DatabaseBacklog& database;
  DeskInbox& inbox;
  BatchRequest& batch_request;
  const std::atomic<bool>& run_needs_results;
  std::function<void()> wake;  // makes the desk's thread look for due work; called on the scorers' threads
  // Blocks the worker's messages, and calls DeskEvents::misbehaved.
  std::function<void(WorkerId, const std::string& reason)> expel;
  SubmissionChecker checker;
  std::unique_ptr<replay_buffer::ReplayBuffer> buffer = nullptr;  // opened by DeskLogic
  std::unique_ptr<replay_buffer::JobLedger> ledger = nullptr;
};

}  // namespace echoline::learner
