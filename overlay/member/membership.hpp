// A worker's membership in the run: whether it is a member, the purpose of its connection to the learner, the next
// attempt, and the time to give up. It has two state machines, for the membership and for the connection; neither knows
// the messages. No I/O and no clock.
#pragma once
#include <cstdint>

#include "base/random.hpp"
#include "base/state_table.hpp"
#include "overlay/core.hpp"

namespace echoline::overlay {

class Membership {
 public:
  static constexpr Duration kDrainMax = std::chrono::seconds(10);
  // Refusals of another certificate before the worker gives up. After the first one it tries the present certificate
  // again, because it may be good.
  static constexpr int kCertificateRefusalsMax = 2;

  enum class State : std::uint8_t {
    kIdle,      // not started
    kJoining,   // on the way to its first welcome, within the join timeout
    kJoined,    // welcomed
    kAssigned,  // the learner has named its parents since
    kAway,      // the connection was lost; the worker tries to rejoin within away_max
    kEnded,     // for good
  };
  // The one connection to the learner.
  enum class Connection : std::uint8_t {
    kNone,           // while joining or away: the next attempt is at redial_at_
    kDialling,       // dialled, to say hello
    kDiallingToAsk,  // dialled anonymously, to ask for a certificate, because the present one has expired or is refused
    kAsking,         // open, and the learner was asked for another certificate
    kGreeted,        // open, and the worker has said hello: the learner takes its messages
    kAnswered,       // the learner has answered
  };

  // `seed`: of the random pauses. It differs between workers, so that workers that lost the learner together do not all
  // come back at once.
  explicit Membership(std::uint64_t seed) : jitter_(seed, /*stream=*/7) {}

  void start(TimePoint now, Duration join_timeout);
  // Returns whether the next connection must ask for a certificate, because the learner accepts no connection with an
  // expired one. Call it once before every attempt.
  bool next_connection_asks(bool certificate_expired);
  void on_dialled(ConnId conn, bool asks);
  void on_connected(TimePoint now);
  void on_answered();  // a frame has come
  // The learner has given another certificate; the caller closes the connection and dials again.
  void on_certified();
  // The learner gives no other certificate. Returns whether it is time to give up; otherwise on_lost() follows.
  bool on_refused();
  void on_welcomed(Duration away_max);
  void on_assigned();
  // The connection is over: plans the next attempt. Returns whether the worker was a member until now.
  bool on_lost(TimePoint now);
  // The peer or the network closed the connection; on_lost() follows.
  void on_disconnected();
  // The learner gives this worker's children other parents; the worker leaves after kDrainMax at the latest.
  void drain(TimePoint now) { drain_deadline_ = now + kDrainMax; }
  void end();
  // This process was suspended for `pause`.
  void postpone(Duration pause);

  State state() const { return state_; }
  bool is_joined() const { return state_ == State::kJoined || is_assigned(); }
  bool is_assigned() const { return state_ == State::kAssigned; }
  bool is_away() const { return state_ == State::kAway; }
  bool has_ended() const { return state_ == State::kEnded; }
  bool is_draining() const { return drain_deadline_ != kNever; }
  bool is_connection(ConnId conn) const { return conn == conn_; }
  ConnId conn() const { return conn_; }
  bool is_asking() const { return connection_ == Connection::kDiallingToAsk || connection_ == Connection::kAsking; }
  bool is_greeted() const { return connection_ == Connection::kGreeted || connection_ == Connection::kAnswered; }
  // The time without the learner after which the worker gives up; zero before the first welcome.
  Duration away_max() const { return away_max_; }
  int redials() const { return redials_; }  // attempts since it was last a member
  TimePoint redial_at() const { return redial_at_; }
  TimePoint away_until() const { return away_until_; }
  TimePoint join_deadline() const { return join_deadline_; }

  // Returns whether the next attempt is due, once.
  bool take_redial(TimePoint now);
  // Whether the learner has not answered within the handshake timeout.
  bool is_unanswered(TimePoint now) const { return now >= answer_deadline_; }
  // Whether a draining worker may leave: its children are gone and the learner has had time to assign it no others, or
  // kDrainMax is over.
  bool may_leave(bool has_children, Duration heartbeat, TimePoint now) const;
  TimePoint next_deadline() const {
    return std::min({join_deadline_, away_until_, redial_at_, answer_deadline_, drain_deadline_});
  }
  void check() const;

 private:
  enum class NextConnection : std::uint8_t {
    kByExpiry,  // asks for a certificate if the present one has expired
    kAsks,      // the learner may not have taken the certificate
    kJoins,     // the learner has just refused another one: this machine's clock may be wrong, not the certificate
  };
  void move_to(State next);
  void move_to(Connection next);

  State state_ = State::kIdle;
  Connection connection_ = Connection::kNone;
  ConnId conn_{};
  NextConnection next_connection_ = NextConnection::kByExpiry;
  int refusals_ = 0;  // of another certificate, since the worker was last welcomed
  int redials_ = 0;
  Random jitter_;
  Duration away_max_{};
  TimePoint join_deadline_ = kNever, away_until_ = kNever, redial_at_ = kNever, answer_deadline_ = kNever,
            drain_deadline_ = kNever;
};

}  // namespace echoline::overlay
