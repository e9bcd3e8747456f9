// Makes TLS sessions with the node's present certificate. Called by the driver.
#include "overlay/uv/sessions.hpp"

namespace echoline::overlay {

Result<Sessions> Sessions::create(trust::SigningKey key, Authority authority, std::string run_id,
                                  bool admit_anonymous) {
  ECHO_ASSIGN(TlsContext anonymous,
              TlsContext::create({.own = std::nullopt, .authority = std::move(authority), .run_id = run_id}));
  return Sessions(std::move(key), std::move(run_id), admit_anonymous, std::move(anonymous));
}

Status Sessions::use_certificate(const act::UseCertificate& use) {
  ECHO_ASSIGN(own_, TlsContext::create({.own = Credentials::Own{.certificate = use.certificate, .key = key_},
                                        .authority = use.authority,
                                        .run_id = run_id_}));
  return ok();
}

Result<TlsSession> Sessions::client(act::Service service, WorkerId expected, double run_unix_s) const {
  const bool enrols = service == act::Service::kEnrol;
  if (!enrols && !own_) return fail(Code::kUnavailable, "dial", "this node has no certificate yet");
  // The expiry of the learner's certificate is not checked: its run key proves as much, and a worker does not know the
  // learner's clock before the welcome.
  const auto valid_at_unix_s = expected == kLearnerId ? std::nullopt : std::optional(run_unix_s);
  return TlsSession::client(enrols ? anonymous_ : *own_, expected, valid_at_unix_s);
}

Result<TlsSession> Sessions::server(double run_unix_s) const {
  using Peer = TlsSession::PeerCertificate;
  return TlsSession::server(*own_, admits_anonymous_ ? Peer::kOptional : Peer::kRequired, run_unix_s);
}

}  // namespace echoline::overlay
