// TLS 1.3 between the nodes of one run, as a transformation of bytes: no socket, no clock.
//
// The driver feeds what came from the socket and writes what the session puts out. Both ends show certificates of the
// run's authority, except a machine that enrols: it has none yet, and knows of the authority only the fingerprint in
// its token. Sessions are never resumed and carry no early data, so no bytes can be replayed.
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

// What a node shows and whom it believes.
struct Credentials {
  struct Own {
    std::vector<std::byte> certificate;  // DER
    trust::SigningKey key;
  };
  std::optional<Own> own{};  // absent: a client without a name (enrolment)
  // The authority's certificate (DER), or only its fingerprint; a server needs the certificate.
  std::variant<trust::Hash, std::vector<std::byte>> authority{};
  std::string run_id{};  // empty: whatever run the authority is of
};

// What all sessions of a node share; immutable, any thread, cheap to copy. Made anew when the certificate is renewed;
// sessions keep the one they began with.
class TlsContext {
 public:
  // After so many records under one key a session changes it, well before AES-GCM's limit of 2^24.5.
  static constexpr std::uint64_t kRecordsPerKey = 1u << 23;

  // kInvalid: key, certificate, authority and run do not belong together; kCorrupt: a certificate cannot be read;
  // kUnavailable: the machine's OpenSSL is set up without what this needs.
  static Result<TlsContext> create(const Credentials& credentials, std::uint64_t records_per_key = kRecordsPerKey);

  struct Impl;  // inside tls.cpp
  const std::shared_ptr<const Impl>& impl() const { return impl_; }

 private:
  explicit TlsContext(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// One end of one connection. Belongs to one thread at a time.
//
//   on bytes from the socket:   feed(bytes); until read(out) returns 0 or fails: use what it returned;
//                               then write take_output() to the socket, on failure too: it says the reason to the peer
//   to send, once established:  write(plaintext, block); write block to the socket
//
// Output must reach the socket in the order it came.
class TlsSession {
 public:
  // Bytes from a peer before the handshake is done; more are refused.
  static constexpr std::size_t kHandshakeBytesMax = 8192;
  // Plaintext of one record, and the most by which a record is longer.
  static constexpr std::size_t kRecordBytesMax = 16384;
  static constexpr std::size_t kRecordOverheadBytes = 22;
  // The most that write() appends for `plaintext` bytes.
  static constexpr std::size_t sealed_bytes_max(std::size_t plaintext) {
    return plaintext + (plaintext / kRecordBytesMax + 3) * kRecordOverheadBytes;
  }

  // `expected`: whom the caller dials (kLearnerId: the learner); nobody else is accepted. The first output is there at
  // once. `now_unix_s`: the time at which certificates must be valid; absent: expiry is not checked.
  static TlsSession client(const TlsContext& context, WorkerId expected, std::optional<double> now_unix_s);
  // kRequired: a peer without a certificate is refused. kOptional: it is admitted as PeerIdentity::Kind::kNobody.
  // The context must have a certificate of its own and the authority's; kInvalid otherwise.
  enum class PeerCertificate { kRequired, kOptional };
  static Result<TlsSession> server(const TlsContext& context, PeerCertificate policy, std::optional<double> now_unix_s);

  ~TlsSession();
  TlsSession(TlsSession&&) noexcept;
  TlsSession& operator=(TlsSession&&) noexcept;

  // The next bytes from the socket. They are read in place: they must stay until read() has returned 0 or failed, and
  // no others may be fed before.
  void feed(std::span<const std::byte> ciphertext);
  // Goes on with the handshake and decrypts into `out` (not empty) as much as fits. 0: everything fed was used and more
  // is needed, or the peer has closed. An error is final, comes again at every call, and may follow on bytes that were
  // good. kCorrupt: not TLS 1.3, or forged. kInvalid: the peer has no certificate of this run, is somebody else, or
  // refuses ours. kStale: its certificate has expired. kExhausted: too many bytes before the handshake was done.
  Result<std::size_t> read(std::span<std::byte> out);

  // Encrypts `plaintext` straight from the caller's memory and appends it, after output not yet taken, to `block`.
  // kUnavailable before established() or after close_notify().
  Status write(std::span<const std::byte> plaintext, std::vector<std::byte>& block);

  // What the session itself wants sent: handshake, alerts, close. Bounded; empty most of the time.
  bool has_output() const;
  std::vector<std::byte> take_output();

  // Both ends have proven themselves and write() works. A client learns only from read() that its own certificate
  // was refused.
  bool established() const;
  // The peer by its certificate; kNobody before established() and when it has shown none.
  const trust::PeerIdentity& identity() const;
  // The certificate (DER) of the run's authority, once established: the one an enrolling worker, which knew only the
  // fingerprint, keeps.
  const std::vector<std::byte>& authority() const;

  // A session that was accepted gives its buffers back whenever they are empty; from now on it keeps them.
  void keep_buffers();

  // Tells the peer that nothing more comes; the output has it.
  void close_notify();
  // The peer has told so.
  bool peer_closed() const;

  struct Impl;  // inside tls.cpp

 private:
  explicit TlsSession(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::overlay
