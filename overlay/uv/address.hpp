// Socket addresses as libuv and the system take them. Internal to overlay/uv.
#pragma once
#include <sys/socket.h>

#include <optional>

#include "overlay/types.hpp"

namespace echoline::overlay {

// Fills in a numeric IPv4 or IPv6 address. False if `host` is a name.
bool to_address(const std::string& host, int port, sockaddr_storage& address);
// The endpoint of an IPv4 peer of a dual-stack socket has the IPv4 address, not the IPv6 address that stands for it.
Endpoint to_endpoint(const sockaddr_storage& address);
socklen_t address_bytes(const sockaddr_storage& address);

}  // namespace echoline::overlay
