// The presence of one worker at the learner. The worker is here (heard), silent (not heard for a time that is learned
// from its heartbeats) or away (not connected). No I/O and no clock.
#pragma once
#include <optional>
#include <string>

#include "overlay/core.hpp"
#include "overlay/settings.hpp"

namespace echoline::overlay {

class Presence {
 public:
  static constexpr int kSilencesMax = 2;  // silences in a row that lengthen the learned time
  // A complaint: a child reports that it hears nothing from this worker. It counts for kComplaintTime, and only if the
  // learner itself has missed kMissedBeats heartbeats, because one witness alone may be wrong.
  static constexpr Duration kComplaintTime = std::chrono::seconds(10);
  static constexpr int kMissedBeats = 4;

  enum class State : std::uint8_t {
    kAway,    // without a connection, also before the first one
    kHere,    // connected and heard
    kSilent,  // connected, without a place in the topology until it is heard
  };

  State state() const { return state_; }
  bool is_silent() const { return state_ == State::kSilent; }
  TimePoint last_frame_at() const { return last_frame_at_; }
  TimePoint away_since() const { return away_since_; }
  const std::string& away_reason() const { return away_reason_; }

  void join(const LearnerRules& rules, TimePoint now);
  // A frame of any kind came. Returns whether the worker was silent before it.
  bool on_frame(const LearnerRules& rules, TimePoint now);
  void on_heartbeat(TimePoint now) { heartbeat_meter_.on_regular_message(now); }
  void on_installed() { silences_ = 0; }
  void fall_silent();
  void leave(const std::string& reason, TimePoint now);
  void on_complaint(TimePoint now) { complaint_at_ = now; }
  // Whether a child's complaint and the learner's own observation agree.
  bool is_silent_to_child(const LearnerRules& rules, TimePoint now) const;
  // The state that a connected worker should have now. The caller carries the change out.
  State due_state(const LearnerRules& rules, TimePoint now) const;
  // The learner's process was suspended for `pause`, until now.
  void postpone(Duration pause, TimePoint now);

 private:
  void move_to(State next);
  // Before this time the worker is never silent.
  TimePoint earliest_silence(const LearnerRules& rules) const {
    return last_frame_at_ + std::min(rules.network.silence_min, rules.network.heartbeat_timeout);
  }

  State state_ = State::kAway;
  SilenceMeter heartbeat_meter_;
  TimePoint last_frame_at_{}, away_since_{};
  std::string away_reason_;
  int silences_ = 0;  // since the worker last installed a version
  std::optional<TimePoint> complaint_at_;
};

}  // namespace echoline::overlay
