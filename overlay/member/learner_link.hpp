// A worker's connection to its learner: joins, reconnects after a loss, and decides when to give up. It renews the
// certificate and carries the messages of the application. No I/O and no clock.
#pragma once
#include <map>
#include <variant>

#include "overlay/member/identity.hpp"
#include "overlay/member/learner_pulse.hpp"
#include "overlay/member/membership.hpp"

namespace echoline::overlay {

class LearnerLink {
 public:
  static constexpr std::size_t kUnsentBytesMax = 4 * kMessageBytesMax;  // messages the learner has not taken yet
  static constexpr Duration kTroublePause = std::chrono::minutes(1);    // before the same trouble is reported again
  static constexpr std::size_t kTroublesMax = 16;                       // reported troubles that are remembered
  static constexpr Duration kClockTolerance = std::chrono::minutes(1);  // a larger clock offset is reported

  struct Ended {  // the worker must end, for this reason
    std::string reason;
    bool in_order = false;  // a clean exit: the run has ended
  };
  using Event = std::variant<std::monostate, ControlMessage, Ended>;

  // All references must outlive the link.
  LearnerLink(const MemberConfig& config, Identity& identity, Transport& transport, Uplink& uplink,
              std::vector<Action>& actions);

  void start(TimePoint now);
  void drain(TimePoint now);
  void end();  // closes the connection for good

  // The message is dropped while the worker has not said hello on this connection.
  void send(const ControlMessage& message, TimePoint now);
  // At most kMessageBytesMax (checked); dropped while the learner is away.
  void send_application(Slice bytes, TimePoint now);
  // Logs a problem of this machine and reports it to the learner, once in kTroublePause.
  void report_trouble(const std::string& what, TimePoint now);

  // The connection is open. Returns whether the caller must send Hello now; otherwise this class asks for a
  // certificate.
  bool on_connected(TimePoint now);
  void on_closed(const std::string& reason, TimePoint now);
  // Returns a message that concerns other components, or the reason why the worker must end.
  Event on_frame(const Frame& frame, TimePoint now);
  // Dials again if that is due. Returns a reason if the worker must give up.
  std::optional<std::string> check_deadlines(TimePoint now);
  // While joined: closes the connection if the learner is silent, and renews the certificate.
  void check_pulse(TimePoint now);
  // LearnerPulse::take_pause(). Also moves the deadlines of the membership.
  std::optional<Duration> take_pause(TimePoint now);
  bool take_beat(TimePoint now) { return pulse_.take_beat(now); }
  TimePoint next_deadline() const;

  const Membership& membership() const { return membership_; }
  Duration heartbeat() const { return pulse_.heartbeat(); }
  void check() const;

 private:
  void dial(TimePoint now);
  void close_and_redial(const std::string& reason, TimePoint now);
  void on_lost(const std::string& reason, TimePoint now);  // the connection is closed: plans the next one
  Event on_certificate_answer(const ControlMessage& message, TimePoint now);
  Event on_message(ControlMessage message, TimePoint now);
  std::optional<Ended> on_welcome(const Welcome& welcome, TimePoint now);

  const MemberConfig& config_;
  Identity& identity_;
  Transport& transport_;
  Uplink& uplink_;
  std::vector<Action>& actions_;
  Membership membership_;
  LearnerPulse pulse_;
  MessageQueue unsent_;
  MessageAssembler incoming_;
  std::map<std::string, TimePoint> trouble_reported_at_;  // by text
};

}  // namespace echoline::overlay
