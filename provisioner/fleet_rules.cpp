// Converts a plan to the rules and offers of FleetCore.
#include "provisioner/fleet_rules.hpp"

#include "provisioner/eligibility.hpp"

namespace echoline::provisioner {

FleetRules fleet_rules_of(const Plan& plan) {
  const PlanRequest& request = plan.request;
  return {.pace = request.pace,
          .times = request.publication_times(plan.broadcast_time),
          .staleness_budget = request.staleness_budget,
          .payload = request.delta_bytes,
          .snapshot = request.full_bytes,
          .group_size = request.group_size,
          .fleet = request.fleet};
}

FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer, const OfferCost& cost) {
  FleetOffer converted{.id = offer.id,
                       .provider = offer.provider,
                       .host = offer.host,
                       .rollouts_per_s = offer.rollouts_per_s,
                       .usd_per_hour = cost.gpu.value_or(0) + cost.storage.value_or(0),
                       .traffic_usd_per_hour = cost.bandwidth.value_or(0),
                       .owner = offer.owner};
  converted.upload_usd_per_gb = offer.upload_usd_per_gb.value_or(request.fleet.assume.upload_usd_per_gb.value_or(0));
  converted.download_usd_per_gb =
      offer.download_usd_per_gb.value_or(request.fleet.assume.download_usd_per_gb.value_or(0));
  // The default of `gpus`, all of them: the offer is never rented together with another one of its host.
  if (offer.gpu_ids.empty()) return converted;
  // A set of GPUs has 64 bits. On a larger machine, two GPUs may share a bit, so that their offers exclude each other.
  constexpr int kGpuBits = 64;
  converted.gpus = 0;
  for (const int gpu : offer.gpu_ids) converted.gpus |= std::uint64_t{1} << (gpu % kGpuBits);
  return converted;
}

FleetOffer fleet_offer(const PlanRequest& request, const Offer& offer) {
  constexpr double kForwardedCopies = 1;
  return fleet_offer(request, offer, cost_of(request, offer, kForwardedCopies));
}

}  // namespace echoline::provisioner
