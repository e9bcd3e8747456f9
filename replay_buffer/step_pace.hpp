// Measures the length of a learner step without the time spent waiting for slow workers. From the length follows how
// long a worker may take for its groups.
#pragma once
#include <optional>

namespace echoline::replay_buffer {

// Times are seconds on one clock that does not run backwards. Use from one thread.
class StepPace {
 public:
  // The batch of the step is complete, but the learner waits: if it trained now, groups that workers still generate
  // would be too stale for every later step.
  void begin_wait(double now_s);
  // The learner may train. Ends a wait, if there is one.
  void end_wait(double now_s);
  void exclude_pause(double pause_s);  // a pause of the learner is no part of a step
  void end_step(double now_s);
  // The running average of the length; absent before two steps have ended.
  std::optional<double> seconds() const { return seconds_; }

 private:
  std::optional<double> wait_began_s_;  // absent: the learner does not wait
  std::optional<double> step_began_s_;  // when the previous step ended
  std::optional<double> seconds_;
  double excluded_s_ = 0;  // waits and pauses since the step began
};

}  // namespace echoline::replay_buffer
