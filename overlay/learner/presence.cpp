// The states of one worker: here, silent, away. Called by LearnerCore through Roster.
#include "overlay/learner/presence.hpp"

#include <algorithm>
#include <array>

namespace echoline::overlay {

void Presence::move(State next) {
  constexpr std::array<std::uint8_t, 3> follow{0b010, 0b101, 0b011};  // bits of the states after kAway, ...
  ECHO_CHECK((follow[static_cast<std::size_t>(state_)] >> static_cast<int>(next) & 1) != 0,
             "a worker's presence goes from {} to {}", static_cast<int>(state_), static_cast<int>(next));
  state_ = next;
}

void Presence::join(const LearnerRules& rules, TimePoint now) {
  move(State::kHere);
  last_frame_at_ = now;
  meter_.begin(rules.heartbeat, now, std::min(silences_, kSilencesMax));
}

bool Presence::on_frame(const LearnerRules& rules, TimePoint now) {
  last_frame_at_ = now;
  meter_.on_other_message(now);
  if (!is_silent()) return false;
  join(rules, now);
  return true;
}

void Presence::fall_silent() {
  move(State::kSilent);
  ++silences_;
}

void Presence::leave(const std::string& reason, TimePoint now) {
  move(State::kAway);
  away_since_ = now;
  away_reason_ = reason;
}

bool Presence::is_silent_to_child(const LearnerRules& rules, TimePoint now) const {
  return complaint_ && now < *complaint_ + kComplaintTime &&
         now >= std::max(last_frame_at_ + kMissedBeats * rules.heartbeat, earliest_silence(rules));
}

// The learned time may cost a worker its place before the agreed time, but never its leases.
Presence::State Presence::due(const LearnerRules& rules, TimePoint now) const {
  const TimePoint learned = is_silent_to_child(rules, now) ? now : std::max(meter_.deadline(), earliest_silence(rules));
  const TimePoint agreed = last_frame_at_ + rules.network.heartbeat_timeout;
  if (now >= std::max(learned, agreed)) return State::kAway;
  return now >= std::min(learned, agreed) ? State::kSilent : State::kHere;
}

void Presence::postpone(Duration late, TimePoint now) {
  last_frame_at_ = std::min(last_frame_at_ + late, now);  // the worker may have been heard since
  meter_.postpone(late, now);
  away_since_ += late;
}

}  // namespace echoline::overlay
