// The learner's side of generation: grants leases to workers, stores their trajectories, and passes whole fresh batches
// to training.
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
// bounded queue and submissions that wait together are committed together; each is acknowledged once it is durable.
//
// While the database cannot store, because its disk is full or fails, the desk is stalled: it keeps messages in order,
// grants no lease, ends none and blames no worker. It tries again every DeskOptions::retry_every. Once that succeeds,
// it extends leases by the length of the stall and handles the messages. The desk waits for disk space without end. It
// gives the database up, and wait_batch() returns the error, if the file is damaged, or if another failure has lasted
// for DeskOptions::database_patience.
class RolloutDesk {
 public:
  // `resume_step`: the next learner step; groups that later steps consumed become available again.
  static Result<std::unique_ptr<RolloutDesk>> open(const DeskOptions& options, SubmissionChecker checker,
                                                   std::uint64_t resume_step, DeskEvents events);
  ~RolloutDesk();

  // From now on workers may have `version` and submit tokens of it.
  void begin_publishing(Version version);
  // From now on leases may be granted for `version`.
  void finish_publishing(Version version, const overlay::Digest& digest);
  // Takes a message from the overlay. Expels a worker whose unread messages are too many or too long.
  void receive(WorkerId worker, std::string bytes);
  // Groups of a worker that is away or lost go to other workers; a retired worker gets no more until it joins again.
  void on_presence_change(const PresenceChange& change);
  // The run has ended: a worker whose machine ends need not finish its groups.
  void end_result_requests() { run_needs_results_ = false; }

  // Waits until a batch for `step` is whole and no live lease would be stranded by the step after it, then returns the
  // batch. Absent after `wait` or stop(). kInvalid: many groups in a row were set aside and none could be generated.
  // Returns the database's error if the database is given up.
  Result<std::optional<replay_buffer::Batch>> wait_batch(std::uint64_t step, Duration wait);
  // The next three return the error of a database that cannot store now (kExhausted, kIo, kUnavailable), and may be
  // called again. Marks the batch consumed by `step`, drops groups that are too stale for the next step, and moves on
  // to that step.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  // Removes what was consumed before `step`; see ReplayBuffer::prune.
  Status prune(std::uint64_t step);
  // Discards the worker's waiting groups, because they do not come from the policy.
  Status discard_groups_of(WorkerId worker);
  Result<DeskCounts> counts();
  bool is_database_stalled() const { return !database_.can_store(); }
  // Whether the database is given up: no call succeeds any more.
  bool given_up() const { return database_.state() == DatabaseEdge::State::kGivenUp; }
  void stop();

 private:
  using Task = std::function<void()>;
  using Item = std::variant<Task, Deferred>;

  RolloutDesk(const DeskOptions& options, DeskEvents events, Bytes message_max);
  void loop();
  // Runs `work` on the desk's thread and waits for its result.
  template <class T>
  Result<T> call(std::function<Result<T>()> work);
  void wake() {
    queue_.try_push(Item(Task([] {})));
  }
  void expel(WorkerId worker, const std::string& reason);

  const DeskOptions options_;
  const DeskEvents events_;
  DeskInbox inbox_;
  BatchRequest batch_request_;
  LeaseClock clock_;
  DatabaseEdge database_;
  std::atomic<bool> run_needs_results_ = true;
  BoundedQueue<Item> queue_;
  std::unique_ptr<DeskLogic> logic_;  // used only by thread_
  std::thread thread_;
};

}  // namespace echoline::learner
