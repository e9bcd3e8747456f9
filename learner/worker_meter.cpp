// A worker's measured speed. Roster has one for each worker.
#include "learner/worker_meter.hpp"

#include <algorithm>
#include <utility>

namespace echoline::learner {

void WorkerMeter::record_accepted(std::uint64_t rollouts, double lease_seconds) {
  pending_.rollouts += static_cast<double>(rollouts);
  pending_.busy_s += lease_seconds;
}

WorkerMeter::Progress WorkerMeter::take_heartbeat(const schema::Vitals& vitals, TimePoint now) {
  constexpr Duration kReportDelayMax = std::chrono::seconds(10);
  if (since_ == kNever) since_ = now;
  if (pending_.rollouts == 0) return {0, 0, std::exchange(pending_.turned_away, false)};
  // The worker's counter restarts with its process.
  const double reported_s = vitals.busy_s() - (vitals.busy_s() < reported_busy_s_ ? 0 : reported_busy_s_);
  const double passed_s = seconds(now - since_);
  if (unreported_since_ == kNever) unreported_since_ = now;
  if (reported_s == 0 && now - unreported_since_ < kReportDelayMax)
    return {};  // the first heartbeat after the results reports their time
  // After an absence, the reported time includes the absence.
  const double worked_s = std::exchange(returned_, false) || reported_s == 0 ? pending_.busy_s : reported_s;
  const Progress progress{pending_.rollouts, std::max(std::min(worked_s, passed_s), pending_.busy_s / 2)};
  reported_busy_s_ = vitals.busy_s();
  since_ = now;
  unreported_since_ = kNever;
  pending_ = {};
  total_.rollouts += progress.rollouts;
  total_.busy_s += progress.busy_s;
  return progress;
}

void WorkerMeter::record_return(TimePoint now) {
  pending_ = {};
  since_ = now;
  unreported_since_ = kNever;
  returned_ = true;
}

}  // namespace echoline::learner
