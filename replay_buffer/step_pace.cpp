// The length of a step, for the learner's training loop and the simulator.
#include "replay_buffer/step_pace.hpp"

#include <algorithm>
#include <utility>

namespace echoline::replay_buffer {
namespace {

constexpr double kEarlierWeight = 0.7;  // of earlier steps in the average

}  // namespace

void StepPace::begin_wait(double now_s) {
  if (!waits_since_s_) waits_since_s_ = now_s;
}

void StepPace::end_wait(double now_s) {
  if (waits_since_s_) waited_s_ += now_s - *std::exchange(waits_since_s_, std::nullopt);
}

void StepPace::exclude_pause(double lasted_s) { waited_s_ += lasted_s; }

void StepPace::end_step(double now_s) {
  if (finished_s_ && now_s > *finished_s_) {
    const double took_s = std::max(0.0, now_s - *finished_s_ - std::exchange(waited_s_, 0));
    seconds_ = seconds_ ? kEarlierWeight * *seconds_ + (1 - kEarlierWeight) * took_s : took_s;
  }
  finished_s_ = now_s;
}

}  // namespace echoline::replay_buffer
