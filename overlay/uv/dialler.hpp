// Addresses of the peers that a node dials. Internal to overlay/uv; loop thread only.
#pragma once
#include <sys/socket.h>
#include <uv.h>

#include <functional>
#include <map>

#include "base/result.hpp"
#include "overlay/narrow_paths.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

// If a name has several addresses, dials use one of them until it does not lead to the expected peer, and then the next
// one. A turn is the number of such changes.
class AddressTurns {
 public:
  static constexpr std::size_t kNamesMax = 1024;

  // Returns the turn of this name; the address to use is the turn modulo the number of addresses.
  std::size_t turn_of(const std::string& name);
  // The address of this turn did not lead to the peer. Without effect for a numeric host, or if it is known already.
  void on_failed(const std::string& name, std::size_t turn);
  void check() const { ECHO_CHECK(turns_.size() <= kNamesMax, "{} names are remembered", turns_.size()); }

 private:
  std::map<std::string, std::size_t> turns_;
};

// The address of one dial.
struct FoundAddress {
  std::string failure;  // the reason why there is no address; empty: there is one
  sockaddr_storage address{};
  std::size_t turn = 0;  // of the name, for AddressTurns::on_failed()
};

class Dialler {
 public:
  using Use = std::function<void(const FoundAddress&)>;

  explicit Dialler(uv_loop_t& loop) : loop_(loop) {}
  // Calls `use` once: during this call for a numeric host, or after asking the name service.
  void find_address(const Endpoint& to, Use use);
  AddressTurns& turns() { return turns_; }
  NarrowPaths& narrow_paths() { return narrow_paths_; }
  void check() const { turns_.check(); }

 private:
  static constexpr std::size_t kAddressesMax = 16;  // tried per name
  struct Lookup;
  FoundAddress choose(const Endpoint& to, int status, const addrinfo* found);

  uv_loop_t& loop_;
  AddressTurns turns_;
  NarrowPaths narrow_paths_;
};

}  // namespace echoline::overlay
