// Join tokens: the single-use secret with which a rented machine enrols as a worker.
//
// A token names the run's authority, so that the worker knows whom it may show the token to, and the instance it was
// made for. Which nonces have been used is kept by the caller. No error message contains a token or a part of one.
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
// From the system's random source.
Nonce random_nonce();

struct JoinToken {
  Hash authority{};  // fingerprint
  Nonce nonce{};
  std::uint64_t expires_unix_s = 0;
  std::string instance;  // 1 to 128 printable ASCII characters: the rented instance
  std::string host{};    // where others reach it, likewise; empty: where it comes from
  friend bool operator==(const JoinToken&, const JoinToken&) = default;
};

// "echo1." and base64url of the fields and the run key's signature over them. kInvalid: instance, host or time out of
// range.
Result<Secret> issue_token(const Authority& authority, std::string_view instance, const Nonce& nonce, double now_unix_s,
                           Duration lifetime = kTokenLifetime, std::string_view host = {});

// What a worker does with its token: nothing but the form is checked, for only the learner's key could tell more.
// kCorrupt.
Result<JoinToken> read_token(const Secret& text);

// What the learner does. kCorrupt: not a token of this authority; kInvalid: for another instance; kStale: expired.
Result<JoinToken> check_token(const Secret& text, const Authority& authority, double now_unix_s,
                              std::string_view instance);

}  // namespace echoline::overlay::trust
