#include "learner/worker_meter.hpp"

#include <algorithm>
#include <utility>

namespace echoline::learner {

void WorkerMeter::accepted(std::uint64_t rollouts, double held_s) {
  pending_.rollouts += static_cast<double>(rollouts);
  pending_.busy_s += held_s;
}

WorkerMeter::Progress WorkerMeter::heard(const schema::Vitals& vitals, TimePoint now) {
  constexpr Duration kToldWithin = std::chrono::seconds(10);
  if (since_ == kNever) since_ = now;
  if (pending_.rollouts == 0) return {0, 0, std::exchange(pending_.turned_away, false)};
  // The worker's counter restarts with its process.
  const double told_s = vitals.busy_s() - (vitals.busy_s() < told_busy_s_ ? 0 : told_busy_s_);
  const double passed_s = seconds(now - since_);
  if (untold_since_ == kNever) untold_since_ = now;
  if (told_s == 0 && now - untold_since_ < kToldWithin)
    return {};  // the first heartbeat after the results reports their time
  // After an absence, the reported time includes the absence.
  const double worked_s = std::exchange(returned_, false) || told_s == 0 ? pending_.busy_s : told_s;
  const Progress progress{pending_.rollouts, std::max(std::min(worked_s, passed_s), pending_.busy_s / 2)};
  told_busy_s_ = vitals.busy_s();
  since_ = now;
  untold_since_ = kNever;
  pending_ = {};
  total_.rollouts += progress.rollouts;
  total_.busy_s += progress.busy_s;
  return progress;
}

void WorkerMeter::returned(TimePoint now) {
  pending_ = {};
  since_ = now;
  untold_since_ = kNever;
  returned_ = true;
}

}  // namespace echoline::learner
