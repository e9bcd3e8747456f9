#include "overlay/uv/sessions.hpp"

namespace echoline::overlay {

Result<Sessions> Sessions::create(trust::SigningKey key, Authority authority, std::string run_id,
                                  bool admit_anonymous) {
  ECHO_ASSIGN(TlsContext anonymous, TlsContext::create({std::nullopt, std::move(authority), run_id}));
  return Sessions(std::move(key), std::move(run_id), admit_anonymous, std::move(anonymous));
}

Status Sessions::use(const act::UseCertificate& use) {
  ECHO_ASSIGN(own_, TlsContext::create({Credentials::Own{use.certificate, key_}, use.authority, run_id_}));
  return ok();
}

Result<TlsSession> Sessions::client(act::Service service, WorkerId expected, double run_unix_s) const {
  const bool enrols = service == act::Service::kEnrol;
  if (!enrols && !own_) return fail(Code::kUnavailable, "dial", "this node has no certificate yet");
  // The expiry of the learner's certificate is not checked: its run key proves as much, and a worker does not know the
  // learner's clock before the welcome.
  const auto judged_at = expected == kLearnerId ? std::nullopt : std::optional(run_unix_s);
  return TlsSession::client(enrols ? anonymous_ : *own_, expected, judged_at);
}

Result<TlsSession> Sessions::server(double run_unix_s) const {
  using Peer = TlsSession::PeerCertificate;
  return TlsSession::server(*own_, admit_ ? Peer::kOptional : Peer::kRequired, run_unix_s);
}

}  // namespace echoline::overlay
