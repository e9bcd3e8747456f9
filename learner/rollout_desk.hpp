// The learner's counter to its workers: hands out leases, takes in trajectories, and gives training whole fresh
// batches.
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
// While the database cannot store, because its disk is full or fails, the desk is held up: it keeps messages in order,
// grants no lease, ends none and blames no worker. It tries again every DeskOptions::retry_every. Once that succeeds,
// leases last longer by the time that has passed, and the messages are handled. The desk waits for room without end. It
// gives the database up, and wait_batch() returns the error, when the file is damaged, or when another failure has
// lasted for DeskOptions::database_patience.
class RolloutDesk {
 public:
  // `resume_step`: the next learner step; groups that later steps consumed become available again.
  static Result<std::unique_ptr<RolloutDesk>> open(const DeskOptions& options, Door door, std::uint64_t resume_step,
                                                   DeskEvents events);
  ~RolloutDesk();

  // From now on workers may have `version`, and hand in tokens of it.
  void publishing(Version version);
  // And leases may be granted for it.
  void published(Version version, const overlay::Digest& digest);
  // A message as it came from the overlay. A worker with too many or too long messages unread is expelled.
  void receive(WorkerId worker, std::string bytes);
  // Groups of a worker that is away or lost go to other workers; a retired worker gets no more until it joins again.
  void follow(const PresenceChange& change);
  // The run has ended: a worker whose machine ends need not finish its groups.
  void wants_no_more() { results_wanted_ = false; }

  // Waits until a batch for `step` is whole and no live lease would be stranded by the step after it, then returns
  // it; nothing when `wait` is over or stop() was called. kInvalid when group after group had to be set aside and none
  // could be generated; the database's error when it is given up.
  Result<std::optional<replay_buffer::Batch>> wait_batch(std::uint64_t step, Duration wait);
  // The next three return the error of a database that cannot store now (kExhausted, kIo, kUnavailable), and may be
  // called again. Marks the batch consumed by `step`, drops groups that are too stale for the next step, and moves on
  // to that step.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  // Removes what was consumed before `step`; see ReplayBuffer::prune.
  Status prune(std::uint64_t step);
  // The waiting groups of this worker do not come from the policy: they are not trained on.
  Status disown(WorkerId worker);
  Result<DeskCounts> counts();
  bool held_up() const { return !database_.can_store(); }
  // Whether the database is given up, so that no call succeeds any more.
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
  BatchHandOver hand_over_;
  LeaseClock clock_;
  DatabaseEdge database_;
  std::atomic<bool> results_wanted_ = true;
  BoundedQueue<Item> queue_;
  std::unique_ptr<DeskLogic> logic_;  // the thread's
  std::thread thread_;
};

}  // namespace echoline::learner
