// Socket addresses as libuv and the system take them. Internal to overlay/uv.
#pragma once
#include <sys/socket.h>

#include <optional>

#include "overlay/types.hpp"

namespace echoline::overlay {

// Fills in a numeric IPv4 or IPv6 address. False if `host` is a name.
bool to_address(const std::string& host, int port, sockaddr_storage& address);
// An IPv4 peer of a dual-stack socket has its IPv4 address.
Endpoint to_endpoint(const sockaddr_storage& address);
socklen_t address_bytes(const sockaddr_storage& address);

}  // namespace echoline::overlay
