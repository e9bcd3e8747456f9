// How a rented machine becomes a worker: it shows its single-use token over an anonymous connection to the run's
// learner, proves that it holds its key, and is given a certificate. No I/O and no clock.
#pragma once
#include "overlay/core.hpp"
#include "overlay/state.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::overlay {

struct EnrolConfig {
  CoreOptions core;
  Endpoint learner;
  trust::SigningKey key;
  trust::Secret token;   // may be empty if this machine has enrolled before
  std::string instance;  // the instance name that the token was issued for
  Duration timeout = std::chrono::seconds(10);
  // If this machine has enrolled before with `key`: the certificate of the run's authority [DER]. The token is then
  // used only if the learner has forgotten this machine.
  std::vector<std::byte> authority{};
};

class EnrolCore final : public Core {
 public:
  explicit EnrolCore(EnrolConfig config)
      : Core(config.core), config_(std::move(config)), is_returning_(!config_.authority.empty()) {}

  void start(TimePoint now);
  // After act::ReportEnd: the identity, or the reason why there is none.
  const Result<WorkerState>& result() const { return result_; }

  void on_accepted(ConnId conn, const PeerInfo&, TimePoint) override { close(conn); }
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, Frame frame, TimePoint now) override;
  void on_sent(ConnId, std::size_t, TimePoint) override {}
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override { return std::min(deadline_, redial_at_); }

 private:
  static constexpr std::string_view kNotYet = "not yet";  // the result before any answer or failure
  void end(Result<WorkerState> result);

  EnrolConfig config_;
  bool is_returning_ = false;  // asks with the key of an earlier enrolment, not with a token
  ConnId conn_;
  TimePoint deadline_ = kNever, redial_at_ = kNever;
  Result<WorkerState> result_ = fail(Code::kUnavailable, "enrol", "{}", kNotYet);
};

}  // namespace echoline::overlay
