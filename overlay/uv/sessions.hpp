// TLS sessions of one node: with its certificate, or without one while it enrols. Internal to overlay/uv.
#pragma once
#include "overlay/action.hpp"
#include "overlay/uv/tls.hpp"

namespace echoline::overlay {

class Sessions {
 public:
  using Authority = std::variant<trust::Hash, std::vector<std::byte>>;  // its fingerprint, or its certificate

  // Errors of TlsContext::create().
  static Result<Sessions> create(trust::SigningKey key, Authority authority, std::string run_id, bool admit_anonymous);

  // All later sessions show this certificate.
  Status use_certificate(const act::UseCertificate& use);
  bool has_certificate() const { return own_.has_value(); }
  // Makes a session with the node that is dialled. kUnavailable: the node has no certificate, and the service needs
  // one.
  Result<TlsSession> client(act::Service service, WorkerId expected, double run_unix_s) const;
  // Makes a session with a node that dials. This node must have a certificate.
  Result<TlsSession> server(double run_unix_s) const;

 private:
  Sessions(trust::SigningKey key, std::string run_id, bool admit_anonymous, TlsContext anonymous)
      : key_(std::move(key)),
        run_id_(std::move(run_id)),
        admits_anonymous_(admit_anonymous),
        anonymous_(std::move(anonymous)) {}

  trust::SigningKey key_;
  std::string run_id_;
  bool admits_anonymous_ = false;  // accepts peers without a certificate, which enrol
  TlsContext anonymous_;
  std::optional<TlsContext> own_;
};

}  // namespace echoline::overlay
