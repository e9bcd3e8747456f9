#include "overlay/member/membership.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(100);
constexpr Duration kRedialMax = std::chrono::seconds(10);

}  // namespace

void Membership::move_to(State next) {
  using enum State;
  static constexpr StateRow kTable[] = {
      {"idle", states(kJoining, kEnded)},
      {"joining", states(kJoined, kEnded)},
      {"joined", states(kAssigned, kAway, kEnded)},
      {"assigned", states(kAway, kEnded)},
      {"away", states(kJoined, kEnded)},
      {"ended", states()},
  };
  change_state(state_, next, kTable, "a worker");
}

void Membership::move_to(Line next) {
  using enum Line;
  static constexpr StateRow kTable[] = {
      {"none", states(kDialling, kDiallingToAsk)}, {"dialling", states(kGreeted, kNone)},
      {"dialling to ask", states(kAsking, kNone)}, {"asking", states(kNone)},
      {"greeted", states(kAnswered, kNone)},       {"answered", states(kNone)},
  };
  change_state(line_, next, kTable, "a connection");
}

void Membership::start(TimePoint now, Duration join_timeout) {
  move_to(State::kJoining);
  join_deadline_ = now + join_timeout;
}

bool Membership::asks_next(bool certificate_expired) {
  const NextLine next = std::exchange(next_, NextLine::kByExpiry);
  return next == NextLine::kAsks || (next == NextLine::kByExpiry && certificate_expired);
}

void Membership::dialled(ConnId conn, bool asks) {
  move_to(asks ? Line::kDiallingToAsk : Line::kDialling);
  conn_ = conn;
}

void Membership::connected(TimePoint now) {
  move_to(line_ == Line::kDiallingToAsk ? Line::kAsking : Line::kGreeted);
  answer_by_ = now + Core::kHandshakeTimeout;
}

void Membership::answered() {
  if (line_ == Line::kGreeted) move_to(Line::kAnswered);
}

void Membership::broken() {
  if (line_ == Line::kGreeted) next_ = NextLine::kAsks;
}

void Membership::certified() {
  move_to(Line::kNone);
  answer_by_ = kNever;
}

bool Membership::refused() {
  if (++refusals_ >= kReturnsRefusedMax) return true;
  next_ = NextLine::kJoins;
  return false;
}

void Membership::welcomed(Duration away_max) {
  move_to(State::kJoined);
  away_max_ = away_max;
  join_deadline_ = away_until_ = answer_by_ = kNever;
  refusals_ = 0;
}

void Membership::assigned() {
  if (!is_assigned()) move_to(State::kAssigned);
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

void Membership::postpone(Duration late) {
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
  const bool open = line_ == Line::kAsking || greeted();
  const bool trying = state_ == State::kJoining || away();
  ECHO_CHECK(joined() ? greeted() : trying || line_ == Line::kNone);
  ECHO_CHECK((join_deadline_ != kNever) == (state_ == State::kJoining));
  ECHO_CHECK((away_until_ != kNever) == away());
  ECHO_CHECK((redial_at_ != kNever) == (trying && line_ == Line::kNone));
  ECHO_CHECK((answer_by_ != kNever) == (open && !joined()));
}

}  // namespace echoline::overlay
