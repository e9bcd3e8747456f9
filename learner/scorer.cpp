#include "learner/scorer.hpp"

#include "base/clock.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kPoll = std::chrono::seconds(1);
constexpr std::size_t kGroupSizeMax = 1024;  // run_config.cpp

}  // namespace

Scorer::Scorer(std::shared_ptr<const SecondLook> look, std::function<void()> wake)
    : look_(std::move(look)), wake_(std::move(wake)), queue_(kGroupsMax * kGroupSizeMax) {}

Scorer::~Scorer() {
  stop_ = true;
  queue_.close();
  for (std::thread& thread : threads_) thread.join();
}

std::size_t Scorer::room() const {
  const std::lock_guard lock(mutex_);
  return kGroupsMax - std::min(kGroupsMax, inside_.size());
}

std::set<GroupId> Scorer::inside() const {
  const std::lock_guard lock(mutex_);
  return inside_;
}

void Scorer::add(replay_buffer::Group group, schema::Problem problem) {
  while (threads_.size() < kThreads) threads_.emplace_back([this] { loop(); });
  {
    const std::lock_guard lock(mutex_);
    inside_.insert(group.id);
  }
  auto work = std::make_shared<Work>();
  work->missing = group.trajectories.size();
  work->group = std::move(group);
  work->problem = std::move(problem);
  for (std::size_t member = 0, members = work->missing; member < members; ++member)
    queue_.try_push(Item{work, member});  // refused only when the queue is closed
}

std::vector<Scorer::Done> Scorer::done() {
  const std::lock_guard lock(mutex_);
  for (const Done& done : done_) inside_.erase(done.group.id);
  return std::exchange(done_, {});
}

ScorerCounts Scorer::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void Scorer::loop() {
  const SystemClock clock;
  for (;;) {
    const auto item = queue_.pop(kPoll);
    if (stop_) return;  // unscored groups stay in the store
    if (!item) continue;
    Work& work = *item->work;
    schema::Trajectory& t = work.group.trajectories[item->member];  // used by no other thread until the group is done
    const TimePoint begun = clock.now();
    auto found = look_->find(t, work.problem, &stop_);
    if (stop_) return;
    if (found && found->refusal) found = fail(Code::kInvalid, "score", "'{}': {}", t.id(), found->refusal->detail);
    if (found) {
      t.set_reward(found->score.reward);
      t.set_correct(found->score.correct);
      t.set_late(found->score.late);
      for (const auto& [name, value] : found->score.components) (*t.mutable_components())[name] = value;
      // For example a reward that is not finite.
      if (const Status form = data_plane::check(t); !form) found = form.error();
    }
    bool done = false;
    {
      const std::lock_guard lock(mutex_);
      if (found) {
        ++counts_.responses;
        counts_.seconds += seconds(clock.now() - begun);
      } else if (work.status) {
        work.status = found.error();
      }
      done = --work.missing == 0;
      if (done) {
        counts_.failed_groups += work.status ? 0 : 1;
        done_.push_back({std::move(work.group), std::move(work.status)});
      }
    }
    if (done) wake_();
  }
}

}  // namespace echoline::learner
