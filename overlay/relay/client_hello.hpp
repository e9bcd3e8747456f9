// Reads the server name (SNI) of a TLS client's first message, without TLS itself. Used by the relay. Internal to
// overlay/.
#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "base/result.hpp"

namespace echoline::overlay::relay {

// Limit on a client's first message, with the headers of its records.
inline constexpr std::size_t kClientHelloBytesMax = 8192;

struct ClientHello {
  bool is_complete = false;  // false: more bytes are needed
  std::string server_name;   // in lower case; empty if the message has none
};

// `bytes`: all that the client has sent so far. kCorrupt: not a ClientHello. kExhausted: longer than
// kClientHelloBytesMax.
Result<ClientHello> read_client_hello(std::span<const std::byte> bytes);

}  // namespace echoline::overlay::relay
