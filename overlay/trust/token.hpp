// Join tokens: single-use secrets with which rented machines enrol as workers.
//
// A token names the run's authority, so that the worker shows it to the right learner only, and the instance it was
// made for. The caller keeps the list of used nonces. No error message contains a token or a part of one.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "base/units.hpp"
#include "overlay/trust/authority.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::overlay::trust {

inline constexpr std::size_t kInstanceBytesMax = 128;
inline constexpr Duration kTokenLifetime = std::chrono::minutes(10);

using Nonce = std::array<std::byte, 16>;
// Made by the system's random source.
Nonce random_nonce();

struct JoinToken {
  Hash authority{};  // fingerprint
  Nonce nonce{};
  std::uint64_t expires_unix_s = 0;
  std::string instance;  // the rented instance: 1 to 128 printable ASCII characters
  std::string host{};    // its address for other workers, in the same form; empty: the connection's source address
  friend bool operator==(const JoinToken&, const JoinToken&) = default;
};

// Returns "echo1." and base64url of the fields and the run key's signature over them. kInvalid: instance, host or time
// out of range.
Result<Secret> issue_token(const Authority& authority, std::string_view instance, const Nonce& nonce, double now_unix_s,
                           Duration lifetime = kTokenLifetime, std::string_view host = {});

// For a worker: checks only the form, because the check of the signature needs the learner's key. kCorrupt: not a
// token's form.
Result<JoinToken> read_token(const Secret& text);

// For the learner. kCorrupt: not a token of this authority. kInvalid: for another instance. kStale: expired.
Result<JoinToken> check_token(const Secret& text, const Authority& authority, double now_unix_s,
                              std::string_view instance);

}  // namespace echoline::overlay::trust
