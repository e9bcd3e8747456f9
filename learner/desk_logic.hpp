// The rollout desk's work, on its own thread: storage, and the parts that handle messages and due work. Private to
// learner/.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "learner/desk_inbox.hpp"
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

// The parts of the desk that outlive its logic; some are shared with other threads.
struct DeskFrame {
  const DeskOptions& options;
  const DeskEvents& events;
  LeaseClock& clock;
  DatabaseEdge& database;
  DeskInbox& inbox;
  BatchHandOver& hand_over;
  const std::atomic<bool>& results_wanted;
  std::function<void()> wake;  // called on threads of the scorers
  std::function<void(WorkerId, const std::string&)> expel;
};

// One thread.
class DeskLogic {
 public:
  static constexpr Duration kTick = std::chrono::milliseconds(200);  // run_due() is called at least this often

  // Opens the file. `resume_step`: the next learner step; groups that later steps consumed are available again.
  static Result<std::unique_ptr<DeskLogic>> open(const DeskFrame& frame, Door door, std::uint64_t resume_step);

  // Leases last longer by a pause of this thread, or by the time for which the database could not store.
  void excuse_pauses();
  // Handles messages and writes that wait, in order, until something cannot be stored.
  void work_off();
  // Work that time brings: overdue leases, idle workers, scores, a batch that is whole.
  void run_due();
  void defer(Deferred work);

  OfferedPolicies& policies() { return policies_; }
  DeskLeases& leases() { return leases_; }
  StepBatches& batches() { return batches_; }
  // As RolloutDesk has it.
  Status consume(std::uint64_t step, const replay_buffer::Batch& batch);
  Result<DeskCounts> counts();

  void check() const;  // aborts if its parts disagree

 private:
  DeskLogic(const DeskFrame& frame, Door door, std::unique_ptr<replay_buffer::ReplayBuffer> buffer,
            std::unique_ptr<replay_buffer::JobLedger> ledger, std::uint64_t resume_step);
  void handle_messages(std::vector<Incoming> messages);
  bool handle(WorkerId worker, const schema::WorkerMessage& message);
  void end_worker(WorkerId worker);
  void release_overflowed();

  const DeskFrame frame_;
  const std::unique_ptr<replay_buffer::ReplayBuffer> buffer_;
  const std::unique_ptr<replay_buffer::JobLedger> ledger_;
  Door door_;
  const DeskContext context_;
  data_plane::TrajectoryLimits limits_;
  OfferedPolicies policies_;
  Discipline discipline_;
  SetAsideGroups set_aside_;
  StepBatches batches_;
  DeskScores scores_;
  DeskLeases leases_;
  DeskSubmissions submissions_;
};

}  // namespace echoline::learner
