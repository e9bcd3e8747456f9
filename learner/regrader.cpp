// The thread that grades again. DeskScores adds submissions and takes the results.
#include "learner/regrader.hpp"

#include "base/log.hpp"
#include "base/text.hpp"

namespace echoline::learner {
namespace {

// Whether a timeout explains the difference: one of the two grades timed out, and it is not the higher one.
bool is_explained_by_timeout(const schema::Trajectory& trajectory, const data_plane::Score& score) {
  return (trajectory.late() && trajectory.reward() <= score.reward) ||
         (score.late && score.reward <= trajectory.reward());
}

}  // namespace

Regraded regrade(const ScoreVerifier& verifier, const schema::Trajectory& trajectory, const schema::Problem& problem,
                 const std::atomic<bool>* stop) {
  using Verdict = Regraded::Verdict;
  const auto first = verifier.compute_score(trajectory, problem, stop);
  if (!first) return {.verdict = Verdict::kImpossible, .detail = first.error().message()};
  const std::optional<Refusal> difference =
      first->refusal ? first->refusal : ScoreVerifier::difference(trajectory, first->score);
  if (!difference) return {.verdict = Verdict::kSame, .detail = {}};
  const std::string detail =
      fmt::format("'{}' (problem '{}'): {}", trajectory.id(), trajectory.problem_id(), difference->detail);
  if (!first->refusal && is_explained_by_timeout(trajectory, first->score))
    return {.verdict = Verdict::kLate, .detail = detail};
  // A difference counts only if the learner's own grades agree.
  const auto second = verifier.compute_score(trajectory, problem, stop);
  if (!second) return {.verdict = Verdict::kImpossible, .detail = second.error().message()};
  if (!second->refusal && is_explained_by_timeout(trajectory, second->score))
    return {.verdict = Verdict::kLate, .detail = detail};
  const bool same_refusal = first->refusal && second->refusal && first->refusal->detail == second->refusal->detail;
  const bool same_score = !first->refusal && !second->refusal && ScoreVerifier::is_same(first->score, second->score);
  return {.verdict = same_refusal || same_score ? Verdict::kDifferent : Verdict::kUnsettled, .detail = detail};
}

Regrader::Regrader(std::shared_ptr<const ScoreVerifier> verifier, std::uint64_t secret, std::function<void()> wake)
    : verifier_(std::move(verifier)),
      wake_(std::move(wake)),
      rules_(secret),
      thread_([this] { grade_until_stopped(); }) {}

Regrader::~Regrader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Regrader::has_room(WorkerId worker, std::size_t bytes) const {
  const auto queue = waiting_.find(worker);
  return queued_items_ < kWaitingMax && queued_bytes_ + bytes <= kWaitingBytesMax &&
         (queue == waiting_.end() || queue->second.size() < kWaitingOfWorkerMax);
}

void Regrader::add_submission(WorkerId worker, const schema::Problem& problem, const schema::Submission& submission) {
  const auto shared_problem = std::make_shared<const schema::Problem>(problem);
  const std::lock_guard lock(mutex_);
  for (const schema::Trajectory& trajectory : submission.trajectories()) {
    if (!rules_.should_grade(worker)) continue;
    const std::size_t bytes = trajectory.ByteSizeLong() + shared_problem->ByteSizeLong();
    if (!has_room(worker, bytes)) {
      rules_.on_queue_full(worker);
      continue;
    }
    waiting_[worker].push_back({.worker = worker, .problem = shared_problem, .trajectory = trajectory, .bytes = bytes});
    ++queued_items_;
    queued_bytes_ += bytes;
  }
  changed_.notify_one();
}

void Regrader::drop_queue_of(WorkerId worker) {
  const auto queue = waiting_.find(worker);
  if (queue == waiting_.end()) return;
  for (const Item& item : queue->second) {
    --queued_items_;
    queued_bytes_ -= item.bytes;
  }
  waiting_.erase(queue);
}

std::optional<Regrader::Item> Regrader::wait_for_item() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
  if (stop_) return std::nullopt;  // queued responses are not graded any more
  // Round robin by id: takes the next worker after the one that was graded last.
  auto queue = waiting_.upper_bound(last_graded_);
  if (queue == waiting_.end()) queue = waiting_.begin();
  last_graded_ = queue->first;
  Item item = std::move(queue->second.front());
  queue->second.pop_front();
  if (queue->second.empty()) waiting_.erase(queue);
  --queued_items_;
  queued_bytes_ -= item.bytes;
  return item;
}

void Regrader::on_step_measured(double step_seconds, std::uint64_t step_responses) {
  const std::lock_guard lock(mutex_);
  rules_.on_step_measured(step_seconds, step_responses);
}

std::vector<RegradingCounts::Expelled> Regrader::take_workers_to_expel() {
  const std::lock_guard lock(mutex_);
  return std::exchange(workers_to_expel_, {});
}

Regrader::State Regrader::state() const {
  const std::lock_guard lock(mutex_);
  return {.counts = rules_.counts(), .share = rules_.graded_fraction(), .waiting = queued_items_};
}

void Regrader::grade_until_stopped() {
  const SystemClock clock;
  while (const auto item = wait_for_item()) {
    const TimePoint began_at = clock.now();
    Regraded regraded = regrade(*verifier_, item->trajectory, *item->problem, &stop_);
    if (stop_) return;
    regraded.seconds = seconds(clock.now() - began_at);
    regraded.detail = printable(regraded.detail);
    if (regraded.verdict == Regraded::Verdict::kDifferent) log::warn("worker {}: {}", item->worker, regraded.detail);
    if (regraded.verdict == Regraded::Verdict::kImpossible && !std::exchange(warned_cannot_grade_, true))
      log::warn("rewards cannot be graded again here, so the rewards of workers are accepted unchecked: {}",
                regraded.detail);
    bool must_expel = false;
    {
      const std::lock_guard lock(mutex_);
      if (auto reason = rules_.record_result(item->worker, regraded)) {
        workers_to_expel_.push_back({item->worker, *std::move(reason)});
        must_expel = true;
        drop_queue_of(item->worker);
      }
    }
    if (must_expel) wake_();
  }
}

}  // namespace echoline::learner
