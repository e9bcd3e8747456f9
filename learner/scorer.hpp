// Scores groups whose submissions have texts and no scores (`scored_by: learner`), on threads beside the rollout desk.
// Private to learner/.
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
#include "learner/score_verifier.hpp"
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
  static constexpr std::size_t kGroupsMax = 64;  // at a time; further groups wait in the replay buffer
  static constexpr std::size_t kThreads = 16;    // the task's own limits also apply (`parallel`, `processes`)

  // `wake` is called on a thread of the scorer when take_done() has new entries; it must not block.
  Scorer(std::shared_ptr<const ScoreVerifier> verifier, std::function<void()> wake);
  ~Scorer();

  std::size_t free_group_slots() const;  // the number of groups that add() may take now
  std::set<GroupId> groups_in_progress() const;
  void add(replay_buffer::Group group, schema::Problem problem);  // only one thread, the desk's, may call it

  struct Done {
    replay_buffer::Group group;  // with its scores
    Status status;               // the reason if it has no scores
  };
  std::vector<Done> take_done();  // since the last call
  ScorerCounts counts() const;

 private:
  struct Work {
    replay_buffer::Group group;
    schema::Problem problem;
    std::size_t unscored_members = 0;
    Status status = ok();  // the first error of a member, if any
  };
  struct Item {
    std::shared_ptr<Work> work;
    std::size_t member = 0;
  };
  void score_until_stopped();

  const std::shared_ptr<const ScoreVerifier> verifier_;
  const std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::set<GroupId> in_progress_;  // guarded by mutex_
  std::vector<Done> done_;         // guarded by mutex_; groups still counted in in_progress_
  ScorerCounts counts_;            // guarded by mutex_
  std::atomic<bool> stop_ = false;
  BoundedQueue<Item> queue_;
  std::vector<std::thread> threads_;  // last: they use all members above; started with the first group
};

}  // namespace echoline::learner
