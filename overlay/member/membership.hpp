// A worker's place in the run: whether it is a member, the purpose of its connection to the learner, the next attempt,
// and the time to give up. Two state machines, of the membership and of the connection; neither knows a message. Pure.
#pragma once
#include <cstdint>

#include "base/random.hpp"
#include "base/state_table.hpp"
#include "overlay/core.hpp"

namespace echoline::overlay {

class Membership {
 public:
  static constexpr Duration kDrainMax = std::chrono::seconds(10);
  static constexpr int kReturnsRefusedMax = 2;  // the certificate may have been good, and the connection bad

  enum class State : std::uint8_t {
    kIdle,      // not started
    kJoining,   // on the way to its first welcome, within the join timeout
    kJoined,    // welcomed
    kAssigned,  // the learner has named its parents since.
    kAway,      // it tries to come back within away_max
    kEnded,     // for good
  };
  // The one connection to the learner.
  enum class Line : std::uint8_t {
    kNone,           // while joining or away: the next attempt is at redial_at_
    kDialling,       // to say hello
    kDiallingToAsk,  // without a certificate, because the present one has expired or is refused.
    kAsking,         // open, and the learner was asked for another certificate
    kGreeted,        // open, and the worker has said hello: the learner takes its messages
    kAnswered,       // the learner has answered
  };

  // `seed`: different for every worker, so that workers that lost the learner together do not all come back at once.
  explicit Membership(std::uint64_t seed) : jitter_(seed, 7) {}

  void start(TimePoint now, Duration join_timeout);
  // Returns whether the next connection has to ask for a certificate; call it once before every attempt. The learner
  // takes no connection with an expired certificate.
  bool asks_next(bool certificate_expired);
  void dialled(ConnId conn, bool asks);
  void connected(TimePoint now);
  void answered();  // a frame has come
  // The learner has given another certificate; the caller closes the connection and dials again.
  void certified();
  // The learner gives no other certificate. Returns whether it is time to give up; otherwise lost() follows.
  bool refused();
  void welcomed(Duration away_max);
  void assigned();
  // The connection is over: plans the next attempt. Returns whether the worker was a member until now.
  bool lost(TimePoint now);
  // The peer or the network ended the connection; lost() follows.
  void broken();
  // The learner gives its children other parents; it leaves after kDrainMax at the latest.
  void drain(TimePoint now) { drain_until_ = now + kDrainMax; }
  void end();
  // This node stood still for this time.
  void postpone(Duration late);

  State state() const { return state_; }
  bool joined() const { return state_ == State::kJoined || is_assigned(); }
  bool is_assigned() const { return state_ == State::kAssigned; }
  bool away() const { return state_ == State::kAway; }
  bool ended() const { return state_ == State::kEnded; }
  bool draining() const { return drain_until_ != kNever; }
  bool is(ConnId conn) const { return conn == conn_; }
  ConnId conn() const { return conn_; }
  bool asking() const { return line_ == Line::kDiallingToAsk || line_ == Line::kAsking; }
  bool greeted() const { return line_ == Line::kGreeted || line_ == Line::kAnswered; }
  // Without the learner, before the worker gives up; zero before the first welcome.
  Duration away_max() const { return away_max_; }
  int redials() const { return redials_; }  // attempts since it was last a member
  TimePoint redial_at() const { return redial_at_; }
  TimePoint away_until() const { return away_until_; }
  TimePoint join_deadline() const { return join_deadline_; }

  // Returns whether the next attempt is due, once.
  bool take_redial(TimePoint now);
  bool unanswered(TimePoint now) const { return now >= answer_by_; }
  // Whether its children are gone and the learner has had time to assign none, or kDrainMax is over.
  bool drained(bool has_children, Duration heartbeat, TimePoint now) const;
  TimePoint next_deadline() const {
    return std::min({join_deadline_, away_until_, redial_at_, answer_by_, drain_until_});
  }
  void check() const;

 private:
  enum class NextLine : std::uint8_t {
    kByExpiry,  // asks for a certificate if the present one has expired
    kAsks,      // the learner may not have taken the certificate
    kJoins,     // the learner has just refused another one: this machine's clock may be wrong, not the certificate
  };
  void move_to(State next);
  void move_to(Line next);

  State state_ = State::kIdle;
  Line line_ = Line::kNone;
  ConnId conn_{};
  NextLine next_ = NextLine::kByExpiry;
  int refusals_ = 0;  // since it was last welcomed
  int redials_ = 0;
  Random jitter_;
  Duration away_max_{};
  TimePoint join_deadline_ = kNever, away_until_ = kNever, redial_at_ = kNever, answer_by_ = kNever,
            drain_until_ = kNever;
};

}  // namespace echoline::overlay
