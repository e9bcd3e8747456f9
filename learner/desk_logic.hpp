// The RolloutDesk's work, on the desk's own thread: the replay buffer, and the parts that handle messages and due work.
// Private to learner/.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "learner/desk_leases.hpp"
#include "learner/desk_submissions.hpp"

namespace echoline::learner {

struct DeskCounts {
  replay_buffer::Counts buffer;
  replay_buffer::LedgerCounts leases;
  std::map<std::string, std::uint64_t> refused;  // submissions by reason
  Regrader::State regrading;
  ScorerCounts scoring;
};

// One thread.
class DeskLogic {
 public:
  static constexpr Duration kTick = std::chrono::milliseconds(200);  // run_due() is called at least this often

  // Opens the replay buffer. `resume_step`: the next learner step, counted from 0. Groups that it or a later step
  // consumed become available again.
  static Result<std::unique_ptr<DeskLogic>> open(DeskContext desk, std::uint64_t resume_step);

  // Extends leases by a pause of this thread, or by the time for which the database could not store, because workers
  // could submit nothing meanwhile.
  void extend_leases_after_pause();
  // Handles deferred messages and writes, in order, until something cannot be stored.
  void process_deferred();
  // Does the work that is due: ends leases, expels unproductive workers, stores scores, passes a batch that is whole.
  void run_due();
  // Adds a message or write to the backlog, and handles the backlog if it is long.
  void defer(Deferred work);

  OfferedPolicies& policies() { return policies_; }
  DeskLeases& leases() { return leases_; }
  StepBatches& batches() { return batches_; }
  // See RolloutDesk.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  Result<DeskCounts> counts();

  void check() const;  // aborts if its parts disagree

 private:
  DeskLogic(DeskContext desk, std::uint64_t resume_step);
  std::vector<std::optional<Result<schema::WorkerMessage>>> parse(std::span<const Incoming> messages) const;
  void handle_messages(std::vector<Incoming> messages);
  bool handle(WorkerId worker, const schema::WorkerMessage& message);
  void on_worker_leaving(WorkerId worker);
  void return_leases_of_overflowed();

  DeskContext desk_;
  data_plane::TrajectoryLimits limits_;  // of workers' messages
  OfferedPolicies policies_;
  Discipline discipline_;
  SetAsideGroups set_aside_;
  StepBatches batches_;
  DeskScores scores_;
  DeskLeases leases_;
  DeskSubmissions submissions_;
};

}  // namespace echoline::learner
