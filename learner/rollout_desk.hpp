// The learner's side of generation: grants leases to workers, stores their trajectories in the replay buffer, and
// passes whole fresh batches to training. A lease permits a worker to generate one group of responses.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>

#include "base/bounded_queue.hpp"
#include "learner/desk_logic.hpp"
#include "overlay/types.hpp"

namespace echoline::learner {

// Owns the replay buffer and the job ledger on a thread of its own; every method is thread-safe. Messages wait in a
// bounded queue. Submissions that wait together are committed together; each is acknowledged once it is durable.
//
// While the database cannot store, because its disk is full or fails, the desk is stalled. Then it keeps messages in
// order, grants no lease, ends none and blames no worker. It tries again every DeskOptions::retry_every. Once that
// succeeds, it extends leases by the length of the stall and handles the messages. The desk waits for disk space
// without end. It gives the database up if the file is damaged, or if another failure has lasted for
// DeskOptions::database_patience. Then wait_batch() returns the error.
class RolloutDesk {
 public:
  // `resume_step`: the next learner step, counted from 0. Groups that it or a later step consumed become available
  // again.
  static Result<std::unique_ptr<RolloutDesk>> open(const DeskOptions& options, SubmissionChecker checker,
                                                   std::uint64_t resume_step, DeskEvents events);
  ~RolloutDesk();

  // Accepts submissions with tokens of `version` from now on, because workers may have it.
  void begin_publishing(Version version);
  // Grants leases for `version` from now on.
  void finish_publishing(Version version, const overlay::Digest& digest);
  // Takes a message from the overlay. Expels a worker whose unread messages are too many or too long.
  void receive(WorkerId worker, std::string bytes);
  // Groups of a worker that is away or lost go to other workers; a retired worker gets no more until it joins again.
  void on_presence_change(const PresenceChange& change);
  // Call when the run has ended. A worker whose machine ends then need not finish its groups.
  void on_run_ended() { run_needs_results_ = false; }

  // Waits until there is a whole batch for `step`, and until training on it would make no leased group too stale for
  // every later step. Absent after `wait` or stop(). kInvalid: many groups in a row were set aside and none could be
  // generated. Returns the database's error if the database is given up.
  Result<std::optional<replay_buffer::Batch>> wait_batch(std::uint64_t step, Duration wait);
  // While the database cannot store, the next three methods return its error (kExhausted, kIo, kUnavailable) and may be
  // called again.
  //
  // Marks the batch consumed by `step`, drops groups that are too stale for the next step, and moves on to that step.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  // Deletes groups that steps before `step` consumed (ReplayBuffer::prune).
  Status prune(std::uint64_t step);
  // Discards the worker's waiting groups, because they do not come from the policy.
  Status discard_groups_of(WorkerId worker);
  Result<DeskCounts> counts();
  bool is_database_stalled() const { return !database_.can_store(); }
  // If true, no call succeeds any more.
  bool has_given_up_database() const { return database_.state() == DatabaseBacklog::State::kGivenUp; }
  void stop();

 private:
  using Task = std::function<void()>;
  using Item = std::variant<Task, Deferred>;

  RolloutDesk(const DeskOptions& options, DeskEvents events, Bytes message_max);
  void handle_queue_until_closed();
  // Runs `work` on the desk's thread and waits for its result.
  template <class T>
  Result<T> call_on_thread(std::function<Result<T>()> work);
  // Makes the desk's thread do its due work now, as it does after every item of the queue, even an empty task.
  void wake() {
    queue_.try_push(Item(Task([] {})));
  }
  void expel(WorkerId worker, const std::string& reason);

  const DeskOptions options_;
  const DeskEvents events_;
  DeskInbox inbox_;
  BatchRequest batch_request_;
  LeaseClock clock_;
  DatabaseBacklog database_;
  std::atomic<bool> run_needs_results_ = true;
  BoundedQueue<Item> queue_;
  std::unique_ptr<DeskLogic> logic_;  // used only by thread_
  std::thread thread_;
};

}  // namespace echoline::learner
