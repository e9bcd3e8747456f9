// Searches vast.ai's market. Needs no key.
#pragma once
#include <atomic>
#include <string>

#include "provisioner/plan.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {

struct VastSearch {
  std::string url = kVastUrl;
  Bytes disk{};  // a worker's disk: prices include it
  std::size_t offers_max = 2000;
  Duration timeout = std::chrono::seconds(30);
  Duration pause = std::chrono::seconds(6);  // between tries: ten searches a minute are allowed
  int tries = 3;
  const std::atomic<bool>* stop = nullptr;  // set when the reply is not needed any more
};

// The body of the search; it excludes offers that the request would refuse.
std::string vast_search_body(const VastSearch& search, const PlanRequest& request);

// The reply, for parse_offers(). Blocks. kUnavailable if all tries failed.
Result<std::string> search_vast(const VastSearch& search, const PlanRequest& request);

}  // namespace echoline::provisioner
