// The certificate authority of one run: certifies that a key belongs to the run's learner or to one of its workers.
//
// Certificates are X.509 in DER form, Ed25519 throughout. Issuing and checking use neither a clock nor a random source.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "overlay/trust/hash.hpp"
#include "overlay/trust/signature.hpp"

namespace echoline::overlay::trust {

inline constexpr std::size_t kCertificateBytesMax = 2048;
inline constexpr std::size_t kRunIdBytesMax = 64;
inline constexpr Duration kWorkerLifetimeMax = std::chrono::hours(1);
// Certificates are valid from this long before their issue, for machines whose clocks are late.
inline constexpr Duration kClockTolerance = std::chrono::minutes(5);

// The identity of a peer, from its certificate. kAnonymous: it has no certificate.
struct PeerIdentity {
  enum class Kind { kAnonymous, kLearner, kWorker };
  Kind kind = Kind::kAnonymous;
  WorkerId worker{};         // kLearnerId unless kind is kWorker
  std::uint64_t serial = 0;  // of the certificate
  double expires_unix_s = 0;
  PublicKey key{};
  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};
// Text for messages, such as "worker 3" or "the learner".
std::string to_text(const PeerIdentity& identity);

struct CertificateRequest {
  PublicKey subject{};
  PeerIdentity::Kind kind = PeerIdentity::Kind::kAnonymous;  // kLearner or kWorker
  WorkerId worker{};                                         // 1 or more for a worker, kLearnerId for the learner
  std::uint64_t serial = 0;                                  // 1 .. 2^63-1, unique in this run
  double now_unix_s = 0;                                     // rounded down to whole seconds; 0 .. the year 9998
  Duration lifetime = kWorkerLifetimeMax;                    // at least a second; a worker's at most kWorkerLifetimeMax
};

// Hash of the key's SubjectPublicKeyInfo in DER form. Tokens name a run's authority by it.
Hash fingerprint(const PublicKey& key);

class Authority {
 public:
  // `run_id`: 1 to 64 printable ASCII characters; kInvalid otherwise. Equal arguments give equal certificates.
  static Result<Authority> create(std::string run_id, SigningKey key);
  // Opens the authority kept in `folder`, or creates one with a fresh key. run.key (key and certificate, PEM, mode
  // 0600) is authoritative; run.crt is a copy of the certificate for other programs. Both are on disk before this
  // returns. Two processes that create at once get the same authority. kInvalid: other users can read run.key, or it
  // belongs to another run. kCorrupt: not a key and its certificate. kIo: a file cannot be read or written.
  static Result<Authority> open_or_create(const std::filesystem::path& folder, std::string run_id);
  // Opens an existing authority. kNotFound if there is none; other errors as above.
  static Result<Authority> open(const std::filesystem::path& folder, std::string run_id);

  const std::string& run_id() const { return run_id_; }
  const SigningKey& key() const { return key_; }
  const PublicKey& public_key() const { return key_.public_key(); }
  // trust::fingerprint() of the key.
  const Hash& fingerprint() const { return fingerprint_; }
  // Self-signed, never expires. [DER]
  const std::vector<std::byte>& certificate() const { return certificate_; }
  // Issues a certificate for `request.subject`, valid for both ends of a connection. [DER] kInvalid if the request
  // breaks a rule above.
  Result<std::vector<std::byte>> issue(const CertificateRequest& request) const;

 private:
  Authority(std::string run_id, SigningKey key);

  std::string run_id_;
  SigningKey key_;
  Hash fingerprint_{};
  std::vector<std::byte> certificate_;
};

// An authority's public data, as nodes without its key know it.
struct AuthorityInfo {
  PublicKey key;
  std::string run_id;
};
// Reads an authority's certificate [DER]. It is self-signed: the caller must compare the fingerprint() of its key
// before trusting it. kCorrupt: not the certificate of an authority.
Result<AuthorityInfo> read_authority(std::span<const std::byte> certificate);

// Checks a certificate [DER] and returns its identity. It must be signed by the run's key, have the run's form, not be
// an authority, and be valid at `now_unix_s` (absent: at any time).
// kCorrupt: not such a certificate. kInvalid: of another authority or run. kStale: expired, or not valid yet.
Result<PeerIdentity> check_certificate(std::span<const std::byte> certificate, const PublicKey& run_key,
                                       std::string_view run_id, std::optional<double> now_unix_s);

}  // namespace echoline::overlay::trust
