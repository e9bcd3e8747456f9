// Names and addresses of machines.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

// A numeric address of a host name; an address as it is. Waits for the name service. kInvalid when there is none.
Result<std::string> resolve(const std::string& host);

// Whether only processes of this machine reach a node that listens there.
bool is_loopback(const std::string& host);

// What one party may have many addresses of: an IPv4 address, or the first half of an IPv6 address.
std::string network_of(const std::string& host);

// Where a process of this machine reaches a node that listens there: on all addresses means also on loopback.
Endpoint reached_from_here(const Endpoint& bound);

// What others may dial to reach a node that listens there on this machine: the machine's name, if it leads to an
// address that is not loopback, and the addresses of its interfaces, where it listens on all of them; otherwise where
// it listens.
std::vector<Endpoint> reached_from_elsewhere(const Endpoint& bound);

// Where a worker listens that joins this learner: where it was told to; or else on all addresses, if it was told by
// which one others reach it; or else on loopback.
struct Listening {
  std::string host;
  bool leaf = false;  // there the learner's other workers cannot reach it
};
Listening listens_at(const std::string& told, bool advertised, const std::string& learner);

}  // namespace echoline::overlay
