#include "worker/work.hpp"

#include "base/result.hpp"

namespace echoline::worker {

Work::Work(std::optional<double> rollouts_per_s_max) {
  if (rollouts_per_s_max) pace_.emplace(*rollouts_per_s_max);
}

void Work::granted(schema::WorkGrant& grant) {
  for (schema::Lease& lease : *grant.mutable_leases()) {
    rollouts_ += lease.rollouts();
    leases_.push_back(std::move(lease));
  }
}

std::vector<schema::Lease> Work::take_leases() {
  std::vector<schema::Lease> all(std::make_move_iterator(leases_.begin()), std::make_move_iterator(leases_.end()));
  leases_.clear();
  for (const schema::Lease& lease : all) rollouts_ -= lease.rollouts();
  return all;
}

void Work::finished(TimePoint begun, schema::Submission submission, TimePoint now) {
  const auto rollouts = static_cast<std::uint64_t>(submission.trajectories_size());
  results_.push_back({pace_ ? pace_->due(begun, rollouts, now) : now, rollouts, std::move(submission)});
  rollouts_ += rollouts;
}

std::optional<Work::Finished> Work::take_due(TimePoint now) {
  if (now < next_due()) return std::nullopt;
  std::optional<Finished> result(std::move(results_.front()));
  results_.pop_front();
  rollouts_ -= result->rollouts;
  return result;
}

std::vector<std::uint64_t> Work::result_leases() const {
  std::vector<std::uint64_t> leases;
  for (const Finished& result : results_) leases.push_back(result.submission.lease());
  return leases;
}

void Work::clear() {
  leases_.clear();
  results_.clear();
  rollouts_ = 0;
}

void Work::check() const {
  std::size_t rollouts = 0;
  for (const schema::Lease& lease : leases_) rollouts += lease.rollouts();
  TimePoint last{};
  for (const Finished& result : results_) {
    rollouts += result.rollouts;
    ECHO_CHECK(last <= result.due, "results are not in the order in which they are due");
    last = result.due;
  }
  ECHO_CHECK(rollouts == rollouts_, "{} rollouts are counted as {}", rollouts, rollouts_);
}

}  // namespace echoline::worker
