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

// If a name has several addresses, one is used until it does not lead to the expected peer; then the next.
class AddressTurns {
 public:
  static constexpr std::size_t kNamesMax = 1024;

  // The number of the address to use now, counted on beyond the last address.
  std::size_t of(const std::string& name);
  // The address of this turn did not lead to the peer. Without effect for a numeric host, or if it is known already.
  void failed(const std::string& name, std::size_t turn);
  void check() const { ECHO_CHECK(turns_.size() <= kNamesMax, "{} names are remembered", turns_.size()); }

 private:
  std::map<std::string, std::size_t> turns_;
};

// The address of one dial; not ok: there is none.
struct FoundAddress {
  std::string failure;
  sockaddr_storage address{};
  std::size_t turn = 0;
};

class Dialler {
 public:
  using Use = std::function<void(const FoundAddress&)>;

  explicit Dialler(uv_loop_t& loop) : loop_(loop) {}
  // Calls `use` once: during this call for a numeric host, or after asking the name service.
  void find(const Endpoint& to, Use use);
  AddressTurns& turns() { return turns_; }
  NarrowPaths& narrow() { return narrow_; }
  void check() const { turns_.check(); }

 private:
  static constexpr std::size_t kAddressesMax = 16;  // tried per name
  struct Lookup;
  FoundAddress choose(const Endpoint& to, int status, const addrinfo* found);

  uv_loop_t& loop_;
  AddressTurns turns_;
  NarrowPaths narrow_;
};

}  // namespace echoline::overlay
