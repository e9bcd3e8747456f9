// The bytes between a relay and a learner (FORMAT.md beside this file). Pure; used by both ends. Internal to overlay/.
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "overlay/trust/hash.hpp"
#include "overlay/trust/secret.hpp"
#include "overlay/trust/signature.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay::relay {

inline constexpr std::size_t kKeyBytesMin = 32;
// A relay's key is a text of at least kKeyBytesMin characters; kInvalid.
Status check_key(const trust::Secret& key);

// The name under which a relay knows a run: the server name that its workers send. `fingerprint`: of its authority.
std::string run_name(const trust::Hash& fingerprint);
inline constexpr std::string_view kNameEnd = ".echoline";  // of every run's name

using Nonce = std::array<std::byte, 32>;
using Mac = std::array<std::byte, 32>;     // HMAC-SHA256
using Ticket = std::array<std::byte, 16>;  // names one waiting client; used once
Nonce random_nonce();
Ticket random_ticket();

// ---- the first bytes of a learner's connection ----

inline constexpr std::string_view kMagic = "ECHORLY1";  // its first byte differs from that of a TLS client
inline constexpr std::size_t kGreetingBytesMax = 57;

struct Greeting {
  enum class Kind { kIncomplete, kControl, kTicket } kind = Kind::kIncomplete;
  Nonce nonce{};    // of kControl
  Ticket ticket{};  // of kTicket
  Mac proof{};      // of kTicket: that the learner was given the ticket
};
std::string control_greeting(const Nonce& learner);
std::string ticket_greeting(const Ticket& ticket, const Mac& proof);
// kCorrupt: not a greeting of this version.
Result<Greeting> read_greeting(std::string_view bytes);

// ---- the handshake of a control connection ----

// A learner answers the relay's nonce with its run's public key, a MAC by the relay's key, and a signature by the run's
// key. The MAC shows that it may use the relay, the signature that the run is its own.
inline constexpr std::size_t kAnswerBytes = 32 + 32 + 64;
std::string answer(const trust::Secret& relay_key, const trust::SigningKey& run_key, const Nonce& learner,
                   const Nonce& relay);
// Returns the run's public key. kInvalid: another relay key, or not the run's key.
Result<trust::PublicKey> check_answer(std::string_view bytes, const trust::Secret& relay_key, const Nonce& learner,
                                      const Nonce& relay);
// The key of the frames that follow. An observer of the connection does not know it.
Mac session_key(const trust::Secret& relay_key, const Nonce& learner, const Nonce& relay, const trust::PublicKey& run);
Mac ticket_proof(const Mac& session, const Ticket& ticket);
bool equal(const Mac& a, const Mac& b);  // in constant time

// ---- frames ----

struct ControlFrame {
  enum class Type : unsigned char {
    kAccepted = 1,  // from the relay: the run is registered
    kRefused = 2,   // from the relay: the reason as text
    kOpen = 3,      // from the relay: a ticket, and the client's address as text
    kPing = 4,      // from the learner
    kPong = 5,      // from the relay
  } type{};
  std::string body;
};

// The frames of one control connection, in both directions. Each carries a MAC over its direction, its number, type and
// body, so that a frame can be neither forged nor repeated.
class ControlFrames {
 public:
  enum class End : unsigned char { kLearner = 0, kRelay = 1 };
  static constexpr std::size_t kBodyBytesMax = 512;

  ControlFrames(const Mac& session, End own) : session_(session), own_(own) {}
  std::string seal(ControlFrame::Type type, std::string_view body = {});
  void feed(std::string_view bytes) { received_ += bytes; }
  // The next whole frame; absent: more bytes are needed. kCorrupt: too long, unknown or forged.
  Result<std::optional<ControlFrame>> take();
  const Mac& session() const { return session_; }

 private:
  std::string mac(End from, std::uint64_t number, ControlFrame::Type type, std::string_view body) const;

  Mac session_;
  End own_;
  std::uint64_t sealed_ = 0, taken_ = 0;
  std::string received_;  // at most one read beyond a frame
};

inline constexpr Duration kPingEvery = std::chrono::seconds(10);
inline constexpr Duration kSilenceMax = std::chrono::seconds(30);  // without a frame of the other end

// The relay of a learner, and the learner's keys.
struct LinkOptions {
  Endpoint relay;
  trust::Secret key;
  trust::SigningKey run_key;
};

}  // namespace echoline::overlay::relay
