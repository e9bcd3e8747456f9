// The machines that may be workers of this run. Covers enrolment with a join token, certificates and their renewal
// after a long absence, and revocation. Also makes the learner's issue times, which order its signed messages and never
// go back. All of it is part of the learner's state, which the caller saves before an answer leaves. No I/O and no
// clock.
#pragma once
#include <functional>

#include "overlay/action.hpp"
#include "overlay/state.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

class Identities {
 public:
  // An answer to a machine, to be sent once the state is on disk.
  struct PendingAnswer {
    ConnId conn;
    Enrolled answer;
  };
  using Refusal = std::optional<std::string>;  // why a machine is refused; absent: an answer is pending

  // `state` must outlive this object, which changes its own parts of it.
  Identities(LearnerState& state, std::shared_ptr<const trust::Authority> authority);
  // Issue times continue after those of earlier processes, even if the clock has gone back.
  void start(std::uint64_t now_unix_ms);

  // A machine shows a join token. The token's nonce and the new id are on disk before the certificate leaves, so no
  // token is ever used twice.
  Refusal enrol(ConnId conn, const Enrol& request, double now_unix_s);
  // A machine that has enrolled asks for another certificate: its own has ended during a long absence.
  Refusal reissue(ConnId conn, const Return& request, double now_unix_s);
  // The connection of a machine is over: its pending answer is dropped.
  void drop_answer(ConnId conn);
  std::vector<PendingAnswer> take_pending_answers() { return std::exchange(pending_answers_, {}); }

  // A certificate for a worker. [DER]
  Result<std::vector<std::byte>> issue(WorkerId id, const trust::PublicKey& key, double now_unix_s);
  // A worker that shows a certificate of this run is known from then on, also to a learner that has lost its state.
  // That learner takes the name that the worker states, but refuses the name of a trainer's node: only a join token
  // makes a machine a node.
  [[nodiscard]] std::optional<std::string> remember(const trust::PeerIdentity& identity,
                                                    const std::string& stated_name);
  // Returns the endpoint at which other workers dial a worker: the port that it states, on the host of its join token
  // or else its source address. So a worker cannot make others dial a host of its choice.
  Endpoint endpoint_of(WorkerId id, const Endpoint& stated, const std::string& source_host) const;
  // Revokes all certificates of the worker, until the last of them has expired.
  void revoke(WorkerId id, double now_unix_s);
  bool is_revoked(WorkerId id) const { return state_.revoked.contains(id); }
  // The revoked workers in at most kRevokedMax ranges. To need fewer ranges, they may cover other ids, but none of
  // `live_workers`.
  WorkerSet revoked_workers(const std::function<std::vector<WorkerId>()>& live_workers) const;
  // Forgets absent machines whose last certificate has long expired. Runs once a minute.
  void forget_expired(const std::function<bool(WorkerId)>& is_present, TimePoint now, double now_unix_s);

  // Moves to the next issue time. Returns whether further times were reserved, so that the state must be saved.
  bool advance_issue_time(std::uint64_t now_unix_ms);
  std::uint64_t last_issue_time() const { return last_issue_time_ms_; }  // [ms]
  void check() const;

 private:
  Refusal certify(ConnId conn, const trust::PublicKey& key, double now_unix_s);
  void forget(WorkerId id);

  LearnerState& state_;
  std::shared_ptr<const trust::Authority> authority_;
  struct RecentAnswer {
    Enrolled answer;
    double certificate_until_unix_s = 0;
  };
  std::map<trust::PublicKey, WorkerId> id_by_key_;  // of state_.known
  std::map<trust::PublicKey, RecentAnswer> recent_answers_;
  std::vector<PendingAnswer> pending_answers_;
  TimePoint forget_at_{};
  std::uint64_t last_issue_time_ms_ = 0;
  // How far issue times are ahead of the clock: an earlier process may have used all those that it had reserved.
  std::uint64_t issue_lead_ms_ = 0;
};

}  // namespace echoline::overlay
