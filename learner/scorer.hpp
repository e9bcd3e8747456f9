// Scores groups of text-only submissions (`scored_by: learner`), on threads beside the rollout desk. Private to
// learner/.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "base/bounded_queue.hpp"
#include "learner/second_look.hpp"
#include "replay_buffer/buffer.hpp"

namespace echoline::learner {

struct ScorerCounts {
  std::uint64_t responses = 0;  // scored
  std::uint64_t failed_groups = 0;
  double seconds = 0;  // sum over the scored responses
};

// Thread-safe. A response is scored once; an error of its task fails its group.
class Scorer {
 public:
  static constexpr std::size_t kGroupsMax = 64;  // at a time; further groups wait in the store
  static constexpr std::size_t kThreads = 16;    // the task's own limits also apply (`parallel`, `processes`)

  // `wake` is called on a thread of the scorer when done() has new entries; it must not block.
  Scorer(std::shared_ptr<const SecondLook> look, std::function<void()> wake);
  ~Scorer();

  std::size_t room() const;  // for groups
  std::set<GroupId> inside() const;
  void add(replay_buffer::Group group, schema::Problem problem);

  struct Done {
    replay_buffer::Group group;  // with its scores
    Status status;               // the reason if it has no scores
  };
  std::vector<Done> done();  // since the last call
  ScorerCounts counts() const;

 private:
  struct Work {
    replay_buffer::Group group;
    schema::Problem problem;
    std::size_t missing = 0;
    Status status = ok();
  };
  struct Item {
    std::shared_ptr<Work> work;
    std::size_t member = 0;
  };
  void loop();

  const std::shared_ptr<const SecondLook> look_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::set<GroupId> inside_;  // guarded by mutex_
  std::vector<Done> done_;    // guarded by mutex_; groups still counted in inside_
  ScorerCounts counts_;       // guarded by mutex_
  std::atomic<bool> stop_ = false;
  BoundedQueue<Item> queue_;
  std::vector<std::thread> threads_;  // last: they use all members above; started with the first group
};

}  // namespace echoline::learner
