// Asks vast.ai what can be rented. Needs no key.
#pragma once
#include <atomic>
#include <string>

#include "provisioner/plan.hpp"
#include "provisioner/providers/vast.hpp"

namespace echoline::provisioner {

struct VastSearch {
  std::string url = kVastUrl;
  Bytes disk{};  // that a worker will rent: prices are stated for it
  std::size_t offers_max = 2000;
  Duration timeout = std::chrono::seconds(30);
  Duration pause = std::chrono::seconds(6);  // before it is asked again: ten searches a minute are allowed
  int tries = 3;
  const std::atomic<bool>* stop = nullptr;  // nobody waits for the reply any more
};

// What is asked for: what the request would refuse is left out by the market already.
std::string vast_search_body(const VastSearch& search, const PlanRequest& request);

// The reply, to be read with parse_offers(). Waits for it. kUnavailable when none came, or none but errors.
Result<std::string> search_vast(const VastSearch& search, const PlanRequest& request);

}  // namespace echoline::provisioner
