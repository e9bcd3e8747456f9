#include "overlay/member/membership.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(100);
constexpr Duration kRedialMax = std::chrono::seconds(10);

template <class E>
constexpr unsigned bit(E state) {
  return 1u << static_cast<unsigned>(state);
}

// Bit n: the n-th state may follow.
unsigned after(Membership::State state) {
  using enum Membership::State;
  switch (state) {
    case kIdle:
      return bit(kJoining) | bit(kEnded);
    case kJoining:
    case kAway:
      return bit(kJoined) | bit(kEnded);
    case kJoined:
      return bit(kAway) | bit(kEnded);
    case kEnded:
      break;
  }
  return 0;
}

unsigned after(Membership::Line line) {
  using enum Membership::Line;
  switch (line) {
    case kNone:
      return bit(kDialling) | bit(kDiallingToAsk);
    case kDialling:
      return bit(kGreeted) | bit(kNone);
    case kDiallingToAsk:
      return bit(kAsking) | bit(kNone);
    case kAsking:
    case kGreeted:
      return bit(kNone);
  }
  return 0;
}

}  // namespace

const char* to_string(Membership::State state) {
  static constexpr const char* kNames[] = {"idle", "joining", "joined", "away", "ended"};
  return kNames[static_cast<std::size_t>(state)];
}

const char* to_string(Membership::Line line) {
  static constexpr const char* kNames[] = {"none", "dialling", "dialling to ask", "asking", "greeted"};
  return kNames[static_cast<std::size_t>(line)];
}

void Membership::move_to(State next) {
  ECHO_CHECK(after(state_) & bit(next), "a worker that is {} cannot become {}", to_string(state_), to_string(next));
  state_ = next;
}

void Membership::move_to(Line next) {
  ECHO_CHECK(after(line_) & bit(next), "a connection that is {} cannot become {}", to_string(line_), to_string(next));
  line_ = next;
}

void Membership::start(TimePoint now, Duration join_timeout) {
  move_to(State::kJoining);
  join_deadline_ = now + join_timeout;
}

bool Membership::asks_next(bool certificate_ended) {
  const bool refused = std::exchange(refused_, false);
  return std::exchange(asks_, false) || (certificate_ended && !refused);
}

void Membership::dialled(ConnId conn, bool asks) {
  move_to(asks ? Line::kDiallingToAsk : Line::kDialling);
  conn_ = conn;
  answered_ = false;
}

void Membership::connected(TimePoint now) {
  move_to(line_ == Line::kDiallingToAsk ? Line::kAsking : Line::kGreeted);
  answer_by_ = now + Core::kHandshakeTimeout;
}

void Membership::certified() {
  move_to(Line::kNone);
  answer_by_ = kNever;
}

bool Membership::refused() {
  if (++refusals_ >= kReturnsRefusedMax) return true;
  refused_ = true;
  return false;
}

void Membership::welcomed(Duration away_max) {
  move_to(State::kJoined);
  away_max_ = away_max;
  join_deadline_ = away_until_ = answer_by_ = kNever;
  refusals_ = 0;
}

bool Membership::lost(TimePoint now) {
  move_to(Line::kNone);
  answer_by_ = kNever;
  const bool first = joined();
  if (first) {
    move_to(State::kAway);
    away_until_ = now + away_max_;
    redials_ = 0;
  }
  const Duration pause = std::min<Duration>(kRedialMax, kRedialFirst * (1 << std::min(redials_++, 8)));
  redial_at_ = now + from_seconds(seconds(pause) * (0.75 + 0.5 * jitter_.uniform()));
  return first;
}

void Membership::end() {
  move_to(State::kEnded);
  if (line_ != Line::kNone) move_to(Line::kNone);
  join_deadline_ = away_until_ = redial_at_ = answer_by_ = drain_until_ = kNever;
}

void Membership::excuse(Duration late) {
  for (TimePoint* at : {&away_until_, &answer_by_})
    if (*at != kNever) *at += late;
}

bool Membership::take_redial(TimePoint now) {
  if (now < redial_at_) return false;
  redial_at_ = kNever;
  return true;
}

bool Membership::drained(bool has_children, Duration heartbeat, TimePoint now) const {
  if (!draining()) return false;
  const bool handed_over = !has_children && now >= drain_until_ - kDrainMax + heartbeat;
  return handed_over || now >= drain_until_;
}

void Membership::check() const {
  const bool open = line_ == Line::kAsking || line_ == Line::kGreeted;
  const bool trying = state_ == State::kJoining || state_ == State::kAway;
  ECHO_CHECK(joined() || trying || line_ == Line::kNone, "{} with a connection", to_string(state_));
  ECHO_CHECK(!joined() || greeted(), "joined with a connection that is {}", to_string(line_));
  ECHO_CHECK((join_deadline_ != kNever) == (state_ == State::kJoining), "{}: join deadline", to_string(state_));
  ECHO_CHECK((away_until_ != kNever) == away(), "{}: away_until", to_string(state_));
  ECHO_CHECK((redial_at_ != kNever) == (trying && line_ == Line::kNone), "{}, {}: redial", to_string(state_),
             to_string(line_));
  ECHO_CHECK((answer_by_ != kNever) == (open && !joined()), "{}, {}: answer", to_string(state_), to_string(line_));
}

}  // namespace echoline::overlay
