// Looks again at rewards that workers hand in, on a thread beside the rollout desk. Private to learner/.
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
#include "learner/second_look.hpp"

namespace echoline::learner {

// What the learner finds of one response, looking twice where it has to. Nothing that time alone explains is held
// against anybody: it makes a response worth less, never more.
Regraded regrade(const SecondLook& look, const schema::Trajectory& trajectory, const schema::Problem& problem,
                 const std::atomic<bool>* stop = nullptr);

// Thread-safe. What waits is bounded, and what is too much is left out: nobody waits for the regrader. Workers have
// turns, so that one whose responses take long to grade does not hide others.
class Regrader {
 public:
  static constexpr std::size_t kWaitingMax = 1024, kWaitingOfWorkerMax = 128, kWaitingBytesMax = 64u << 20;

  // `wake` is called on the regrader's thread when newly_found() has something to tell; must not block.
  Regrader(std::shared_ptr<const SecondLook> look, std::uint64_t secret, std::function<void()> wake);
  ~Regrader();

  // What was taken in of a worker.
  void taken_in(WorkerId worker, const schema::Problem& problem, const schema::Submission& submission);
  void step_measured(double seconds, std::uint64_t responses);
  // Who has to go, since the last call.
  std::vector<RegradingCounts::Expelled> newly_found();

  struct State {
    RegradingCounts counts;
    double share = 1;           // of what comes now
    std::uint64_t waiting = 0;  // to be looked at
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
  void forget(WorkerId worker);
  // The next one, of the worker whose turn it is; nothing when stopped.
  std::optional<Item> take();
  void loop();

  const std::shared_ptr<const SecondLook> look_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Regrading regrading_;                           // guarded by mutex_
  std::vector<RegradingCounts::Expelled> found_;  // guarded by mutex_; each worker once
  std::map<WorkerId, std::deque<Item>> waiting_;  // guarded by mutex_; nobody without an item
  std::size_t items_ = 0, bytes_ = 0;             // guarded by mutex_; in waiting_
  WorkerId turn_;                                 // guarded by mutex_; who was looked at last
  std::atomic<bool> stop_ = false;
  bool told_impossible_ = false;  // the thread's
  std::thread thread_;            // last: it uses all of the above
};

}  // namespace echoline::learner
