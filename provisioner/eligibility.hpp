// What an offer costs under a plan, and why it cannot be rented at all. Private to provisioner/.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

// $/h of an offer that receives every publication and sends `copies` of it.
OfferCost cost_of(const PlanRequest& request, const Offer& offer, double copies);

// Assumed where not stated; absent where nothing is assumed either.
std::optional<double> reliability_of(const PlanRequest& request, const Offer& offer);

// What the plan assumes of it, as keys of fleet.assume.
std::vector<std::string> assumed_of(const PlanRequest& request, const Offer& offer);

// The bid for it under the request; absent on demand, or where no least bid is stated.
std::optional<double> bid_for(const PlanRequest& request, const Offer& offer);

}  // namespace echoline::provisioner
