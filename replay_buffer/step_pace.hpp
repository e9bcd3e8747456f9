// How long a learner step takes, without the time in which it waited for slow workers: how long they may take is
// measured by it.
#pragma once
#include <optional>

namespace echoline::replay_buffer {

// Times are seconds on one clock that does not run backwards. One thread.
class StepPace {
 public:
  // The batch of the step is there, but training on it now would strand work under way.
  void waits(double now_s);
  // It would not, or not any more.
  void goes_on(double now_s);
  void paused(double lasted_s);  // no part of a step
  void finished(double now_s);
  std::optional<double> seconds() const { return seconds_; }  // absent before two steps have ended

 private:
  std::optional<double> waits_since_s_, finished_s_, seconds_;
  double waited_s_ = 0;
};

}  // namespace echoline::replay_buffer
