// Names and addresses of machines.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

// Resolves a host name to a numeric address; an address stays as it is. Waits for the name service. kInvalid if there
// is none.
Result<std::string> resolve(const std::string& host);

// Reads "HOST:PORT"; `what` names the option in the error, kInvalid.
Result<Endpoint> parse_endpoint(std::string_view what, const std::string& text);

// Whether only processes of this machine can reach a node that listens on `host`.
bool is_loopback(const std::string& host);

// The network that one party may control as a whole: an IPv4 address, or the first half of an IPv6 address.
std::string network_of(const std::string& host);

// The endpoint at which processes of this machine reach a node bound to `bound`: loopback if it listens on all
// addresses.
Endpoint local_endpoint_of(const Endpoint& bound);

// Endpoints at which other machines may reach a node bound to `bound` on this machine. If it listens on all addresses:
// the machine's name, unless that resolves to loopback, and the addresses of its interfaces. Otherwise `bound` itself.
std::vector<Endpoint> remote_endpoints_of(const Endpoint& bound);

struct Listening {
  std::string host;
  bool leaf = false;  // the learner's other workers cannot reach it, so it will not forward
};
// The listening host of a worker that joins `learner`: `bind_host` if given; all addresses if the worker advertises
// one; otherwise loopback.
Listening listening_for(const std::string& bind_host, bool advertised, const std::string& learner);

}  // namespace echoline::overlay
