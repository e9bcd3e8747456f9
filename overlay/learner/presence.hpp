// Whether one worker is heard: here, silent after a time learned from its heartbeats, or away. Pure.
#pragma once
#include <optional>
#include <string>

#include "overlay/core.hpp"
#include "overlay/settings.hpp"

namespace echoline::overlay {

class Presence {
 public:
  static constexpr int kSilencesMax = 2;  // silences in a row that lengthen the learned patience
  // A child's complaint counts for so long, and only if the learner has missed so many heartbeats itself.
  static constexpr Duration kComplaintTime = std::chrono::seconds(10);
  static constexpr int kMissedBeats = 4;

  enum class State : std::uint8_t {
    kAway,    // without a connection, also before the first one
    kHere,    // connected and heard
    kSilent,  // connected, without a place in the topology until it is heard
  };

  State state() const { return state_; }
  bool is_silent() const { return state_ == State::kSilent; }
  TimePoint heard_at() const { return heard_; }
  TimePoint away_since() const { return away_since_; }
  const std::string& away_reason() const { return away_reason_; }

  void join(const LearnerRules& rules, TimePoint now);
  // Any frame came. Returns whether the worker was silent.
  bool on_frame(const LearnerRules& rules, TimePoint now);
  void on_heartbeat(TimePoint now) { meter_.heard(now); }
  void on_installed() { silences_ = 0; }
  void fall_silent();
  void leave(const std::string& reason, TimePoint now);
  // A child hears nothing from this worker.
  void on_complaint(TimePoint now) { complaint_ = now; }
  // Whether a child's complaint and the learner's own observation agree.
  bool is_silent_to_child(const LearnerRules& rules, TimePoint now) const;
  // The state that a connected worker should have.
  State due(const LearnerRules& rules, TimePoint now) const;
  // The learner's process did not run for `late`, until now.
  void excuse(Duration late, TimePoint now);

 private:
  void move(State next);
  TimePoint earliest_silence(const LearnerRules& rules) const {
    return heard_ + std::min(rules.network.silence_min, rules.network.heartbeat_timeout);
  }

  State state_ = State::kAway;
  SilenceMeter meter_;
  TimePoint heard_{}, away_since_{};
  std::string away_reason_;
  int silences_ = 0;  // since the worker last installed a version
  std::optional<TimePoint> complaint_;
};

}  // namespace echoline::overlay
