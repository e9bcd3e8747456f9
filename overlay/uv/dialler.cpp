// Looks up addresses with libuv and remembers which one to use. Called by the driver.
#include "overlay/uv/dialler.hpp"

#include <netinet/in.h>

#include <cstring>
#include <memory>

#include "overlay/uv/address.hpp"

namespace echoline::overlay {

std::size_t AddressTurns::turn_of(const std::string& name) {
  if (turns_.size() >= kNamesMax) turns_.clear();  // all names begin with their first address again
  return turns_[name];
}

void AddressTurns::on_failed(const std::string& name, std::size_t turn) {
  if (const auto it = turns_.find(name); it != turns_.end() && it->second == turn) ++it->second;
}

struct Dialler::Lookup {
  uv_getaddrinfo_t request{};
  Dialler* dialler = nullptr;
  Endpoint to;
  Use use;
};

void Dialler::find_address(const Endpoint& to, Use use) {
  FoundAddress numeric;
  if (to_address(to.host, to.port, numeric.address)) return use(numeric);
  auto lookup = std::make_unique<Lookup>();
  lookup->dialler = this;
  lookup->to = to;
  lookup->use = std::move(use);
  lookup->request.data = lookup.get();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int error = uv_getaddrinfo(
      &loop_, &lookup->request,
      [](uv_getaddrinfo_t* request, int status, addrinfo* found) {
        const std::unique_ptr<Lookup> done(static_cast<Lookup*>(request->data));
        done->use(done->dialler->choose(done->to, status, found));
        uv_freeaddrinfo(found);
      },
      to.host.c_str(), nullptr, &hints);
  if (error == 0)
    (void)lookup.release();  // the callback deletes it
  else
    lookup->use(choose(to, error, /*found=*/nullptr));
}

FoundAddress Dialler::choose(const Endpoint& to, int status, const addrinfo* found) {
  std::vector<sockaddr_storage> addresses;
  for (const addrinfo* candidate = found; candidate && addresses.size() < kAddressesMax;
       candidate = candidate->ai_next) {
    if (candidate->ai_family != AF_INET && candidate->ai_family != AF_INET6) continue;
    sockaddr_storage address{};
    std::memcpy(&address, candidate->ai_addr, candidate->ai_addrlen);
    (candidate->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                      : reinterpret_cast<sockaddr_in*>(&address)->sin_port) = htons(to.port);
    addresses.push_back(address);
  }
  if (addresses.empty())
    return {.failure = fmt::format("{}: {}", to.host, status != 0 ? uv_strerror(status) : "it has no address"),
            .address = {},
            .turn = 0};
  const std::size_t turn = turns_.turn_of(to.host);
  return {.failure = {}, .address = addresses[turn % addresses.size()], .turn = turn};
}

}  // namespace echoline::overlay
