// The machines that may be workers of this run: enrolment with a join token, certificates and their renewal after a
// long absence, revocation. Also the learner's issue times, which order its signed messages and never go back. All of
// it is part of the learner's state, which the caller saves before an answer leaves. No I/O and no clock.
#pragma once
#include <functional>

#include "overlay/action.hpp"
#include "overlay/state.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

class Identities {
 public:
  // An answer to a machine, to be sent once the state is on disk.
  struct Pending {
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
  // The connection of a machine is over: no answer is sent there.
  void drop(ConnId conn);
  std::vector<Pending> take_pending() { return std::exchange(pending_, {}); }

  // A certificate for a worker. [DER]
  Result<std::vector<std::byte>> issue(WorkerId id, const trust::PublicKey& key, double now_unix_s);
  // A worker that shows a certificate of this run is known from then on, also to a learner that has lost its state.
  void remember(const trust::PeerIdentity& identity, const std::string& name);
  // The endpoint at which other workers dial a worker: the port it names, on the host of its join token or else its
  // source address. So a worker cannot make others dial a host of its choice.
  Endpoint endpoint_of(WorkerId id, const Endpoint& named, const std::string& comes_from) const;
  // Revokes all certificates of the worker, until the last of them has expired.
  void revoke(WorkerId id, double now_unix_s);
  bool is_revoked(WorkerId id) const { return state_.revoked.contains(id); }
  // The revoked workers in at most kRevokedMax ranges. To need fewer ranges, they may cover other ids, but none of
  // `live`.
  WorkerSet revoked_workers(const std::function<std::vector<WorkerId>()>& live) const;
  // Forgets machines whose last certificate has long expired, except those that are `present`. Runs once a minute.
  void forget_expired(const std::function<bool(WorkerId)>& present, TimePoint now, double now_unix_s);

  // Moves to the next issue time. Returns whether further times were reserved, so that the state must be saved.
  bool advance_issue_time(std::uint64_t now_unix_ms);
  std::uint64_t issued() const { return issued_; }  // the last issue time [ms]
  void check() const;

 private:
  Refusal certify(ConnId conn, const trust::PublicKey& key, double now_unix_s);
  void forget(WorkerId id);

  LearnerState& state_;
  std::shared_ptr<const trust::Authority> authority_;
  std::map<trust::PublicKey, WorkerId> ids_;                         // of state_.known
  std::map<trust::PublicKey, std::pair<Enrolled, double>> answers_;  // to machines, and until when they count
  std::vector<Pending> pending_;
  TimePoint forget_at_{};
  std::uint64_t issued_ = 0, ahead_ = 0;  // ahead_: of the clock
};

}  // namespace echoline::overlay
