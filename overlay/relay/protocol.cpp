// Encodes and checks the messages between relay and learner. Called by relay.cpp and relay_link.cpp.
#include "overlay/relay/protocol.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstring>

#include "overlay/trust/authority.hpp"
#include "overlay/wire/bytes.hpp"

namespace echoline::overlay::relay {
namespace {

constexpr std::string_view kOperation = "relay";
constexpr char kControlKind = 'C', kTicketKind = 'T';
constexpr std::size_t kFrameHeaderBytes = 3;  // body length 2, type 1
constexpr std::size_t kFrameMacBytes = 16;
constexpr std::string_view kSignatureContext = "relay";

Mac hmac(std::string_view key, std::string_view purpose, std::string_view bytes) {
  std::string text = fmt::format("echoline relay {}", purpose);
  text.push_back('\0');
  text += bytes;
  Mac mac;
  unsigned size = 0;
  ECHO_CHECK(::HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                    reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                    reinterpret_cast<unsigned char*>(mac.data()), &size) != nullptr &&
             size == mac.size());
  return mac;
}

template <class Array>
Array random_array() {
  Array bytes;
  ECHO_CHECK(::RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) == 1,
             "the system has no random bytes");
  return bytes;
}

// Copies the next bytes of `from` into the array, and removes them there.
template <class Array>
void take(std::string_view& from, Array& to) {
  std::memcpy(to.data(), from.data(), to.size());
  from.remove_prefix(to.size());
}

std::string answer_text(const Nonce& learner, const Nonce& relay, const trust::PublicKey& run) {
  return bytes_as_string(learner) + bytes_as_string(relay) + bytes_as_string(run.bytes);
}

std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

Status check_key(const trust::Secret& key) {
  if (key.reveal().size() < kKeyBytesMin)
    return fail(Code::kInvalid, kOperation,
                "expected a relay key of at least {} characters, found {}: `openssl rand -hex 32` makes one; the relay "
                "reads it with --key-file, the learner with network.relay_key_file or ECHOLINE_RELAY_KEY",
                kKeyBytesMin, key.reveal().size());
  return ok();
}

std::string run_name(const trust::Hash& fingerprint) {
  constexpr std::size_t kDigits = 32;  // a label of a name has at most 63
  return trust::to_hex(fingerprint).substr(0, kDigits) + std::string(kNameEnd);
}

Nonce random_nonce() { return random_array<Nonce>(); }
Ticket random_ticket() { return random_array<Ticket>(); }

std::string control_greeting(const Nonce& learner) {
  return std::string(kMagic) + kControlKind + bytes_as_string(learner);
}

std::string ticket_greeting(const Ticket& ticket, const Mac& proof) {
  return std::string(kMagic) + kTicketKind + bytes_as_string(ticket) + bytes_as_string(proof);
}

Result<Greeting> read_greeting(std::string_view bytes) {
  Greeting greeting;
  const std::string_view magic = bytes.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size()))
    return fail(Code::kCorrupt, kOperation, "expected a TLS client or a learner of this version, found other bytes");
  if (bytes.size() <= kMagic.size()) return greeting;
  const char kind = bytes[kMagic.size()];
  if (kind != kControlKind && kind != kTicketKind)
    return fail(Code::kCorrupt, kOperation, "expected a control connection or a ticket, found kind {}",
                static_cast<int>(static_cast<unsigned char>(kind)));
  bytes.remove_prefix(kMagic.size() + 1);
  const bool is_control = kind == kControlKind;
  const std::size_t expected = is_control ? greeting.nonce.size() : greeting.ticket.size() + greeting.proof.size();
  if (bytes.size() < expected) return greeting;
  if (bytes.size() > expected)
    return fail(Code::kCorrupt, kOperation, "expected {} bytes before an answer, found {}", expected, bytes.size());
  greeting.kind = is_control ? Greeting::Kind::kControl : Greeting::Kind::kTicket;
  if (is_control) {
    take(bytes, greeting.nonce);
  } else {
    take(bytes, greeting.ticket);
    take(bytes, greeting.proof);
  }
  return greeting;
}

std::string answer(const trust::Secret& relay_key, const trust::SigningKey& run_key, const Nonce& learner,
                   const Nonce& relay) {
  const std::string text = answer_text(learner, relay, run_key.public_key());
  const Mac mac = hmac(relay_key.reveal(), "learner", text);
  const trust::Signature signature = run_key.sign(kSignatureContext, as_bytes(text));
  return bytes_as_string(run_key.public_key().bytes) + bytes_as_string(mac) + bytes_as_string(signature.bytes);
}

Result<trust::PublicKey> check_answer(std::string_view bytes, const trust::Secret& relay_key, const Nonce& learner,
                                      const Nonce& relay) {
  if (bytes.size() != kAnswerBytes)
    return fail(Code::kCorrupt, kOperation, "expected an answer of {} bytes, found {}", kAnswerBytes, bytes.size());
  trust::PublicKey run;
  Mac mac;
  trust::Signature signature;
  take(bytes, run.bytes);
  take(bytes, mac);
  take(bytes, signature.bytes);
  const std::string text = answer_text(learner, relay, run);
  if (!equal(mac, hmac(relay_key.reveal(), "learner", text)))
    return fail(Code::kInvalid, kOperation, "the learner has another relay key");
  if (!trust::verify(run, kSignatureContext, as_bytes(text), signature))
    return fail(Code::kInvalid, kOperation, "the learner does not hold the key of the run that it names");
  return run;
}

Mac session_key(const trust::Secret& relay_key, const Nonce& learner, const Nonce& relay, const trust::PublicKey& run) {
  return hmac(relay_key.reveal(), "session", answer_text(learner, relay, run));
}

Mac ticket_proof(const Mac& session, const Ticket& ticket) {
  return hmac(bytes_as_string(session), "ticket", bytes_as_string(ticket));
}

bool equal(const Mac& a, const Mac& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

std::string ControlFrames::mac(End from, std::uint64_t number, ControlFrame::Type type, std::string_view body) const {
  std::array<std::byte, 10> head{};
  head[0] = static_cast<std::byte>(from);
  head[1] = static_cast<std::byte>(type);
  put_le(head.data() + 2, number);
  return bytes_as_string(hmac(bytes_as_string(session_), "frame", bytes_as_string(head) + std::string(body)))
      .substr(0, kFrameMacBytes);
}

std::string ControlFrames::seal(ControlFrame::Type type, std::string_view body) {
  ECHO_CHECK(body.size() <= kBodyBytesMax, "a frame of {} bytes", body.size());
  std::array<std::byte, kFrameHeaderBytes> header{};
  put_le(header.data(), static_cast<std::uint16_t>(body.size()));
  header[2] = static_cast<std::byte>(type);
  return bytes_as_string(header) + std::string(body) + mac(own_, sealed_++, type, body);
}

Result<std::optional<ControlFrame>> ControlFrames::take() {
  std::optional<ControlFrame> frame;
  if (received_.size() < kFrameHeaderBytes) return frame;
  const std::size_t body_bytes = get_le<std::uint16_t>(reinterpret_cast<const std::byte*>(received_.data()));
  const auto type = static_cast<ControlFrame::Type>(received_[2]);
  if (body_bytes > kBodyBytesMax || type < ControlFrame::Type::kAccepted || type > ControlFrame::Type::kPong)
    return fail(Code::kCorrupt, kOperation, "expected a frame of at most {} bytes, found {} of type {}", kBodyBytesMax,
                body_bytes, static_cast<int>(type));
  const std::size_t frame_bytes = kFrameHeaderBytes + body_bytes + kFrameMacBytes;
  if (received_.size() < frame_bytes) return frame;
  frame = ControlFrame{.type = type, .body = received_.substr(kFrameHeaderBytes, body_bytes)};
  const End other = own_ == End::kLearner ? End::kRelay : End::kLearner;
  const std::string expected = mac(other, taken_++, type, frame->body);
  if (CRYPTO_memcmp(expected.data(), received_.data() + kFrameHeaderBytes + body_bytes, kFrameMacBytes) != 0)
    return fail(Code::kCorrupt, kOperation,
                "a frame's MAC is wrong: the other end has another relay key, or its bytes "
                "were changed on the way");
  received_.erase(0, frame_bytes);
  return frame;
}

}  // namespace echoline::overlay::relay
