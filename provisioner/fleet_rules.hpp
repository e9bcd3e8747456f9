// Makes the fleet core's rules and offers from a plan, for runs and simulated runs.
#pragma once
#include "provisioner/fleet_core.hpp"
#include "provisioner/plan.hpp"

namespace echoline::provisioner {

FleetRules fleet_rules_of(const Plan& plan);

// `cost`: as planned; its unknown parts count as 0.
FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer, const OfferCost& cost);
// The same with the cost of a worker that forwards each publication once.
FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer);

}  // namespace echoline::provisioner
