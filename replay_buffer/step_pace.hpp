// Measures the length of a learner step without the time spent waiting for slow workers. The length determines how long
// workers may take.
#pragma once
#include <optional>

namespace echoline::replay_buffer {

// Times are seconds on one clock that does not run backwards. Use from one thread.
class StepPace {
 public:
  // The batch of the step exists, but the learner waits, because training on it now would strand leased work.
  void begin_wait(double now_s);
  // Training strands no work. Ends a wait, if there is one.
  void end_wait(double now_s);
  void exclude_pause(double lasted_s);  // a pause of the learner is no part of a step
  void end_step(double now_s);
  std::optional<double> seconds() const { return seconds_; }  // absent before two steps have ended

 private:
  std::optional<double> waits_since_s_, finished_s_, seconds_;
  double waited_s_ = 0;
};

}  // namespace echoline::replay_buffer
