// The length of a step, for the learner's training loop and the simulator.
#include "replay_buffer/step_pace.hpp"

#include <algorithm>
#include <utility>

namespace echoline::replay_buffer {
namespace {

constexpr double kEarlierWeight = 0.7;  // weight of all earlier steps together in the average

}  // namespace

void StepPace::begin_wait(double now_s) {
  if (!wait_began_s_) wait_began_s_ = now_s;
}

void StepPace::end_wait(double now_s) {
  if (wait_began_s_) excluded_s_ += now_s - *std::exchange(wait_began_s_, std::nullopt);
}

void StepPace::exclude_pause(double pause_s) { excluded_s_ += pause_s; }

void StepPace::end_step(double now_s) {
  const double excluded_s = std::exchange(excluded_s_, 0);  // before the first step, too
  if (step_began_s_ && now_s > *step_began_s_) {
    const double step_s = std::max(0.0, now_s - *step_began_s_ - excluded_s);
    seconds_ = seconds_ ? kEarlierWeight * *seconds_ + (1 - kEarlierWeight) * step_s : step_s;
  }
  step_began_s_ = now_s;
}

}  // namespace echoline::replay_buffer
