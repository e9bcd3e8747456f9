// The surroundings that all parts of the rollout desk share. Private to learner/.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "learner/batch_hand_over.hpp"
#include "learner/database_edge.hpp"
#include "learner/desk_inbox.hpp"
#include "learner/door.hpp"
#include "learner/offered_policies.hpp"
#include "replay_buffer/buffer.hpp"
#include "replay_buffer/job_ledger.hpp"

namespace echoline::learner {

struct DeskOptions {
  std::filesystem::path file;  // of the replay buffer
  replay_buffer::Pacing pacing;
  replay_buffer::LeaseLength lease;
  const Clock* clock = nullptr;                         // the system's when absent
  Duration retry_every = std::chrono::seconds(1);       // while the database cannot store
  Duration database_patience = DiskPatience::kDefault;  // with errors that are not about room, before the run ends
  Duration stuck_max =
      std::chrono::minutes(1);  // no worker can generate with the policy it has, and a batch is not whole
};

// A group that cannot be generated and is never leased again.
struct GroupSetAside {
  GroupId group;
  std::string problem;  // its id; empty if the adapter cannot produce the problem
  std::string reason, detail;
};

// Callbacks of the desk, on its thread or in receive(). They must not block, and each may be empty but for the first
// four.
struct DeskEvents {
  std::function<void(WorkerId, std::string bytes)> send;  // a message for a worker
  // Durable trajectories of a worker, and for how long it had work that no earlier ones account for.
  std::function<void(WorkerId, std::uint64_t rollouts, double held_s)> accepted;
  std::function<void(WorkerId, const std::string& reason)> misbehaved;  // it should be expelled
  // Its machine ends, and it finishes the groups that it has. False if the worker is lost already.
  std::function<bool(WorkerId)> leaving;
  std::function<void(const GroupSetAside&)> set_aside;
  std::function<void(const PolicyUnusable&)> policy_unusable;
  std::function<void(WorkerId)> turned_away;  // it asked, held nothing, and no worker could have been given anything
  std::function<void(WorkerId)> drained;      // a retired worker asked and holds no lease; may come again
  // The database's error when it stops storing; null when it stores again.
  std::function<void(const Error*)> held_up;
};

// One desk's; the first seven outlive it, and other threads use some of them.
struct DeskContext {
  const DeskOptions& options;
  const DeskEvents& events;
  LeaseClock& clock;
  DatabaseEdge& database;
  DeskInbox& inbox;
  BatchHandOver& hand_over;
  const std::atomic<bool>& results_wanted;
  std::function<void()> wake;  // called on threads of the scorers
  std::function<void(WorkerId, const std::string& reason)> expel;
  Door door;
  std::unique_ptr<replay_buffer::ReplayBuffer> buffer = nullptr;  // opened by DeskLogic
  std::unique_ptr<replay_buffer::JobLedger> ledger = nullptr;
};

}  // namespace echoline::learner
