// The cost, bid and assumed values of single offers under a plan's request. Private to provisioner/.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

// The cost per hour of an offer that receives every publication and sends `forwarded_copies` copies of each, on
// average.
OfferCost cost_of(const PlanRequest& request, const Offer& offer, double forwarded_copies);

// The offer's reliability, stated or assumed (fleet.assume); absent if there is neither.
std::optional<double> reliability_of(const PlanRequest& request, const Offer& offer);

// The keys of fleet.assume whose values replace values that the offer does not state.
std::vector<std::string> assumed_keys(const PlanRequest& request, const Offer& offer);

// The bid for the offer. Absent if the request does not bid, or if the offer states no least bid.
std::optional<double> bid_for(const PlanRequest& request, const Offer& offer);

}  // namespace echoline::provisioner
