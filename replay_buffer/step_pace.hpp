// Measures the length of a learner step without the time spent waiting for slow workers; it determines how long they
// may take.
#pragma once
#include <optional>

namespace echoline::replay_buffer {

// Times are seconds on one clock that does not run backwards. Use from one thread.
class StepPace {
 public:
  // The batch of the step exists, but training on it now would strand leased work.
  void waits(double now_s);
  // Training would strand no work, or no longer.
  void goes_on(double now_s);
  void paused(double lasted_s);  // does not count as part of a step
  void finished(double now_s);
  std::optional<double> seconds() const { return seconds_; }  // absent before two steps have ended

 private:
  std::optional<double> waits_since_s_, finished_s_, seconds_;
  double waited_s_ = 0;
};

}  // namespace echoline::replay_buffer
