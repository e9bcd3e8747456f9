#include "replay_buffer/step_pace.hpp"

#include <algorithm>
#include <utility>

namespace echoline::replay_buffer {
namespace {

constexpr double kMemory = 0.7;  // weight of earlier steps

}  // namespace

void StepPace::waits(double now_s) {
  if (!waits_since_s_) waits_since_s_ = now_s;
}

void StepPace::goes_on(double now_s) {
  if (waits_since_s_) waited_s_ += now_s - *std::exchange(waits_since_s_, std::nullopt);
}

void StepPace::paused(double lasted_s) { waited_s_ += lasted_s; }

void StepPace::finished(double now_s) {
  if (finished_s_ && now_s > *finished_s_) {
    const double took_s = std::max(0.0, now_s - *finished_s_ - std::exchange(waited_s_, 0));
    seconds_ = seconds_ ? kMemory * *seconds_ + (1 - kMemory) * took_s : took_s;
  }
  finished_s_ = now_s;
}

}  // namespace echoline::replay_buffer
