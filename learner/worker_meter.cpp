// A worker's measured speed. Roster has one for each worker.
#include "learner/worker_meter.hpp"

#include <algorithm>
#include <utility>

#include "replay_buffer/rules.hpp"

namespace echoline::learner {

void WorkerMeter::record_accepted(std::uint64_t rollouts, double lease_seconds) {
  pending_.rollouts += static_cast<double>(rollouts);
  pending_.busy_s += lease_seconds;
}

WorkerMeter::Progress WorkerMeter::take_heartbeat(const schema::Vitals& vitals, TimePoint now) {
  Progress progress = measured_progress(vitals, now);
  progress.without_work_s = std::exchange(without_work_s_, 0);
  return progress;
}

// The progress without without_work_s.
WorkerMeter::Progress WorkerMeter::measured_progress(const schema::Vitals& vitals, TimePoint now) {
  constexpr Duration kReportDelayMax = std::chrono::seconds(10);  // within which heartbeats report the time of results
  if (counted_since_ == kNever) counted_since_ = now;
  if (pending_.rollouts == 0)
    return {.rollouts = 0, .busy_s = 0, .turned_away = std::exchange(pending_.turned_away, false)};
  // The worker's counter restarts at 0 with its process.
  const bool has_restarted = vitals.busy_s() < reported_busy_s_;
  const double reported_s = vitals.busy_s() - (has_restarted ? 0 : reported_busy_s_);
  const double passed_s = seconds(now - counted_since_);
  if (unreported_since_ == kNever) unreported_since_ = now;
  if (reported_s == 0 && now - unreported_since_ < kReportDelayMax)
    return {};  // the first heartbeat after the results reports their time
  // After an absence, the reported time includes the absence, so the time with leases counts instead.
  const bool reports_absence = std::exchange(has_returned_, false);
  const double worked_s = reports_absence || reported_s == 0 ? pending_.busy_s : reported_s;
  const Progress progress{.rollouts = pending_.rollouts,
                          .busy_s = replay_buffer::counted_work_seconds(std::min(worked_s, passed_s), pending_.busy_s),
                          .turned_away = false};
  reported_busy_s_ = vitals.busy_s();
  counted_since_ = now;
  unreported_since_ = kNever;
  pending_ = {};
  total_.rollouts += progress.rollouts;
  total_.busy_s += progress.busy_s;
  return progress;
}

void WorkerMeter::record_return(TimePoint now) {
  pending_ = {};
  counted_since_ = now;
  unreported_since_ = kNever;
  has_returned_ = true;
}

}  // namespace echoline::learner
