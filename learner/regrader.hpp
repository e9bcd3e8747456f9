// Grades workers' rewards again, on a thread beside that of the RolloutDesk, which accepts workers' submissions.
// Private to learner/.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "learner/regrading.hpp"
#include "learner/score_verifier.hpp"

namespace echoline::learner {

// Grades one response by the task, and a second time if the first result differs from the worker's. A grade that timed
// out may be too low. A difference that this explains is not counted as misconduct.
Regraded regrade(const ScoreVerifier& verifier, const schema::Trajectory& trajectory, const schema::Problem& problem,
                 const std::atomic<bool>* stop = nullptr);

// Thread-safe. No caller waits for the regrader: its queue is bounded, and responses that do not fit are left out. The
// workers take turns, one response each, so that slow responses of one do not delay those of others.
class Regrader {
 public:
  // Limits of the queue: responses, responses of one worker, and bytes.
  static constexpr std::size_t kWaitingMax = 1024, kWaitingOfWorkerMax = 128, kWaitingBytesMax = 64u << 20;

  // `secret` seeds the choice of responses, so that workers cannot predict it. `wake` is called on the regrader's
  // thread when take_workers_to_expel() has new entries; it must not block.
  Regrader(std::shared_ptr<const ScoreVerifier> verifier, std::uint64_t secret, std::function<void()> wake);
  ~Regrader();

  // Queues the responses of an accepted submission that RegradingRules chooses, unless the queue is full.
  void add_submission(WorkerId worker, const schema::Problem& problem, const schema::Submission& submission);
  // Adapts the share of chosen responses to the time of a training step and the number of its responses.
  void on_step_measured(double step_seconds, std::uint64_t step_responses);
  // Returns the workers to expel, found since the last call.
  std::vector<RegradingCounts::Expelled> take_workers_to_expel();

  struct State {
    RegradingCounts counts;
    double share = 1;           // fraction of responses chosen now
    std::uint64_t waiting = 0;  // queued responses
  };
  State state() const;

 private:
  struct Item {
    WorkerId worker;
    std::shared_ptr<const schema::Problem> problem;
    schema::Trajectory trajectory;
    std::size_t bytes = 0;
  };
  bool has_room(WorkerId worker, std::size_t bytes) const;
  void drop_queue_of(WorkerId worker);
  // Waits for a response of the worker whose turn it is; absent when stopped.
  std::optional<Item> wait_for_item();
  void grade_until_stopped();

  const std::shared_ptr<const ScoreVerifier> verifier_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  RegradingRules rules_;                                     // guarded by mutex_
  std::vector<RegradingCounts::Expelled> workers_to_expel_;  // guarded by mutex_; each worker once
  std::map<WorkerId, std::deque<Item>> waiting_;             // guarded by mutex_; no empty queues
  std::size_t queued_items_ = 0, queued_bytes_ = 0;          // guarded by mutex_; in waiting_
  WorkerId last_graded_;                                     // guarded by mutex_; the worker with the next id is next
  std::atomic<bool> stop_ = false;
  bool warned_cannot_grade_ = false;  // used only by the thread
  std::thread thread_;                // last: it uses all members above
};

}  // namespace echoline::learner
