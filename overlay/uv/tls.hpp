// TLS 1.3 between the nodes of one run, as a transformation of bytes: no socket, no clock.
//
// The driver feeds bytes from the socket and writes the session's output. Both ends show certificates of the run's
// authority. The exception is an enrolling machine: it has no certificate yet, and knows only the authority's
// fingerprint from its token. Sessions are never resumed and carry no early data, so no bytes can be replayed.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::overlay {

// The node's own certificate and the authority it trusts.
struct Credentials {
  struct Own {
    std::vector<std::byte> certificate;  // DER
    trust::SigningKey key;
  };
  std::optional<Own> own{};  // absent: an anonymous client (enrolment)
  // The authority's certificate (DER), or only its fingerprint; a server needs the certificate.
  std::variant<trust::Hash, std::vector<std::byte>> authority{};
  std::string run_id{};  // empty: any run of the authority
};

// The state shared by all sessions of a node; immutable, any thread, cheap to copy. Renewing the certificate needs a
// new context; existing sessions keep theirs.
class TlsContext {
 public:
  // A session changes its key after this many records, well before AES-GCM's limit of 2^24.5.
  static constexpr std::uint64_t kRecordsPerKey = 1u << 23;

  // kInvalid: key, certificate, authority and run do not match. kCorrupt: a certificate cannot be read. kUnavailable:
  // the machine's OpenSSL lacks a required feature.
  static Result<TlsContext> create(const Credentials& credentials, std::uint64_t records_per_key = kRecordsPerKey);

  struct Impl;  // inside tls.cpp
  const std::shared_ptr<const Impl>& impl() const { return impl_; }

 private:
  explicit TlsContext(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// One end of one connection. Belongs to one thread at a time.
//
//   on bytes from the socket:   feed(bytes); until read(out) returns 0 or fails: use the bytes it returned;
//                               then write take_output() to the socket, on failure too: it tells the peer the reason
//   to send, once established:  write(plaintext, block); write block to the socket
//
// Output must reach the socket in order.
class TlsSession {
 public:
  // Limit on a peer's bytes before the handshake is done.
  static constexpr std::size_t kHandshakeBytesMax = 8192;
  // Plaintext bytes of one record, and the bytes that encryption adds to it: header 5, type 1, tag 16.
  static constexpr std::size_t kRecordBytesMax = 16384;
  static constexpr std::size_t kRecordOverheadBytes = 22;
  // The most that write() appends for `plaintext` bytes. Beside full records: one in part, and a key update, which is
  // shorter than two overheads.
  static constexpr std::size_t sealed_bytes_max(std::size_t plaintext) {
    return plaintext + (plaintext / kRecordBytesMax + 3) * kRecordOverheadBytes;
  }

  // `expected`: the peer that the caller dials (kLearnerId: the learner); every other peer is refused. The first output
  // is available at once. `now_unix_s`: the time at which certificates must be valid; absent: expiry is not checked.
  static TlsSession client(const TlsContext& context, WorkerId expected, std::optional<double> now_unix_s);
  // kRequired: a peer without a certificate is refused. kOptional: it is admitted as PeerIdentity::Kind::kAnonymous.
  // The context must have a certificate of its own and the authority's; kInvalid otherwise.
  enum class PeerCertificate { kRequired, kOptional };
  static Result<TlsSession> server(const TlsContext& context, PeerCertificate policy, std::optional<double> now_unix_s);

  ~TlsSession();
  TlsSession(TlsSession&&) noexcept;
  TlsSession& operator=(TlsSession&&) noexcept;

  // Feeds the next bytes from the socket. They are read in place: they must stay valid until read() has returned 0 or
  // failed, and only then may the next bytes be fed.
  void feed(std::span<const std::byte> ciphertext);
  // Continues the handshake and decrypts into `out` (not empty) as much as fits. 0: all fed bytes are used and more are
  // needed, or the peer has closed. An error is final and repeats at every call; it may come after good bytes.
  // kCorrupt: not TLS 1.3, or forged. kInvalid: the peer has no certificate of this run, is another node than expected,
  // or refuses ours. kStale: its certificate has expired. kExhausted: too many bytes before the handshake was done.
  Result<std::size_t> read(std::span<std::byte> out);

  // Encrypts `plaintext` directly from the caller's memory and appends it to `block`, after pending output.
  // kUnavailable before established() or after close_notify().
  Status write(std::span<const std::byte> plaintext, std::vector<std::byte>& block);

  // The session's own messages to send: handshake, alerts, close. Bounded; usually empty.
  bool has_output() const;
  std::vector<std::byte> take_output();

  // Both ends are authenticated and write() works. A client learns only from read() that the server refused its
  // certificate.
  bool established() const;
  // The peer's identity from its certificate; kAnonymous before established(), or if it has none.
  const trust::PeerIdentity& identity() const;
  // The certificate (DER) of the run's authority, once established. An enrolling worker, which knew only the
  // fingerprint, keeps it.
  const std::vector<std::byte>& authority() const;

  // An accepted session releases its buffers whenever they are empty. After this call, it keeps them.
  void keep_buffers();

  // Ends this side's output; the message to the peer is in the output.
  void close_notify();
  // The peer has ended its output.
  bool peer_closed() const;

  struct Impl;  // inside tls.cpp

 private:
  explicit TlsSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::overlay
