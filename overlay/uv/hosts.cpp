// Names and addresses of machines, by the system's resolver and interface list. Called by nodes, learners and the CLI.
#include "overlay/uv/hosts.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>
#include <uv.h>

#include <algorithm>
#include <memory>

namespace echoline::overlay {
namespace {

bool is_numeric(const std::string& host) {
  sockaddr_in v4;
  sockaddr_in6 v6;
  return uv_ip4_addr(host.c_str(), 0, &v4) == 0 || uv_ip6_addr(host.c_str(), 0, &v6) == 0;
}

constexpr std::string_view kLinkLocalPrefix = "fe80:";  // such addresses are valid only on their own link

bool is_all_addresses(const std::string& host) { return host.empty() || host == "0.0.0.0" || host == "::"; }

std::string text_of(const sockaddr* address) {
  char host[64] = "";
  if (address->sa_family == AF_INET6)
    uv_ip6_name(reinterpret_cast<const sockaddr_in6*>(address), host, sizeof host);
  else
    uv_ip4_name(reinterpret_cast<const sockaddr_in*>(address), host, sizeof host);
  return host;
}

Result<std::vector<std::string>> look_up(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(name.c_str(), nullptr, &hints, &found); error != 0)
    return fail(Code::kInvalid, "look up host", "'{}': {}", name, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  std::vector<std::string> hosts;
  for (const addrinfo* candidate = found; candidate; candidate = candidate->ai_next)
    if (candidate->ai_family == AF_INET || candidate->ai_family == AF_INET6)
      hosts.push_back(text_of(candidate->ai_addr));
  if (hosts.empty()) return fail(Code::kInvalid, "look up host", "'{}' has no address", name);
  return hosts;
}

}  // namespace

bool is_loopback(const std::string& host) { return host == "localhost" || host.starts_with("127.") || host == "::1"; }

Result<std::string> resolve(const std::string& host) {
  if (is_numeric(host)) return host;
  ECHO_ASSIGN(const std::vector<std::string> hosts, look_up(host));
  return hosts.front();
}

Result<Endpoint> parse_endpoint(std::string_view what, const std::string& text) {
  constexpr unsigned kPortMax = 65535, kInvalidPort = kPortMax + 1;
  const std::size_t colon = text.rfind(':');
  unsigned port = 0;  // kInvalidPort after a wrong character or a number above kPortMax
  if (colon != std::string::npos && colon > 0)
    for (const char c : text.substr(colon + 1)) {
      const bool is_digit = c >= '0' && c <= '9';
      port = is_digit && port <= kPortMax ? port * 10 + unsigned(c - '0') : kInvalidPort;
    }
  if (port == 0 || port > kPortMax)
    return fail(Code::kInvalid, what, "expected HOST:PORT such as 127.0.0.1:7070 or [::1]:7070, found '{}'", text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return Endpoint{std::move(host), static_cast<std::uint16_t>(port)};
}

std::string network_of(const std::string& host) {
  sockaddr_in6 v6;
  if (uv_ip6_addr(host.c_str(), 0, &v6) != 0) return host;
  // Keeps the first 8 of the 16 bytes.
  std::fill(std::begin(v6.sin6_addr.s6_addr) + 8, std::end(v6.sin6_addr.s6_addr), std::uint8_t{0});
  return text_of(reinterpret_cast<const sockaddr*>(&v6));
}

Listening listening_for(const std::string& bind_host, bool advertised, const std::string& learner) {
  const std::string host = !bind_host.empty() ? bind_host : advertised ? "::" : "127.0.0.1";
  return {host, is_loopback(host) && !is_loopback(learner)};
}

Endpoint local_endpoint_of(const Endpoint& bound) {
  return {is_all_addresses(bound.host) ? "127.0.0.1" : bound.host, bound.port};
}

std::vector<Endpoint> remote_endpoints_of(const Endpoint& bound) {
  if (!is_all_addresses(bound.host)) return {bound};
  std::vector<Endpoint> all;
  char name[256] = "";
  if (::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0') {
    const auto hosts = look_up(name);
    if (hosts && !std::any_of(hosts->begin(), hosts->end(), is_loopback)) all.push_back({name, bound.port});
  }
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return all;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  for (const ifaddrs* interface = list; interface; interface = interface->ifa_next) {
    const bool is_up = (interface->ifa_flags & IFF_UP) != 0;
    const bool is_loopback_interface = (interface->ifa_flags & IFF_LOOPBACK) != 0;
    if (!is_up || is_loopback_interface || !interface->ifa_addr) continue;
    const int family = interface->ifa_addr->sa_family;
    if (family != AF_INET && (family != AF_INET6 || bound.host == "0.0.0.0")) continue;
    const std::string host = text_of(interface->ifa_addr);
    if (!host.starts_with(kLinkLocalPrefix)) all.push_back({host, bound.port});
  }
  return all;
}

}  // namespace echoline::overlay
