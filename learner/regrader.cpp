#include "learner/regrader.hpp"

#include "base/log.hpp"
#include "base/text.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kPoll = std::chrono::seconds(1);

// Whether it explains the difference that time ran out over one of the two: that one is worth less.
bool explained_by_time(const schema::Trajectory& t, const data_plane::Score& found) {
  return (t.late() && t.reward() <= found.reward) || (found.late && found.reward <= t.reward());
}

}  // namespace

Regraded regrade(const SecondLook& look, const schema::Trajectory& t, const schema::Problem& problem,
                 const std::atomic<bool>* stop) {
  using Verdict = Regraded::Verdict;
  const auto first = look.find(t, problem, stop);
  if (!first) return {Verdict::kImpossible, first.error().message()};
  const std::optional<Refusal> difference = first->refusal ? first->refusal : SecondLook::difference(t, first->score);
  if (!difference) return {Verdict::kSame, {}};
  const std::string detail = fmt::format("'{}' (problem '{}'): {}", t.id(), t.problem_id(), difference->detail);
  if (!first->refusal && explained_by_time(t, first->score)) return {Verdict::kLate, detail};
  const auto second = look.find(t, problem, stop);
  if (!second) return {Verdict::kImpossible, second.error().message()};
  if (!second->refusal && explained_by_time(t, second->score)) return {Verdict::kLate, detail};
  const bool again = first->refusal && second->refusal
                         ? first->refusal->detail == second->refusal->detail
                         : !first->refusal && !second->refusal && SecondLook::same(first->score, second->score);
  return {again ? Verdict::kDifferent : Verdict::kUnsettled, detail};
}

Regrader::Regrader(std::shared_ptr<const SecondLook> look, std::uint64_t secret, std::function<void()> wake)
    : look_(std::move(look)), wake_(std::move(wake)), regrading_(secret), queue_(kWaitingMax), thread_([this] {
        loop();
      }) {}

Regrader::~Regrader() {
  stop_ = true;
  queue_.close();
  thread_.join();
}

void Regrader::taken_in(WorkerId worker, const schema::Problem& problem, const schema::Submission& submission) {
  const auto shared = std::make_shared<const schema::Problem>(problem);
  for (const schema::Trajectory& t : submission.trajectories()) {
    Item item{worker, shared, {}, t.ByteSizeLong() + shared->ByteSizeLong()};
    {
      const std::lock_guard lock(mutex_);
      if (!regrading_.wanted(worker)) continue;
      if (waiting_ >= kWaitingMax || waiting_bytes_ + item.bytes > kWaitingBytesMax) {
        regrading_.left_out();
        continue;
      }
      ++waiting_, waiting_bytes_ += item.bytes;
    }
    item.trajectory = t;
    queue_.try_push(std::move(item));  // refused only when it is closed
  }
}

void Regrader::step_measured(double seconds, std::uint64_t responses) {
  const std::lock_guard lock(mutex_);
  regrading_.step_measured(seconds, responses);
}

std::vector<RegradingCounts::Expelled> Regrader::newly_found() {
  const std::lock_guard lock(mutex_);
  return std::exchange(found_, {});
}

Regrader::State Regrader::state() const {
  const std::lock_guard lock(mutex_);
  return {regrading_.counts(), regrading_.share(), waiting_};
}

void Regrader::loop() {
  const SystemClock clock;
  for (;;) {
    const auto item = queue_.pop(kPoll);
    if (queue_.closed()) return;  // what waits is not looked at any more
    if (!item) continue;
    const TimePoint begun = clock.now();
    Regraded regraded = regrade(*look_, item->trajectory, *item->problem, &stop_);
    if (stop_) return;
    regraded.seconds = seconds(clock.now() - begun);
    regraded.detail = printable(regraded.detail);
    if (regraded.verdict == Regraded::Verdict::kDifferent) log::warn("worker {}: {}", item->worker, regraded.detail);
    if (regraded.verdict == Regraded::Verdict::kImpossible && !std::exchange(told_impossible_, true))
      log::warn("rewards cannot be graded again here, and workers are believed as far as that is so: {}",
                regraded.detail);
    bool found = false;
    {
      const std::lock_guard lock(mutex_);
      --waiting_, waiting_bytes_ -= item->bytes;
      if (auto reason = regrading_.judge(item->worker, regraded)) {
        found_.push_back({item->worker, *std::move(reason)});
        found = true;
      }
    }
    if (found) wake_();
  }
}

}  // namespace echoline::learner
