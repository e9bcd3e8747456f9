// The machines that may be workers of this run: enrolment with a join token, certificates and their renewal after a
// long absence, revocation; and the times at which the learner issues things. All of it is part of the learner's state,
// which the caller saves before an answer leaves. Pure.
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
  using Refusal = std::optional<std::string>;  // why a machine is refused; absent: it is not, and pending

  // `state` must outlive it; it changes what belongs to identities there.
  Identities(LearnerState& state, std::shared_ptr<const trust::Authority> authority);
  // Times of issue continue behind those of earlier processes, also where the clock went back.
  void start(std::uint64_t now_unix_ms);

  // A machine shows a join token. The token's nonce and the new id are on disk before the certificate leaves, so no
  // token is ever used twice.
  Refusal enrol(ConnId conn, const Enrol& wish, double now_unix_s);
  // A machine that has enrolled asks for another certificate: its own has ended during a long absence.
  Refusal come_back(ConnId conn, const Return& wish, double now_unix_s);
  // The connection of a machine is over: no answer is sent there.
  void drop(ConnId conn);
  std::vector<Pending> take_pending() { return std::exchange(pending_, {}); }

  // A certificate for a worker. [DER]
  Result<std::vector<std::byte>> issue(WorkerId id, const trust::PublicKey& key, double now_unix_s);
  // A worker that shows a certificate of this run is known from then on, also to a learner that has lost its state.
  void remember(const trust::PeerIdentity& identity, const std::string& name);
  // Where other workers dial a worker: at the port it names, on the host of its join token or else the host it comes
  // from. A worker cannot make others dial a host of its choice.
  Endpoint endpoint_of(WorkerId id, const Endpoint& named, const std::string& comes_from) const;
  // Its certificates count no more, for as long as one of them may be valid.
  void revoke(WorkerId id, double now_unix_s);
  bool revoked(WorkerId id) const { return state_.revoked.contains(id); }
  // At most kRevokedMax ranges; `live` are the workers that they must not cover beyond those revoked.
  WorkerSet revoked_workers(const std::function<std::vector<WorkerId>()>& live) const;
  // Forgets machines that no certificate stands behind any more; those that are `present` stay. Once a minute.
  void forget_ended(const std::function<bool(WorkerId)>& present, TimePoint now, double now_unix_s);

  // The next time of issue. Returns whether it reserved further ones, so that the state has to be saved.
  bool next_issue(std::uint64_t now_unix_ms);
  std::uint64_t issued() const { return issued_; }  // the last one
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
