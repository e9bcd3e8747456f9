// Fuzz target: bytes as a stranger's input (to a server, a client, an established session), as a certificate, and as a
// join token. The first byte chooses. The reader may refuse all input, must not crash, and must not accept an identity.
#include "overlay/trust/token.hpp"
#include "tests/overlay/fixed_random.hpp"
#include "tests/overlay/tls_pair.hpp"

using namespace echoline;
using namespace echoline::overlay;

namespace {

// Pieces of the size given by the first byte.
std::optional<Error> deliver(std::span<const std::byte> bytes, TlsSession& session) {
  if (bytes.empty()) return std::nullopt;
  TlsReading reading;
  tls_deliver(bytes.subspan(1), session, reading, std::to_integer<std::size_t>(bytes[0]) + 1);
  ECHO_CHECK(reading.bytes.empty(), "strangers are not heard");
  return reading.error;
}

void as_server(std::span<const std::byte> bytes) {
  static const TlsContext context = *TlsContext::create(tls_node(tls_authority(), WorkerId{1}));
  TlsSession session = *TlsSession::server(context, TlsSession::PeerCertificate::kRequired, kTlsNow);
  deliver(bytes, session);
  ECHO_CHECK(!session.established() && session.identity() == trust::PeerIdentity{});
}

void as_client(std::span<const std::byte> bytes) {
  static const TlsContext context = *TlsContext::create({.authority = tls_authority().fingerprint()});
  TlsSession session = TlsSession::client(context, kLearnerId, kTlsNow);
  deliver(bytes, session);
  ECHO_CHECK(!session.established() && session.authority().empty());
}

void as_established(std::span<const std::byte> bytes) {
  static const Credentials client = tls_node(tls_authority(), WorkerId{1}),
                           server = tls_node(tls_authority(), WorkerId{2});
  TlsPair pair = tls_pair(client, WorkerId{2}, server);
  pair.settle();
  const std::optional<Error> error = deliver(bytes, pair.server);
  ECHO_CHECK(!error || error->code == Code::kCorrupt, "{}", error->message());
}

void as_certificate(std::span<const std::byte> bytes) {
  static const trust::Authority authority = tls_authority();
  static const trust::PeerIdentity issued =
      *trust::check_certificate(tls_node(authority, WorkerId{1}).own->certificate, authority.public_key(), "run", {});
  const auto identity = trust::check_certificate(bytes, authority.public_key(), "run", kTlsNow);
  // The corpus has one good certificate, which may be encoded in other ways.
  ECHO_CHECK(!identity || *identity == issued);
  (void)trust::read_authority(bytes).has_value();
}

void as_token(std::span<const std::byte> bytes) {
  static const trust::Authority authority = tls_authority();
  static const trust::Secret issued = *trust::issue_token(authority, "vast-7", trust::Nonce{}, kTlsNow);
  const trust::Secret text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  const auto read = trust::read_token(text);
  const auto checked = trust::check_token(text, authority, kTlsNow, "vast-7");
  ECHO_CHECK(!checked || (text == issued && read && *read == *checked));
  // No error repeats a part of the token. No word of the error messages is this long.
  const std::string_view part = text.reveal().substr(std::min<std::size_t>(6, text.reveal().size()), 12);
  for (const auto& result : {read, checked})
    ECHO_CHECK(result || part.size() < 12 || part.find(' ') != std::string_view::npos ||
               result.error().message().find(part) == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  const FixedRandom random(1);
  switch (data[0] % 5) {
    case 0:
      as_server(bytes);
      break;
    case 1:
      as_client(bytes);
      break;
    case 2:
      as_established(bytes);
      break;
    case 3:
      as_certificate(bytes);
      break;
    case 4:
      as_token(bytes);
      break;
  }
  return 0;
}
