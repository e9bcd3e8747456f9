// Holds leases until their groups begin, and results until they may be submitted (are due). Used by Agent.
#include "worker/work.hpp"

#include "base/result.hpp"

namespace echoline::worker {

WorkQueue::WorkQueue(std::optional<double> rollouts_per_s_max) {
  if (rollouts_per_s_max) pace_.emplace(*rollouts_per_s_max);
}

void WorkQueue::add_leases(schema::WorkGrant& grant) {
  for (schema::Lease& lease : *grant.mutable_leases()) {
    rollouts_ += lease.rollouts();
    leases_.push_back(std::move(lease));
  }
}

std::vector<schema::Lease> WorkQueue::take_leases() {
  std::vector<schema::Lease> taken(std::make_move_iterator(leases_.begin()), std::make_move_iterator(leases_.end()));
  leases_.clear();
  for (const schema::Lease& lease : taken) rollouts_ -= lease.rollouts();
  return taken;
}

void WorkQueue::add_result(TimePoint begun, schema::Submission submission, TimePoint now) {
  const auto rollouts = static_cast<std::uint64_t>(submission.trajectories_size());
  const TimePoint due = pace_ ? pace_->due_time(begun, rollouts, now) : now;  // never before that of earlier results
  results_.push_back({.due = due, .rollouts = rollouts, .submission = std::move(submission)});
  rollouts_ += rollouts;
}

std::optional<WorkQueue::DueResult> WorkQueue::take_due_result(TimePoint now) {
  if (now < next_due()) return std::nullopt;  // also without results, because next_due() is kNever then
  std::optional<DueResult> result(std::move(results_.front()));
  results_.pop_front();
  rollouts_ -= result->rollouts;
  return result;
}

std::vector<std::uint64_t> WorkQueue::lease_ids_of_results() const {
  std::vector<std::uint64_t> leases;
  for (const DueResult& result : results_) leases.push_back(result.submission.lease());
  return leases;
}

void WorkQueue::clear() {
  leases_.clear();
  results_.clear();
  rollouts_ = 0;
}

void WorkQueue::check() const {
  std::size_t rollouts = 0;
  for (const schema::Lease& lease : leases_) rollouts += lease.rollouts();
  TimePoint previous_due{};
  for (const DueResult& result : results_) {
    rollouts += result.rollouts;
    ECHO_CHECK(previous_due <= result.due, "results are not in the order in which they are due");
    previous_due = result.due;
  }
  ECHO_CHECK(rollouts == rollouts_, "{} rollouts are counted as {}", rollouts, rollouts_);
}

}  // namespace echoline::worker
