// The learner's counter to its workers: hands out leases, takes in trajectories, and gives training whole fresh
// batches.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <variant>

#include "base/bounded_queue.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/batch_hand_over.hpp"
#include "learner/database_edge.hpp"
#include "learner/desk_inbox.hpp"
#include "learner/door.hpp"
#include "learner/offered_policies.hpp"
#include "learner/regrader.hpp"
#include "learner/scorer.hpp"
#include "overlay/types.hpp"
#include "replay_buffer/buffer.hpp"
#include "replay_buffer/job_ledger.hpp"
#include "replay_buffer/step_pace.hpp"

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

// A group that could not be generated, and that nobody will be asked for again.
struct GroupSetAside {
  GroupId group;
  std::string problem;  // its id, empty when not even that can be told
  std::string reason, detail;
};

// What the desk tells others; called on its thread or by receive(), must not block.
struct DeskEvents {
  std::function<void(WorkerId, std::string bytes)> send;  // a message for a worker
  // Durable trajectories of a worker, and for how long it had work that no earlier ones account for.
  std::function<void(WorkerId, std::uint64_t rollouts, double held_s)> accepted;
  std::function<void(WorkerId, const std::string& reason)> misbehaved;  // it should be expelled
  std::function<void(const GroupSetAside&)> set_aside;
  std::function<void(const PolicyUnusable&)> policy_unusable;  // may be empty
  std::function<void(WorkerId)> turned_away;  // it asked, held nothing, and there was nothing for anybody; may be empty
  std::function<void(WorkerId)> leaving;      // it was told to end, and finishes what it has; may be empty
  // The database's error when it stops storing; null when it stores again. May be empty.
  std::function<void(const Error*)> held_up;
  std::function<void(WorkerId)>
      drained;  // one that retire() was called for has handed in all; may be empty, may come again
};

struct DeskCounts {
  replay_buffer::Counts buffer;
  replay_buffer::LedgerCounts leases;
  std::map<std::string, std::uint64_t> refused;  // submissions by reason
  Regrader::State regrading;
  ScorerCounts scoring;
};

// Owns the replay buffer and the job ledger on a thread of its own; every method is thread-safe. Messages wait in a
// bounded queue and submissions that wait together are committed together; each is acknowledged once it is durable.
//
// While the database cannot store, because its disk is full or fails, the desk is held up: it keeps messages in order,
// grants no lease, ends none and blames no worker. It tries again every DeskOptions::retry_every. Once that succeeds,
// leases last longer by the time that has passed, and the messages are handled. The desk waits for room without end. It
// gives the database up, and wait_batch() returns the error, when the file is damaged, or when another failure has
// lasted for DeskOptions::database_patience.
class RolloutDesk {
 public:
  // `resume_step`: the next learner step; whatever later steps consumed becomes available again.
  static Result<std::unique_ptr<RolloutDesk>> open(const DeskOptions& options, Door door, std::uint64_t resume_step,
                                                   DeskEvents events);
  ~RolloutDesk();

  // From now on workers may have `version`, and hand in tokens of it.
  void publishing(Version version);
  // And leases may be granted for it.
  void published(Version version, const overlay::Digest& digest);
  // A message as it came from the overlay. Who leaves too many or too long ones unread is told to go.
  void receive(WorkerId worker, std::string bytes);
  void worker_lost(WorkerId worker);
  // It gets no more work, until it joins anew.
  void retire(WorkerId worker);
  void worker_joined(WorkerId worker);
  // Nothing that workers still make is wanted: who was told to end need not finish it.
  void wants_no_more() { wants_no_more_ = true; }

  // Waits until a batch for `step` is whole and no live lease would be stranded by the step after it, then returns
  // it; nothing when `wait` is over or stop() was called. kInvalid when group after group had to be set aside and none
  // could be generated; the database's error when it is given up.
  Result<std::optional<replay_buffer::Batch>> wait_batch(std::uint64_t step, Duration wait);
  // The next three return the error of a database that cannot store now (kExhausted, kIo, kUnavailable), and may be
  // called again. Marks the batch consumed by `step`, drops what the next step may not use any more, and moves on to
  // that step.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  // Removes what was consumed before `step`; see ReplayBuffer::prune.
  Status prune(std::uint64_t step);
  // What waits of a worker was found not to be the policy's: nobody trains on it.
  Status disown(WorkerId worker);
  Result<DeskCounts> counts();
  bool held_up() const { return !database_.can_store(); }
  // Whether the database is given up, so that no call succeeds any more.
  bool given_up() const { return database_.state() == DatabaseEdge::State::kGivenUp; }
  void stop();

 private:
  using Task = std::function<void()>;
  using Item = std::variant<Task, Deferred>;

  RolloutDesk(const DeskOptions& options, Door door, DeskEvents events);
  Status open_on_thread(std::uint64_t resume_step);
  void loop();
  // Runs `work` on the desk's thread and waits for its result.
  template <class T>
  Result<T> call(std::function<Result<T>()> work);
  void work_off();
  void handle_requests(std::vector<Incoming> messages);
  bool handle(WorkerId worker, const schema::WorkerMessage& message);
  void try_again();
  void release_overflowed();
  double lease_time() const;
  void keep_conduct(WorkerId worker);
  void tell_idle();
  void expel(WorkerId worker, const std::string& reason);
  void expel_liars();
  void score();
  Status take_scores(Scorer::Done done);
  Status feed_scorer();
  Status discard_of(WorkerId worker, std::string_view reason);
  void tell_off_talker(WorkerId worker);
  void note_malformed(WorkerId worker, const std::string& what);
  bool is_unscored(const schema::Submission& submission);
  void note_taken_in(WorkerId worker, const schema::Submission& submission);
  bool take_in(const std::vector<std::pair<WorkerId, schema::Submission>>& submissions);
  std::optional<Refusal> unpublished(const schema::Submission& submission) const;
  bool take_back(WorkerId worker, const schema::WorkFailed& failure);
  bool give_back(WorkerId worker, const schema::WorkReturned& returned);
  void renew(WorkerId worker, const schema::WorkProgress& progress);
  bool blame_policy(WorkerId worker, const schema::WorkFailed& failure);
  void tell_unusable(const PolicyUnusable& policy);
  Status stuck();
  void let_go(WorkerId worker);
  using Message = std::pair<WorkerId, const schema::WorkerMessage*>;
  bool lease_and_renew(std::span<const Message> messages);
  void grant(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& answer);
  // Leases for what can be generated; what cannot is set aside.
  Result<void> fill(WorkerId worker, const schema::WorkRequest& request, schema::WorkGrant& grant);
  void tell_set_aside(bool unasked = false);  // `unasked`: no worker has been asked for these groups
  Result<std::optional<replay_buffer::Batch>> trainable_batch(std::uint64_t step);
  void offer_batch();
  void excuse_pause();

  const DeskOptions options_;
  const DeskEvents events_;
  DeskInbox inbox_;
  BatchHandOver hand_over_;
  LeaseClock clock_;
  DatabaseEdge database_;
  std::atomic<bool> wants_no_more_ = false;
  BoundedQueue<Item> queue_;
  std::thread thread_;

  // The desk thread's own.
  std::unique_ptr<replay_buffer::ReplayBuffer> buffer_;
  std::unique_ptr<replay_buffer::JobLedger> ledger_;
  OfferedPolicies policies_;
  TimePoint stuck_since_ = kNever;
  std::map<std::string, std::uint64_t> refused_;
  Door door_;
  data_plane::TrajectoryLimits limits_;
  Conduct conduct_;
  Status can_generate_;  // or why group after group had to be set aside
  std::uint64_t step_ = 0;
  replay_buffer::StepPace step_pace_;
  std::set<WorkerId> told_slow_, retired_;
  std::uint64_t told_set_aside_ = 0;
  std::vector<GroupId> in_training_;  // of the batch that was given out last, until it is consumed
  std::unique_ptr<Regrader> regrader_;
  std::unique_ptr<Scorer> scorer_;
  bool unscored_wait_ = true;  // some group may
};

}  // namespace echoline::learner
