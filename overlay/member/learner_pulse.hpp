// Whether a worker still hears its learner. It is silent after the patience that the learner has named and after what
// was learned of its beacons, whichever is later. Pure.
#pragma once
#include <algorithm>

#include "overlay/core.hpp"

namespace echoline::overlay {

class LearnerPulse {
 public:
  // The learner's welcome: beacons come once a heartbeat.
  void begin(Duration heartbeat, Duration patience, TimePoint now) {
    heartbeat_ = heartbeat, patience_ = patience, silence_ = {};
    silence_.begin(heartbeat, now);
  }
  void heard(TimePoint now) { heard_ = now; }  // anything
  void beacon(TimePoint now) { silence_.heard(now); }
  // This node stood still for so long, until now.
  void excuse(Duration late, TimePoint now) {
    heard_ = std::min(heard_ + late, now);
    silence_.excuse(late, now);
  }
  TimePoint deadline() const { return std::max(silence_.deadline(), heard_ + patience_); }
  Duration silent_for(TimePoint now) const { return now - heard_; }
  Duration heartbeat() const { return heartbeat_; }  // zero before the first welcome

 private:
  Duration heartbeat_{}, patience_{};
  SilenceMeter silence_;
  TimePoint heard_{};
};

}  // namespace echoline::overlay
