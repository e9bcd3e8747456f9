// Reads certificates and checks that they belong to the run. Called at every handshake and by nodes at their start.
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <charconv>
#include <ctime>
#include <map>
#include <tuple>

#include "overlay/trust/openssl.hpp"

namespace echoline::overlay::trust {
namespace {

constexpr std::string_view kOperation = "check certificate";

// The text of the only entry of this kind; absent if there is none, or several.
std::optional<std::string> name_entry(const X509_NAME* name, int id) {
  const int index = X509_NAME_get_index_by_NID(name, id, -1);
  if (index < 0 || X509_NAME_get_index_by_NID(name, id, index) >= 0) return std::nullopt;
  const ASN1_STRING* text = X509_NAME_ENTRY_get_data(X509_NAME_get_entry(name, index));
  if (ASN1_STRING_type(text) != V_ASN1_UTF8STRING) return std::nullopt;
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<std::size_t>(ASN1_STRING_length(text)));
}

std::optional<PublicKey> ed25519_key(X509& x509) {
  EVP_PKEY* key = X509_get0_pubkey(&x509);
  if (!key || EVP_PKEY_get_id(key) != EVP_PKEY_ED25519) return std::nullopt;
  PublicKey raw_key;
  std::size_t size = raw_key.bytes.size();
  if (EVP_PKEY_get_raw_public_key(key, reinterpret_cast<unsigned char*>(raw_key.bytes.data()), &size) != 1 ||
      size != raw_key.bytes.size())
    return std::nullopt;
  return raw_key;
}

std::optional<double> unix_seconds(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return std::nullopt;
  return static_cast<double>(timegm(&parts));
}

// "learner", or "worker-" and the id as printed.
std::optional<std::pair<PeerIdentity::Kind, WorkerId>> read_common_name(std::string_view name) {
  if (name == "learner") return std::pair{PeerIdentity::Kind::kLearner, kLearnerId};
  constexpr std::string_view kWorker = "worker-";
  if (!name.starts_with(kWorker)) return std::nullopt;
  const std::string_view digits = name.substr(kWorker.size());
  WorkerId id;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), id.value);
  if (error != std::errc() || id == kLearnerId || fmt::format("{}", id) != digits) return std::nullopt;
  return std::pair{PeerIdentity::Kind::kWorker, id};
}

// True if the extensions are sound, no critical one is unknown, and the wanted ones are present.
bool has_extensions(X509& x509, std::uint32_t flags_wanted) {
  const std::uint32_t flags = X509_get_extension_flags(&x509);
  return (flags & (EXFLAG_INVALID | EXFLAG_CRITICAL)) == 0 && (flags & flags_wanted) == flags_wanted;
}

// Whether this is the certificate of a node, not of an authority.
bool is_leaf(X509& x509) {
  constexpr std::uint32_t kBothEnds = XKU_SSL_SERVER | XKU_SSL_CLIENT;
  return has_extensions(x509, EXFLAG_BCONS | EXFLAG_KUSAGE | EXFLAG_XKUSAGE) &&
         (X509_get_extension_flags(&x509) & EXFLAG_CA) == 0 && X509_get_key_usage(&x509) == KU_DIGITAL_SIGNATURE &&
         (X509_get_extended_key_usage(&x509) & kBothEnds) == kBothEnds;
}

Error unreadable() {
  ERR_clear_error();
  return fail(Code::kCorrupt, kOperation, "expected an X.509 certificate of at most {} bytes, found something else",
              kCertificateBytesMax);
}

}  // namespace

std::string to_text(const PeerIdentity& identity) {
  switch (identity.kind) {
    case PeerIdentity::Kind::kAnonymous:
      return "nobody";
    case PeerIdentity::Kind::kLearner:
      return "the learner";
    case PeerIdentity::Kind::kWorker:
      return fmt::format("worker {}", identity.worker);
  }
  return "nobody";
}

CertificatePtr parse_certificate(std::span<const std::byte> bytes) {
  if (bytes.size() > kCertificateBytesMax) return nullptr;
  const unsigned char* parsed_end = octets(bytes);  // d2i_X509 moves it
  CertificatePtr certificate(d2i_X509(nullptr, &parsed_end, static_cast<long>(bytes.size())));
  if (certificate && parsed_end != octets(bytes) + bytes.size()) certificate.reset();
  ERR_clear_error();
  return certificate;
}

std::vector<std::byte> to_der(const X509& x509) {
  const int size = i2d_X509(&x509, nullptr);
  ECHO_CHECK(size > 0, "{}", openssl_error());
  std::vector<std::byte> der(static_cast<std::size_t>(size));
  auto* to = reinterpret_cast<unsigned char*>(der.data());
  ECHO_CHECK(i2d_X509(&x509, &to) == size, "{}", openssl_error());
  return der;
}

Result<AuthorityInfo> read_authority(std::span<const std::byte> certificate) {
  const CertificatePtr x509 = parse_certificate(certificate);
  if (!x509) return unreadable();
  return read_authority(*x509);
}

Result<AuthorityInfo> read_authority(X509& x509) {
  const std::optional<PublicKey> key = ed25519_key(x509);
  const std::optional<std::string> run_id = name_entry(X509_get_subject_name(&x509), NID_organizationName);
  const bool is_authority = key && run_id && X509_verify(&x509, X509_get0_pubkey(&x509)) == 1 &&
                            has_extensions(x509, EXFLAG_BCONS | EXFLAG_KUSAGE | EXFLAG_CA) &&
                            (X509_get_key_usage(&x509) & KU_KEY_CERT_SIGN) != 0;
  ERR_clear_error();
  if (!is_authority)
    return fail(Code::kCorrupt, kOperation, "expected the certificate of a run's authority, found another certificate");
  return AuthorityInfo{*key, *run_id};
}

namespace {

// The contents of a valid certificate, independent of the time.
struct Facts {
  PeerIdentity identity;
  double from_unix_s = 0;
};

Result<Facts> read_facts(X509& x509, const PublicKey& run_key, std::string_view run_id) {
  const std::optional<PublicKey> key = ed25519_key(x509);
  if (!key || X509_get_version(&x509) != X509_VERSION_3) return unreadable();
  const bool is_authentic = X509_verify(&x509, Verifier(run_key).parsed().key.get()) == 1;
  ERR_clear_error();
  if (!is_authentic)
    return fail(Code::kInvalid, kOperation, "expected a certificate of the authority of run '{}', found one of another",
                run_id);
  // From here on, the contents are what the authority has signed.
  const X509_NAME* subject = X509_get_subject_name(&x509);
  const std::optional<std::string> run = name_entry(subject, NID_organizationName);
  const std::optional<std::string> name = name_entry(subject, NID_commonName);
  if (!run || !name || X509_NAME_entry_count(subject) != 2 || !is_leaf(x509))
    return fail(Code::kCorrupt, kOperation, "expected the certificate of a learner or worker, found another kind");
  if (*run != run_id)
    return fail(Code::kInvalid, kOperation, "expected a certificate of run '{}', found one of run '{}'", run_id, *run);
  const auto holder = read_common_name(*name);
  if (!holder)
    return fail(Code::kCorrupt, kOperation, "expected the name 'learner' or 'worker-<id>', found '{}'", *name);
  PeerIdentity identity;
  std::tie(identity.kind, identity.worker) = *holder;
  identity.key = *key;
  const std::optional<double> valid_from = unix_seconds(X509_get0_notBefore(&x509));
  const std::optional<double> valid_until = unix_seconds(X509_get0_notAfter(&x509));
  if (ASN1_INTEGER_get_uint64(&identity.serial, X509_get0_serialNumber(&x509)) != 1 || !valid_from || !valid_until)
    return unreadable();
  identity.expires_unix_s = *valid_until;
  return Facts{.identity = identity, .from_unix_s = *valid_from};
}

Result<PeerIdentity> check_facts(const Facts& facts, std::optional<double> now_unix_s) {
  const PeerIdentity& identity = facts.identity;
  if (now_unix_s && !(*now_unix_s <= identity.expires_unix_s))
    return fail(Code::kStale, kOperation,
                "the certificate of {} expired {:.0f} s ago: it must be renewed, or a clock is wrong",
                to_text(identity), *now_unix_s - identity.expires_unix_s);
  if (now_unix_s && *now_unix_s < facts.from_unix_s)
    return fail(Code::kStale, kOperation,
                "the certificate of {} becomes valid in {:.0f} s: the clocks of the machines differ", to_text(identity),
                facts.from_unix_s - *now_unix_s);
  return identity;
}

}  // namespace

// A node checks the same few certificates repeatedly, its own at every connection. This cache keeps the facts of valid
// ones, keyed by every input they depend on.
Result<PeerIdentity> check_certificate(std::span<const std::byte> certificate, const PublicKey& run_key,
                                       std::string_view run_id, std::optional<double> now_unix_s) {
  constexpr std::size_t kCachedMax = 256;
  thread_local std::map<std::string, Facts> cache;
  std::string cache_key(reinterpret_cast<const char*>(run_key.bytes.data()), run_key.bytes.size());
  cache_key.append(run_id).append(1, '\0').append(reinterpret_cast<const char*>(certificate.data()),
                                                  certificate.size());
  if (const auto it = cache.find(cache_key); it != cache.end()) return check_facts(it->second, now_unix_s);
  const CertificatePtr x509 = parse_certificate(certificate);
  if (!x509) return unreadable();
  ECHO_ASSIGN(const Facts facts, read_facts(*x509, run_key, run_id));
  if (cache.size() >= kCachedMax) cache.clear();
  cache.emplace(std::move(cache_key), facts);
  return check_facts(facts, now_unix_s);
}

Result<PeerIdentity> check_certificate(X509& x509, const PublicKey& run_key, std::string_view run_id,
                                       std::optional<double> now_unix_s) {
  ECHO_ASSIGN(const Facts facts, read_facts(x509, run_key, run_id));
  return check_facts(facts, now_unix_s);
}

}  // namespace echoline::overlay::trust
