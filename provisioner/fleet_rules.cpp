// Converts a plan to the rules and offers of FleetCore.
#include "provisioner/fleet_rules.hpp"

#include "provisioner/eligibility.hpp"

namespace echoline::provisioner {

FleetRules rules_of(const Plan& plan) {
  const PlanRequest& request = plan.request;
  return {request.pace,       plan.broadcast_time, request.delta_bytes,
          request.full_bytes, request.group_size,  request.fleet};
}

FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer, const OfferCost& cost) {
  FleetOffer lot{offer.id,
                 offer.provider,
                 offer.host,
                 offer.rollouts_per_s,
                 cost.gpu.value_or(0) + cost.storage.value_or(0),
                 cost.bandwidth.value_or(0)};
  lot.owner = offer.owner;
  lot.upload_usd_per_gb = offer.upload_usd_per_gb.value_or(request.fleet.assume.upload_usd_per_gb.value_or(0));
  lot.download_usd_per_gb = offer.download_usd_per_gb.value_or(request.fleet.assume.download_usd_per_gb.value_or(0));
  if (offer.gpu_ids.empty()) return lot;
  lot.gpus = 0;
  for (const int gpu : offer.gpu_ids) lot.gpus |= std::uint64_t{1} << (gpu % 64);
  return lot;
}

FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer) {
  return fleet_offer(request, offer, cost_of(request, offer, 1));
}

}  // namespace echoline::provisioner
