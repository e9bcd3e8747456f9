// TLS sessions by OpenSSL over memory buffers. Called by the driver.
#include "overlay/uv/tls.hpp"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "overlay/relay/protocol.hpp"
#include "overlay/trust/openssl.hpp"

namespace echoline::overlay {
namespace {

constexpr std::string_view kOperation = "TLS";
constexpr std::size_t kOutputBytesMax = 64 * 1024;  // of a session's own messages that wait to be sent
constexpr long kCertificateListBytesMax = 4096;     // of a peer's certificate chain

// Both first flights are padded with zeros to more than a packet of the usual size. So on a path that drops large
// packets every handshake fails, and the dialling node sees small segments overtake large ones (narrow_paths.hpp).
constexpr unsigned kPaddingExtension = 0xff45;  // for private use
constexpr std::size_t kHelloPadding = 1700;
constexpr std::size_t kAnswerPadding = 900;  // less, because the answer also contains the certificates

int add_padding(SSL*, unsigned, unsigned context, const unsigned char** out, std::size_t* size, X509*, std::size_t,
                int*, void*) {
  static constexpr unsigned char kZeros[kHelloPadding]{};
  *out = kZeros;
  *size = (context & SSL_EXT_CLIENT_HELLO) != 0 ? kHelloPadding : kAnswerPadding;
  return 1;
}

int skip_padding(SSL*, unsigned, unsigned, const unsigned char*, std::size_t, X509*, std::size_t, int*, void*) {
  return 1;
}

using trust::openssl_error;
using ContextPtr = std::unique_ptr<SSL_CTX, trust::FreeWith<SSL_CTX_free>>;
using SslPtr = std::unique_ptr<SSL, trust::FreeWith<SSL_free>>;

// The peer's alert as an error. OpenSSL's reason for a received alert is 1000 plus the alert's number.
Error alert_error(int alert) {
  switch (alert) {
    case SSL_AD_CERTIFICATE_REQUIRED:
      return fail(Code::kInvalid, kOperation, "the peer wants to see a certificate of its run: enrol first");
    case SSL_AD_CERTIFICATE_EXPIRED:
      return fail(Code::kStale, kOperation,
                  "the peer refused our certificate as expired: renew it, and compare the clocks");
    case SSL_AD_UNKNOWN_CA:
      return fail(Code::kInvalid, kOperation, "the peer refused our certificate: it is of another run");
    case SSL_AD_BAD_CERTIFICATE:
      return fail(Code::kInvalid, kOperation,
                  "the peer refused our certificate: it is damaged, or the peer expected another node");
  }
  return fail(Code::kCorrupt, kOperation, "the peer gave up: alert {} ({})", alert, SSL_alert_desc_string_long(alert));
}

// Converts the thread's last OpenSSL error and empties the queue.
Error stream_error(bool established) {
  const unsigned long code = ERR_peek_last_error();
  const int reason = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
  const std::string text = openssl_error();
  if (reason >= SSL_AD_REASON_OFFSET) return alert_error(reason - SSL_AD_REASON_OFFSET);
  switch (reason) {
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
      return fail(Code::kCorrupt, kOperation,
                  "expected TLS 1.3, found an HTTP request: only nodes of the run connect here");
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return fail(Code::kInvalid, kOperation, "the peer has shown no certificate: it must enrol first");
  }
  if (established) return fail(Code::kCorrupt, kOperation, "forged or damaged bytes: {}", text);
  return fail(Code::kCorrupt, kOperation, "expected a TLS 1.3 handshake of an echoline node, found something else: {}",
              text);
}

}  // namespace

struct TlsContext::Impl {
  ContextPtr ssl_context;
  trust::Hash fingerprint{};                // of the authority
  std::vector<std::byte> authority;         // the authority's certificate, if known
  std::optional<trust::PublicKey> run_key;  // the key in that certificate
  std::string run_id;                       // empty: the authority's run
  bool has_own_certificate = false;
  std::uint64_t records_per_key = 0;
};

struct TlsSession::Impl {
  std::shared_ptr<const TlsContext::Impl> context;
  std::optional<WorkerId> expected;  // of a client
  std::optional<double> now_unix_s;
  SslPtr ssl;

  std::span<const std::byte> source;       // fed bytes that are not read yet
  std::vector<std::byte> output;           // messages of the session itself
  std::vector<std::byte>* sink = &output;  // where OpenSSL's bytes go; the caller's block during write()

  bool established = false, closing = false, peer_closed = false;
  std::size_t handshake_bytes = 0;
  std::uint64_t records_with_key = 0;  // records encrypted with the current key
  trust::PeerIdentity peer;            // from the certificate; proven once established
  std::vector<std::byte> authority;    // found in the peer's chain
  std::optional<Error> refusal;        // why one of the callbacks below has ended the handshake
  std::optional<Error> failure;        // final: every later read() returns it

  static Impl& session_of(BIO* bio) { return *static_cast<Impl*>(BIO_get_data(bio)); }
  static int read_source(BIO* bio, char* to, std::size_t size, std::size_t* bytes_read);
  static int write_sink(BIO* bio, const char* from, std::size_t size, std::size_t* bytes_written);
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }
  static const BIO_METHOD* method();
  static int verify(X509_STORE_CTX* store, void*);

  static std::unique_ptr<Impl> make(const TlsContext& context, int verify_mode, std::optional<double> now_unix_s);
  Result<trust::PeerIdentity> check(X509_STORE_CTX& store);
  Error set_failure();
};

// ---- the context ----

Result<TlsContext> TlsContext::create(const Credentials& credentials, std::uint64_t records_per_key) {
  auto impl = std::make_shared<Impl>();
  impl->records_per_key = records_per_key;
  impl->ssl_context.reset(SSL_CTX_new(TLS_method()));
  SSL_CTX* ssl_context = impl->ssl_context.get();
  // Order of preference: AES-128-GCM is the fastest on processors with AES instructions.
  constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384";
  if (!ssl_context || SSL_CTX_set_min_proto_version(ssl_context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(ssl_context, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_ciphersuites(ssl_context, kCiphers) != 1 || SSL_CTX_set1_groups_list(ssl_context, "X25519") != 1 ||
      SSL_CTX_set1_sigalgs_list(ssl_context, "ed25519") != 1 || SSL_CTX_set_num_tickets(ssl_context, 0) != 1 ||
      SSL_CTX_add_custom_ext(ssl_context, kPaddingExtension, SSL_EXT_CLIENT_HELLO | SSL_EXT_TLS1_3_ENCRYPTED_EXTENSIONS,
                             add_padding, nullptr, nullptr, skip_padding, nullptr) != 1)
    return fail(Code::kUnavailable, kOperation,
                "this machine's OpenSSL does not offer TLS 1.3 with X25519 and Ed25519: {}", openssl_error());
  SSL_CTX_set_options(ssl_context, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(ssl_context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(ssl_context, SSL_MODE_NO_AUTO_CHAIN | SSL_MODE_AUTO_RETRY);
  SSL_CTX_clear_mode(ssl_context, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_max_cert_list(ssl_context, kCertificateListBytesMax);
  SSL_CTX_set_cert_verify_callback(ssl_context, TlsSession::Impl::verify, nullptr);

  impl->run_id = credentials.run_id;
  trust::CertificatePtr authority;
  if (const auto* fingerprint = std::get_if<trust::Hash>(&credentials.authority)) {
    impl->fingerprint = *fingerprint;
  } else {
    const auto& der = std::get<std::vector<std::byte>>(credentials.authority);
    ECHO_ASSIGN(const trust::AuthorityInfo info, trust::read_authority(der));
    if (impl->run_id.empty()) impl->run_id = info.run_id;
    if (impl->run_id != info.run_id)
      return fail(Code::kInvalid, kOperation, "expected the authority of run '{}', found that of run '{}'",
                  impl->run_id, info.run_id);
    impl->run_key = info.key;
    impl->fingerprint = trust::fingerprint(info.key);
    impl->authority = der;
    authority = trust::parse_certificate(der);
  }
  if (!credentials.own) return TlsContext(std::move(impl));

  const auto& own = *credentials.own;
  const trust::CertificatePtr leaf = trust::parse_certificate(own.certificate);
  if (!leaf) return fail(Code::kCorrupt, kOperation, "our own certificate cannot be read");
  if (impl->run_key) ECHO_TRY(trust::check_certificate(*leaf, *impl->run_key, impl->run_id, std::nullopt));
  if (SSL_CTX_use_certificate(ssl_context, leaf.get()) != 1 ||
      SSL_CTX_use_PrivateKey(ssl_context, own.key.parsed().key.get()) != 1)
    return fail(Code::kInvalid, kOperation, "our own key and certificate do not belong together: {}", openssl_error());
  // After SSL_CTX_use_certificate(), because OpenSSL adds the chain to the current certificate.
  if (authority) ECHO_CHECK(SSL_CTX_add1_chain_cert(ssl_context, authority.get()) == 1, "{}", openssl_error());
  impl->has_own_certificate = true;
  return TlsContext(std::move(impl));
}

// ---- callbacks of OpenSSL ----

int TlsSession::Impl::read_source(BIO* bio, char* to, std::size_t size, std::size_t* bytes_read) {
  Impl& self = session_of(bio);
  BIO_clear_retry_flags(bio);
  *bytes_read = std::min(size, self.source.size());
  if (*bytes_read == 0) {
    BIO_set_retry_read(bio);
    return 0;
  }
  if (!self.established && !SSL_is_init_finished(self.ssl.get())) {
    self.handshake_bytes += *bytes_read;
    if (self.handshake_bytes > kHandshakeBytesMax) {
      self.refusal = fail(Code::kExhausted, kOperation,
                          "the peer sent more than {} bytes without finishing the handshake", kHandshakeBytesMax);
      *bytes_read = 0;
      return 0;
    }
  }
  std::memcpy(to, self.source.data(), *bytes_read);
  self.source = self.source.subspan(*bytes_read);
  return 1;
}

int TlsSession::Impl::write_sink(BIO* bio, const char* from, std::size_t size, std::size_t* bytes_written) {
  Impl& self = session_of(bio);
  BIO_clear_retry_flags(bio);
  if (self.sink == &self.output && self.output.size() + size > kOutputBytesMax) {
    self.refusal =
        fail(Code::kExhausted, kOperation, "the peer made us answer with more than {} bytes", kOutputBytesMax);
    *bytes_written = 0;
    return 0;
  }
  const auto bytes = std::as_bytes(std::span(from, size));
  self.sink->insert(self.sink->end(), bytes.begin(), bytes.end());
  *bytes_written = size;
  return 1;
}

// A BIO is OpenSSL's interface for I/O. Through this one it reads the fed bytes and writes to the caller's block,
// without buffers in between.
const BIO_METHOD* TlsSession::Impl::method() {
  static const BIO_METHOD* const kMethod = [] {
    BIO_METHOD* method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "echoline session");
    ECHO_CHECK(method && BIO_meth_set_read_ex(method, read_source) == 1 &&
                   BIO_meth_set_write_ex(method, write_sink) == 1 && BIO_meth_set_ctrl(method, control) == 1,
               "{}", openssl_error());
    return method;
  }();
  return kMethod;
}

int TlsSession::Impl::verify(X509_STORE_CTX* store, void*) {
  auto* ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  Impl& self = *static_cast<Impl*>(SSL_get_app_data(ssl));
  const auto identity = self.check(*store);
  if (identity && (!self.expected || identity->worker == *self.expected)) {
    self.peer = *identity;
    return 1;
  }
  int verify_error = X509_V_ERR_HOSTNAME_MISMATCH;  // selects the alert for the peer
  if (identity) {
    self.refusal = fail(Code::kInvalid, kOperation, "expected {}, found {}",
                        *self.expected == kLearnerId ? "the learner" : fmt::format("worker {}", *self.expected),
                        to_text(*identity));
  } else {
    self.refusal = identity.error();
    if (self.refusal->code == Code::kStale) verify_error = X509_V_ERR_CERT_HAS_EXPIRED;
    if (self.refusal->code == Code::kInvalid) verify_error = X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT;
  }
  X509_STORE_CTX_set_error(store, verify_error);
  return 0;
}

// Checks the peer's certificate: the known authority must have signed it, or else the certificate in the peer's chain
// with the known fingerprint.
Result<trust::PeerIdentity> TlsSession::Impl::check(X509_STORE_CTX& store) {
  std::optional<trust::PublicKey> run_key = context->run_key;
  std::string run_id = context->run_id;
  const STACK_OF(X509)* chain = X509_STORE_CTX_get0_untrusted(&store);
  for (int i = 0; i < sk_X509_num(chain) && !run_key; ++i) {
    X509& x509 = *sk_X509_value(chain, i);
    const auto info = trust::read_authority(x509);
    if (!info || trust::fingerprint(info->key) != context->fingerprint) continue;
    run_key = info->key;
    if (run_id.empty()) run_id = info->run_id;
    authority = trust::to_der(x509);
  }
  if (!run_key)
    return fail(Code::kInvalid, kOperation, "expected a node of the authority {}.., found one of another authority",
                trust::to_hex(context->fingerprint).substr(0, 16));
  return trust::check_certificate(*X509_STORE_CTX_get0_cert(&store), *run_key, run_id, now_unix_s);
}

// ---- the session ----

std::unique_ptr<TlsSession::Impl> TlsSession::Impl::make(const TlsContext& context, int verify_mode,
                                                         std::optional<double> now_unix_s) {
  auto impl = std::make_unique<Impl>();
  impl->context = context.impl();
  impl->now_unix_s = now_unix_s;
  impl->ssl.reset(SSL_new(impl->context->ssl_context.get()));
  BIO* bio = BIO_new(method());
  ECHO_CHECK(impl->ssl && bio, "{}", openssl_error());
  BIO_set_data(bio, impl.get());
  BIO_set_init(bio, 1);
  SSL_set_bio(impl->ssl.get(), bio, bio);  // owns it from here on
  SSL_set_app_data(impl->ssl.get(), impl.get());
  SSL_set_verify(impl->ssl.get(), verify_mode, nullptr);
  return impl;
}

TlsSession TlsSession::client(const TlsContext& context, WorkerId expected, std::optional<double> now_unix_s) {
  auto impl = Impl::make(context, SSL_VERIFY_PEER, now_unix_s);
  impl->expected = expected;
  if (expected == kLearnerId) {  // a relay finds the learner by this name
    const std::string name = relay::run_name(impl->context->fingerprint);
    ECHO_CHECK(SSL_set_tlsext_host_name(impl->ssl.get(), name.c_str()) == 1, "{}", openssl_error());
  }
  SSL_set_connect_state(impl->ssl.get());
  ERR_clear_error();
  const int result = SSL_do_handshake(impl->ssl.get());  // makes the first message, then waits for the answer
  ECHO_CHECK(SSL_get_error(impl->ssl.get(), result) == SSL_ERROR_WANT_READ, "{}", openssl_error());
  return TlsSession(std::move(impl));
}

Result<TlsSession> TlsSession::server(const TlsContext& context, PeerCertificate policy,
                                      std::optional<double> now_unix_s) {
  if (!context.impl()->has_own_certificate || !context.impl()->run_key)
    return fail(Code::kInvalid, kOperation,
                "a node that accepts connections needs a certificate and that of its authority");
  const int required = policy == PeerCertificate::kRequired ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0;
  auto impl = Impl::make(context, SSL_VERIFY_PEER | required, now_unix_s);
  SSL_set_accept_state(impl->ssl.get());
  SSL_set_mode(impl->ssl.get(), SSL_MODE_RELEASE_BUFFERS);  // strangers hold no memory; until keep_buffers()
  return TlsSession(std::move(impl));
}

TlsSession::TlsSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsSession::~TlsSession() = default;
TlsSession::TlsSession(TlsSession&&) noexcept = default;
TlsSession& TlsSession::operator=(TlsSession&&) noexcept = default;

void TlsSession::feed(std::span<const std::byte> ciphertext) {
  ECHO_CHECK(impl_->source.empty(), "fed before the last bytes were read");
  if (!impl_->failure) impl_->source = ciphertext;
}

// Records the reason of a new failure; from now on every read() returns it.
Error TlsSession::Impl::set_failure() {
  Error error = stream_error(established);
  failure = refusal ? std::move(*refusal) : std::move(error);
  source = {};
  return *failure;
}

Result<std::size_t> TlsSession::read(std::span<std::byte> out) {
  Impl& self = *impl_;
  ECHO_CHECK(!out.empty());
  if (self.failure) return *self.failure;
  ERR_clear_error();
  std::size_t bytes_read = 0;
  while (bytes_read < out.size()) {
    std::size_t new_bytes = 0;
    const int result = SSL_read_ex(self.ssl.get(), out.data() + bytes_read, out.size() - bytes_read, &new_bytes);
    self.established = self.established || SSL_is_init_finished(self.ssl.get());
    bytes_read += new_bytes;
    if (result == 1) continue;
    const int reason = SSL_get_error(self.ssl.get(), result);
    if (reason == SSL_ERROR_WANT_READ && self.source.empty()) break;
    if (reason == SSL_ERROR_ZERO_RETURN) {
      self.peer_closed = true;
      self.source = {};
      break;
    }
    const Error error = self.set_failure();
    if (bytes_read == 0) return error;
    break;  // return the good bytes first
  }
  return bytes_read;
}

Status TlsSession::write(std::span<const std::byte> plaintext, std::vector<std::byte>& block) {
  Impl& self = *impl_;
  if (self.failure) return *self.failure;
  if (!self.established || self.closing)
    return fail(Code::kUnavailable, kOperation, "written {}",
                self.closing ? "after the end" : "before the handshake was done");
  const std::size_t needed = block.size() + self.output.size() + sealed_bytes_max(plaintext.size());
  if (needed > block.capacity()) block.reserve(std::max(needed, 2 * block.capacity()));
  block.insert(block.end(), self.output.begin(), self.output.end());
  self.output.clear();
  if (plaintext.empty()) return ok();

  ERR_clear_error();
  self.records_with_key += plaintext.size() / kRecordBytesMax + 1;  // rounded up
  if (self.records_with_key > self.context->records_per_key) {
    self.records_with_key = 0;
    ECHO_CHECK(SSL_key_update(self.ssl.get(), SSL_KEY_UPDATE_NOT_REQUESTED) == 1, "{}", openssl_error());
  }
  self.sink = &block;
  std::size_t written = 0;
  const int result = SSL_write_ex(self.ssl.get(), plaintext.data(), plaintext.size(), &written);
  self.sink = &self.output;
  if (result != 1 || written != plaintext.size()) return self.set_failure();
  return ok();
}

bool TlsSession::has_output() const { return !impl_->output.empty(); }
std::vector<std::byte> TlsSession::take_output() { return std::exchange(impl_->output, {}); }
bool TlsSession::established() const { return impl_->established && !impl_->failure; }

const trust::PeerIdentity& TlsSession::identity() const {
  static const trust::PeerIdentity kAnonymous;
  return impl_->established ? impl_->peer : kAnonymous;
}

const std::vector<std::byte>& TlsSession::authority() const {
  static const std::vector<std::byte> kNone;
  if (!impl_->established) return kNone;
  return impl_->authority.empty() ? impl_->context->authority : impl_->authority;
}

void TlsSession::keep_buffers() { SSL_clear_mode(impl_->ssl.get(), SSL_MODE_RELEASE_BUFFERS); }

void TlsSession::close_notify() {
  if (!established() || impl_->closing) return;
  impl_->closing = true;
  ERR_clear_error();
  SSL_shutdown(impl_->ssl.get());
}

bool TlsSession::peer_closed() const { return impl_->peer_closed; }

}  // namespace echoline::overlay
