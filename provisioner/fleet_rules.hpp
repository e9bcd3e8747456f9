// Makes the rules and the offers of the fleet's core from a plan. A run and a simulated run both take
// them from here.
#pragma once
#include "provisioner/fleet_core.hpp"
#include "provisioner/plan.hpp"

namespace echoline::provisioner {

FleetRules rules_of(const Plan& plan);

// `cost`: $/h as planned; a part that is not known counts as 0.
FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer, const OfferCost& cost);
// The same where the offer would forward each publication once.
FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer);

}  // namespace echoline::provisioner
