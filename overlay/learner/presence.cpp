// The states of one worker: here, silent, away. Called by LearnerCore through Roster.
#include "overlay/learner/presence.hpp"

#include <algorithm>
#include <array>

namespace echoline::overlay {

void Presence::move_to(State next) {
  // Element s: a bit for each state that may follow state s, kAway being bit 0.
  constexpr std::array<std::uint8_t, 3> allowed_next{0b010, 0b101, 0b011};
  ECHO_CHECK((allowed_next[static_cast<std::size_t>(state_)] >> static_cast<int>(next) & 1) != 0,
             "a worker's presence goes from {} to {}", static_cast<int>(state_), static_cast<int>(next));
  state_ = next;
}

void Presence::join(const LearnerRules& rules, TimePoint now) {
  move_to(State::kHere);
  last_frame_at_ = now;
  heartbeat_meter_.begin(rules.heartbeat, now, std::min(silences_, kSilencesMax));
}

bool Presence::on_frame(const LearnerRules& rules, TimePoint now) {
  last_frame_at_ = now;
  heartbeat_meter_.on_other_message(now);
  if (!is_silent()) return false;
  join(rules, now);
  return true;
}

void Presence::fall_silent() {
  move_to(State::kSilent);
  ++silences_;
}

void Presence::leave(const std::string& reason, TimePoint now) {
  move_to(State::kAway);
  away_since_ = now;
  away_reason_ = reason;
}

bool Presence::is_silent_to_child(const LearnerRules& rules, TimePoint now) const {
  return complaint_at_ && now < *complaint_at_ + kComplaintTime &&
         now >= std::max(last_frame_at_ + kMissedBeats * rules.heartbeat, earliest_silence(rules));
}

// There are two deadlines after the last frame: the learned one, and the agreed one (heartbeat_timeout). After the
// earlier one, the worker loses its place in the topology. After both, it is away and loses its leases.
Presence::State Presence::due_state(const LearnerRules& rules, TimePoint now) const {
  const TimePoint learned_deadline =
      is_silent_to_child(rules, now) ? now : std::max(heartbeat_meter_.deadline(), earliest_silence(rules));
  const TimePoint agreed_deadline = last_frame_at_ + rules.network.heartbeat_timeout;
  if (now >= std::max(learned_deadline, agreed_deadline)) return State::kAway;
  return now >= std::min(learned_deadline, agreed_deadline) ? State::kSilent : State::kHere;
}

void Presence::postpone(Duration pause, TimePoint now) {
  last_frame_at_ = std::min(last_frame_at_ + pause, now);  // the worker may have been heard since
  heartbeat_meter_.postpone(pause, now);
  away_since_ += pause;
}

}  // namespace echoline::overlay
