// Threads that score submissions which came without scores. DeskScores adds their groups and takes the scored ones.
#include "learner/scorer.hpp"

#include "base/clock.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kPoll = std::chrono::seconds(1);  // between two looks at stop_
constexpr std::size_t kGroupSizeMax = 1024;          // maximum of rollout.group_size

}  // namespace

Scorer::Scorer(std::shared_ptr<const ScoreVerifier> verifier, std::function<void()> wake)
    : verifier_(std::move(verifier)), wake_(std::move(wake)), queue_(kGroupsMax * kGroupSizeMax) {}

Scorer::~Scorer() {
  stop_ = true;
  queue_.close();
  for (std::thread& thread : threads_) thread.join();
}

std::size_t Scorer::free_group_slots() const {
  const std::lock_guard lock(mutex_);
  return kGroupsMax - std::min(kGroupsMax, in_progress_.size());
}

std::set<GroupId> Scorer::groups_in_progress() const {
  const std::lock_guard lock(mutex_);
  return in_progress_;
}

void Scorer::add(replay_buffer::Group group, schema::Problem problem) {
  while (threads_.size() < kThreads) threads_.emplace_back([this] { score_until_stopped(); });
  {
    const std::lock_guard lock(mutex_);
    in_progress_.insert(group.id);
  }
  auto work = std::make_shared<Work>();
  work->unscored_members = group.trajectories.size();
  work->group = std::move(group);
  work->problem = std::move(problem);
  // `members` is a copy, because the threads count unscored_members down meanwhile.
  for (std::size_t member = 0, members = work->unscored_members; member < members; ++member)
    queue_.try_push(Item{.work = work, .member = member});  // refused only when the queue is closed
}

std::vector<Scorer::Done> Scorer::take_done() {
  const std::lock_guard lock(mutex_);
  for (const Done& done : done_) in_progress_.erase(done.group.id);
  return std::exchange(done_, {});
}

ScorerCounts Scorer::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void Scorer::score_until_stopped() {
  const SystemClock clock;
  for (;;) {
    const auto item = queue_.pop(kPoll);
    if (stop_) return;  // unscored groups stay in the store
    if (!item) continue;
    Work& work = *item->work;
    // No other thread uses this member until the group is done.
    schema::Trajectory& trajectory = work.group.trajectories[item->member];
    const TimePoint began_at = clock.now();
    auto computed = verifier_->compute_score(trajectory, work.problem, &stop_);
    if (stop_) return;
    // The task ran, but does not fit the trajectory, for example because it gave other observations.
    if (computed && computed->refusal)
      computed = fail(Code::kInvalid, "score", "'{}': {}", trajectory.id(), computed->refusal->detail);
    if (computed) {
      trajectory.set_reward(computed->score.reward);
      trajectory.set_correct(computed->score.correct);
      trajectory.set_late(computed->score.late);  // grading reached its time limit
      for (const auto& [name, value] : computed->score.components) (*trajectory.mutable_components())[name] = value;
      // The score can make the trajectory invalid, for example by a reward that is not finite.
      if (const Status valid = data_plane::check(trajectory); !valid) computed = valid.error();
    }
    bool is_group_done = false;
    {
      const std::lock_guard lock(mutex_);
      if (computed) {
        ++counts_.responses;
        counts_.seconds += seconds(clock.now() - began_at);
      } else if (work.status) {
        work.status = computed.error();  // the group's first error is kept
      }
      is_group_done = --work.unscored_members == 0;
      if (is_group_done) {
        counts_.failed_groups += work.status ? 0 : 1;
        done_.push_back({.group = std::move(work.group), .status = std::move(work.status)});
      }
    }
    if (is_group_done) wake_();
  }
}

}  // namespace echoline::learner
