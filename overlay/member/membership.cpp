// The state machines of a membership and of its connection. Called by LearnerLink.
#include "overlay/member/membership.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(100);  // pause before the first attempt; then doubled
constexpr Duration kRedialMax = std::chrono::seconds(10);
constexpr int kRedialDoublingsMax = 8;

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

void Membership::move_to(Connection next) {
  using enum Connection;
  static constexpr StateRow kTable[] = {
      {"none", states(kDialling, kDiallingToAsk)}, {"dialling", states(kGreeted, kNone)},
      {"dialling to ask", states(kAsking, kNone)}, {"asking", states(kNone)},
      {"greeted", states(kAnswered, kNone)},       {"answered", states(kNone)},
  };
  change_state(connection_, next, kTable, "a connection");
}

void Membership::start(TimePoint now, Duration join_timeout) {
  move_to(State::kJoining);
  join_deadline_ = now + join_timeout;
}

// Whether the next connection is made to ask for a certificate.
bool Membership::next_connection_asks(bool certificate_expired) {
  const NextConnection next = std::exchange(next_connection_, NextConnection::kByExpiry);
  return next == NextConnection::kAsks || (next == NextConnection::kByExpiry && certificate_expired);
}

void Membership::on_dialled(ConnId conn, bool asks) {
  move_to(asks ? Connection::kDiallingToAsk : Connection::kDialling);
  conn_ = conn;
}

void Membership::on_connected(TimePoint now) {
  move_to(connection_ == Connection::kDiallingToAsk ? Connection::kAsking : Connection::kGreeted);
  answer_deadline_ = now + Core::kHandshakeTimeout;
}

void Membership::on_answered() {
  if (connection_ == Connection::kGreeted) move_to(Connection::kAnswered);
}

// If the learner closed the connection without an answer to the hello, it may have refused the certificate.
// on_lost(), which follows, moves the connection to kNone.
void Membership::on_disconnected() {
  if (connection_ == Connection::kGreeted) next_connection_ = NextConnection::kAsks;
}

void Membership::on_certified() {
  move_to(Connection::kNone);
  answer_deadline_ = kNever;
}

// The first refusal only makes the worker join again with its present certificate, which may be good.
bool Membership::on_refused() {
  if (++refusals_ >= kCertificateRefusalsMax) return true;
  next_connection_ = NextConnection::kJoins;
  return false;
}

void Membership::on_welcomed(Duration away_max) {
  move_to(State::kJoined);
  away_max_ = away_max;
  join_deadline_ = away_until_ = answer_deadline_ = kNever;
  refusals_ = 0;
}

void Membership::on_assigned() {
  if (!is_assigned()) move_to(State::kAssigned);
}

bool Membership::on_lost(TimePoint now) {
  move_to(Connection::kNone);
  answer_deadline_ = kNever;
  const bool was_member = is_joined();
  if (was_member) {
    move_to(State::kAway);
    away_until_ = now + away_max_;
    redials_ = 0;
  }
  const int doublings = std::min(redials_++, kRedialDoublingsMax);
  const Duration pause = std::min<Duration>(kRedialMax, kRedialFirst * (1 << doublings));
  // Between 75 % and 125 % of the pause, so that workers that lost the learner together do not dial together.
  constexpr double kShareMin = 0.75, kShareRange = 0.5;
  redial_at_ = now + from_seconds(seconds(pause) * (kShareMin + kShareRange * jitter_.uniform()));
  return was_member;
}

void Membership::end() {
  move_to(State::kEnded);
  if (connection_ != Connection::kNone) move_to(Connection::kNone);
  join_deadline_ = away_until_ = redial_at_ = answer_deadline_ = drain_deadline_ = kNever;
}

void Membership::postpone(Duration pause) {
  for (TimePoint* at : {&away_until_, &answer_deadline_})
    if (*at != kNever) *at += pause;
}

bool Membership::take_redial(TimePoint now) {
  if (now < redial_at_) return false;
  redial_at_ = kNever;
  return true;
}

bool Membership::may_leave(bool has_children, Duration heartbeat, TimePoint now) const {
  if (!is_draining()) return false;
  const TimePoint drain_began_at = drain_deadline_ - kDrainMax;
  // For one heartbeat the learner may still assign children, because it has not read the request to drain.
  const bool handed_over = !has_children && now >= drain_began_at + heartbeat;
  return handed_over || now >= drain_deadline_;
}

void Membership::check() const {
  const bool is_open = connection_ == Connection::kAsking || is_greeted();
  const bool is_trying = state_ == State::kJoining || is_away();
  ECHO_CHECK(!is_joined() || is_greeted());
  ECHO_CHECK(is_joined() || is_trying || connection_ == Connection::kNone);
  ECHO_CHECK((join_deadline_ != kNever) == (state_ == State::kJoining));
  ECHO_CHECK((away_until_ != kNever) == is_away());
  ECHO_CHECK((redial_at_ != kNever) == (is_trying && connection_ == Connection::kNone));
  ECHO_CHECK((answer_deadline_ != kNever) == (is_open && !is_joined()));
}

}  // namespace echoline::overlay
