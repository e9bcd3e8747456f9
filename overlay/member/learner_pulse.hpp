// The heartbeats between a worker and its learner: when the worker's next one leaves, and when the learner counts as
// silent: after its patience and after the time learned from its beacons, whichever is later. No I/O and no clock.
#pragma once
#include "overlay/core.hpp"

namespace echoline::overlay {

class LearnerPulse {
 public:
  // The learner's welcome: one beacon and one heartbeat in every interval.
  void begin(Duration heartbeat, Duration patience, TimePoint now) {
    heartbeat_ = heartbeat, patience_ = patience, beat_at_ = now + heartbeat, silence_ = {};
    silence_.begin(heartbeat, now);
  }
  void on_frame(TimePoint now) { last_frame_ = now; }
  void on_beacon(TimePoint now) { silence_.on_beat(now); }
  // Returns whether a heartbeat is due, once.
  bool take_beat(TimePoint now) {
    if (now < beat_at_) return false;
    beat_at_ = now + heartbeat_;
    return true;
  }
  // Returns, once, for how long this process was suspended until now, if longer than a heartbeat. Moves the deadlines
  // back by it.
  std::optional<Duration> take_pause(TimePoint now) {
    if (beat_at_ == kNever || now - beat_at_ <= heartbeat_) return std::nullopt;
    const Duration late = now - std::exchange(beat_at_, now);
    last_frame_ = std::min(last_frame_ + late, now);
    silence_.postpone(late, now);
    return late;
  }
  TimePoint beat_at() const { return beat_at_; }  // kNever before the first welcome
  TimePoint deadline() const { return std::max(silence_.deadline(), last_frame_ + patience_); }
  Duration silent_for(TimePoint now) const { return now - last_frame_; }
  Duration heartbeat() const { return heartbeat_; }  // zero before the first welcome
  void check() const { ECHO_CHECK((beat_at_ == kNever) == (heartbeat_ == Duration{}), "a heartbeat without interval"); }

 private:
  Duration heartbeat_{}, patience_{};
  SilenceMeter silence_;  // of beacons
  TimePoint last_frame_{}, beat_at_ = kNever;
};

}  // namespace echoline::overlay
