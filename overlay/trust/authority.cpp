// Makes X.509 certificates. Called by learners: for their own certificate and those of their workers.
#include "overlay/trust/authority.hpp"

#include <openssl/x509v3.h>

#include <algorithm>
#include <cmath>

#include "overlay/trust/openssl.hpp"

namespace echoline::overlay::trust {
namespace {

constexpr std::int64_t kNoEndUnixS =
    253402300799;  // the end of the year 9999: "no well-defined expiration" in RFC 5280
constexpr std::string_view kAuthorityName = "authority";

void set_name(X509_NAME* name, std::string_view organization, std::string_view common) {
  for (const auto& [id, text] : {std::pair{NID_organizationName, organization}, std::pair{NID_commonName, common}})
    ECHO_CHECK(
        X509_NAME_add_entry_by_NID(name, id, V_ASN1_UTF8STRING, reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()), -1, 0) == 1,
        "{}", openssl_error());
}

struct CertificateContent {
  std::string_view run_id, common_name;
  std::uint64_t serial = 0;
  std::int64_t from_unix_s = 0, until_unix_s = 0;
  EVP_PKEY* subject = nullptr;
  std::vector<std::pair<int, const char*>> extensions;
};

std::vector<std::byte> sign_certificate(const CertificateContent& content, EVP_PKEY* key) {
  const CertificatePtr certificate(X509_new());
  const bool is_filled = certificate && X509_set_version(certificate.get(), X509_VERSION_3) == 1 &&
                         ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate.get()), content.serial) == 1 &&
                         ASN1_TIME_set(X509_getm_notBefore(certificate.get()), content.from_unix_s) != nullptr &&
                         ASN1_TIME_set(X509_getm_notAfter(certificate.get()), content.until_unix_s) != nullptr &&
                         X509_set_pubkey(certificate.get(), content.subject) == 1;
  ECHO_CHECK(is_filled, "{}", openssl_error());
  set_name(X509_get_issuer_name(certificate.get()), content.run_id, kAuthorityName);
  set_name(X509_get_subject_name(certificate.get()), content.run_id, content.common_name);
  for (const auto& [id, value] : content.extensions) {
    const std::unique_ptr<X509_EXTENSION, FreeWith<X509_EXTENSION_free>> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, id, value));
    ECHO_CHECK(extension && X509_add_ext(certificate.get(), extension.get(), -1) == 1, "{}", openssl_error());
  }
  ECHO_CHECK(X509_sign(certificate.get(), key, nullptr) > 0, "{}", openssl_error());
  return to_der(*certificate);
}

// The first 8 bytes of the fingerprint with the highest bit set: never the serial of an issued certificate.
std::uint64_t authority_serial(const Hash& fingerprint) {
  std::uint64_t serial = 0;
  for (std::size_t i = 0; i < 8; ++i) serial = serial << 8 | std::to_integer<std::uint64_t>(fingerprint[i]);
  return serial | std::uint64_t{1} << 63;
}

}  // namespace

Hash fingerprint(const PublicKey& key) {
  // SEQUENCE { SEQUENCE { OID 1.3.101.112 }, BIT STRING of the 32 bytes } (RFC 8410)
  constexpr unsigned char kHead[] = {0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00};
  return Hasher().update(std::as_bytes(std::span(kHead))).update(key.bytes).finish();
}

Authority::Authority(std::string run_id, SigningKey key)
    : run_id_(std::move(run_id)), key_(std::move(key)), fingerprint_(trust::fingerprint(key_.public_key())) {
  certificate_ = sign_certificate(
      {.run_id = run_id_,
       .common_name = kAuthorityName,
       .serial = authority_serial(fingerprint_),
       .from_unix_s = 0,
       .until_unix_s = kNoEndUnixS,
       .subject = key_.parsed().key.get(),
       .extensions = {{NID_basic_constraints, "critical,CA:TRUE,pathlen:0"}, {NID_key_usage, "critical,keyCertSign"}}},
      key_.parsed().key.get());
}

Result<Authority> Authority::create(std::string run_id, SigningKey key) {
  const bool printable = std::all_of(run_id.begin(), run_id.end(), [](char c) { return c >= ' ' && c <= '~'; });
  if (run_id.empty() || run_id.size() > kRunIdBytesMax || !printable)
    return fail(Code::kInvalid, "create run authority",
                "expected a run id of 1 to {} printable ASCII characters, found {} bytes{}", kRunIdBytesMax,
                run_id.size(), printable ? "" : " and others among them");
  return Authority(std::move(run_id), std::move(key));
}

Result<std::vector<std::byte>> Authority::issue(const CertificateRequest& request) const {
  constexpr std::string_view kOperation = "issue certificate";
  const bool is_for_worker = request.kind == PeerIdentity::Kind::kWorker;
  if (request.kind == PeerIdentity::Kind::kAnonymous || is_for_worker == (request.worker == kLearnerId))
    return fail(Code::kInvalid, kOperation,
                "expected the learner (worker id 0) or a worker (1 or more), found worker id {}", request.worker);
  if (request.serial == 0 || request.serial >> 63)
    return fail(Code::kInvalid, kOperation, "expected a serial of 1 to 2^63-1, found {}", request.serial);
  if (request.lifetime < std::chrono::seconds(1) || (is_for_worker && request.lifetime > kWorkerLifetimeMax))
    return fail(Code::kInvalid, kOperation, "expected a lifetime of 1 s or more, of at most {} for a worker, found {}",
                echoline::to_text(kWorkerLifetimeMax), echoline::to_text(request.lifetime));
  const auto lifetime_s = std::chrono::floor<std::chrono::seconds>(request.lifetime).count();
  if (!(request.now_unix_s >= 0 && request.now_unix_s < static_cast<double>(kNoEndUnixS - lifetime_s)))
    return fail(Code::kInvalid, kOperation, "expected a time between 1970 and 9999, found {} s", request.now_unix_s);
  const auto now = static_cast<std::int64_t>(request.now_unix_s);
  const std::string name = is_for_worker ? fmt::format("worker-{}", request.worker) : "learner";
  const Verifier subject(request.subject);
  return sign_certificate({.run_id = run_id_,
                           .common_name = name,
                           .serial = request.serial,
                           .from_unix_s = std::max<std::int64_t>(
                               0, now - std::chrono::duration_cast<std::chrono::seconds>(kClockTolerance).count()),
                           .until_unix_s = now + lifetime_s,
                           .subject = subject.parsed().key.get(),
                           .extensions = {{NID_basic_constraints, "critical,CA:FALSE"},
                                          {NID_key_usage, "critical,digitalSignature"},
                                          {NID_ext_key_usage, "serverAuth,clientAuth"}}},
                          key_.parsed().key.get());
}

}  // namespace echoline::overlay::trust
