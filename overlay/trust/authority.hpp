// The certificate authority of one run: it vouches that a key belongs to the run's learner or to one of its workers.
//
// Certificates are X.509 in DER form, Ed25519 throughout. Issuing and checking are functions of their arguments alone:
// no clock and no random source inside.
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
// Certificates are valid from this long before they are issued, for clocks that are late.
inline constexpr Duration kClockTolerance = std::chrono::minutes(5);

// Who is at the other end, by its certificate.
struct PeerIdentity {
  enum class Kind { kNobody, kLearner, kWorker };
  Kind kind = Kind::kNobody;
  WorkerId worker{};         // kLearnerId unless kind is kWorker
  std::uint64_t serial = 0;  // of the certificate; what a revocation names
  double expires_unix_s = 0;
  PublicKey key{};
  friend bool operator==(const PeerIdentity&, const PeerIdentity&) = default;
};
// "worker 3", "the learner" or "nobody".
std::string to_text(const PeerIdentity& identity);

struct CertificateRequest {
  PublicKey subject{};
  PeerIdentity::Kind kind = PeerIdentity::Kind::kNobody;  // kLearner or kWorker
  WorkerId worker{};                                      // 1 or more for a worker, kLearnerId for the learner
  std::uint64_t serial = 0;                               // 1 .. 2^63-1, never used before in this run
  double now_unix_s = 0;                                  // whole seconds count; 0 .. the year 9998
  Duration lifetime = kWorkerLifetimeMax;                 // at least a second; a worker's at most kWorkerLifetimeMax
};

// Hash of the key's SubjectPublicKeyInfo in DER form: how a run's authority is named in a token.
Hash fingerprint(const PublicKey& key);

class Authority {
 public:
  // `run_id`: 1 to 64 printable ASCII characters; kInvalid otherwise. The same arguments give the same certificate.
  static Result<Authority> create(std::string run_id, SigningKey key);
  // The authority kept in `folder`, or a new one with a fresh key. run.key (key and certificate, PEM, mode 0600) is
  // what counts; run.crt is a copy of the certificate for other programs. Both are on disk before this returns, and of
  // two processes that create at once both get the same authority. kInvalid: readable by others than the owner, or of
  // another run. kCorrupt: not a key and its certificate. kIo.
  static Result<Authority> open_or_create(const std::filesystem::path& folder, std::string run_id);
  // The one that is there; kNotFound when there is none, else errors as above.
  static Result<Authority> open(const std::filesystem::path& folder, std::string run_id);

  const std::string& run_id() const { return run_id_; }
  const SigningKey& key() const { return key_; }
  const PublicKey& public_key() const { return key_.public_key(); }
  // trust::fingerprint() of the key.
  const Hash& fingerprint() const { return fingerprint_; }
  // Self-signed, without an end. [DER]
  const std::vector<std::byte>& certificate() const { return certificate_; }
  // A certificate for `request.subject`, for both ends of a connection. [DER] kInvalid when the request breaks a rule
  // above.
  Result<std::vector<std::byte>> issue(const CertificateRequest& request) const;

 private:
  Authority(std::string run_id, SigningKey key);

  std::string run_id_;
  SigningKey key_;
  Hash fingerprint_{};
  std::vector<std::byte> certificate_;
};

// An authority as everybody else knows it.
struct AuthorityInfo {
  PublicKey key;
  std::string run_id;
};
// Reads an authority's certificate [DER]. It is self-signed, so it says nothing until the caller has compared the
// fingerprint() of its key. kCorrupt.
Result<AuthorityInfo> read_authority(std::span<const std::byte> certificate);

// What a certificate [DER] says, once it is known to be one of this run: signed by the run's key, of its form, not an
// authority itself, and valid at `now_unix_s` (absent: at any time).
// kCorrupt: not such a certificate. kInvalid: of another authority or run. kStale: expired, or not valid yet.
Result<PeerIdentity> check_certificate(std::span<const std::byte> certificate, const PublicKey& run_key,
                                       std::string_view run_id, std::optional<double> now_unix_s);

}  // namespace echoline::overlay::trust
