// The heartbeats between a worker and its learner: when the worker's next one leaves, and when the learner counts as
// silent. The learner is silent after the patience that it has stated, or after the time learned from its beacons,
// whichever is later. A beacon is the learner's signed heartbeat. No I/O and no clock.
#pragma once
#include "overlay/core.hpp"

namespace echoline::overlay {

class LearnerPulse {
 public:
  // The learner has welcomed the worker: from now on, one beacon and one heartbeat are due in every interval.
  void begin(Duration heartbeat, Duration patience, TimePoint now) {
    heartbeat_ = heartbeat;
    patience_ = patience;
    next_beat_at_ = now + heartbeat;
    beacon_meter_ = {};
    beacon_meter_.begin(heartbeat, now);
  }
  void on_frame(TimePoint now) { last_frame_at_ = now; }
  void on_beacon(TimePoint now) { beacon_meter_.on_regular_message(now); }
  // Returns whether a heartbeat is due, once.
  bool take_beat(TimePoint now) {
    if (now < next_beat_at_) return false;
    next_beat_at_ = now + heartbeat_;
    return true;
  }
  // Returns, once, for how long this process was suspended until now, if longer than a heartbeat. Postpones the
  // deadlines by it.
  std::optional<Duration> take_pause(TimePoint now) {
    if (next_beat_at_ == kNever || now - next_beat_at_ <= heartbeat_) return std::nullopt;
    const Duration pause = now - std::exchange(next_beat_at_, now);
    last_frame_at_ = std::min(last_frame_at_ + pause, now);
    beacon_meter_.postpone(pause, now);
    return pause;
  }
  TimePoint next_beat_at() const { return next_beat_at_; }  // kNever before the first welcome
  TimePoint deadline() const { return std::max(beacon_meter_.deadline(), last_frame_at_ + patience_); }
  Duration silent_for(TimePoint now) const { return now - last_frame_at_; }
  Duration heartbeat() const { return heartbeat_; }  // zero before the first welcome
  void check() const {
    ECHO_CHECK((next_beat_at_ == kNever) == (heartbeat_ == Duration{}), "a heartbeat without interval");
  }

 private:
  Duration heartbeat_{}, patience_{};
  SilenceMeter beacon_meter_;
  TimePoint last_frame_at_{}, next_beat_at_ = kNever;
};

}  // namespace echoline::overlay
