// Converts endpoints to socket addresses and back.
#include "overlay/uv/address.hpp"

#include <uv.h>

namespace echoline::overlay {

bool to_address(const std::string& host, int port, sockaddr_storage& address) {
  return uv_ip4_addr(host.c_str(), port, reinterpret_cast<sockaddr_in*>(&address)) == 0 ||
         uv_ip6_addr(host.c_str(), port, reinterpret_cast<sockaddr_in6*>(&address)) == 0;
}

Endpoint to_endpoint(const sockaddr_storage& address) {
  char host[64] = "";
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    uv_ip6_name(v6, host, sizeof host);
    constexpr std::string_view kMapped = "::ffff:";
    const std::string_view text(host);
    if (text.starts_with(kMapped) && text.find('.') != text.npos)
      return {std::string(text.substr(kMapped.size())), ntohs(v6->sin6_port)};
    return {host, ntohs(v6->sin6_port)};
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
  uv_ip4_name(v4, host, sizeof host);
  return {host, ntohs(v4->sin_port)};
}

socklen_t address_bytes(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

}  // namespace echoline::overlay
