// Searches vast.ai's market. Needs no key.
#pragma once
#include <atomic>
#include <string>

#include "provisioner/plan.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {

struct VastSearch {
  std::string url = kVastUrl;
  Bytes disk{};  // of a worker; the service includes it in its prices
  std::size_t offers_max = 2000;
  Duration timeout = std::chrono::seconds(30);
  Duration pause = std::chrono::seconds(6);  // between tries: ten searches a minute are allowed
  int tries = 3;
  const std::atomic<bool>* stop = nullptr;  // true: the reply is not needed any more
};

// The body of the search. It asks only for offers that `request` would not refuse.
std::string vast_search_body(const VastSearch& search, const PlanRequest& request);

// The reply, for parse_offers(). Blocks. kUnavailable if all tries failed.
Result<std::string> search_vast(const VastSearch& search, const PlanRequest& request);

}  // namespace echoline::provisioner
