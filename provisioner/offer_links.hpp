// The link rates of a rented machine, for plans, runs and simulations.
#pragma once
#include "provisioner/settings.hpp"

namespace echoline::provisioner {

struct OfferLinks {
  BitRate up, down;
};

// The offer's links or else fleet.assume's, limited to network.worker_rate. A link that neither states counts as 10
// Gbit/s, so that the learner's link limits each path; plans rent no offer with such a link (ineligibility_reason()).
inline OfferLinks links_of(const Offer& offer, const FleetSettings& fleet, const PathSettings& paths) {
  constexpr BitRate kUnstated{1e10};
  const auto link = [&](const std::optional<BitRate>& stated, const std::optional<BitRate>& assumed) {
    return paths.capped(stated ? *stated : assumed.value_or(kUnstated));
  };
  return {link(offer.up, fleet.assume.up), link(offer.down, fleet.assume.down)};
}

}  // namespace echoline::provisioner
