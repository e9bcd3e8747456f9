// The links of a rented machine, for plans, runs and simulations.
#pragma once
#include "provisioner/settings.hpp"

namespace echoline::provisioner {

struct OfferLinks {
  BitRate up, down;
};

// As the offer states them, else as fleet.assume says, at most network.worker_rate. Where neither says it a link counts
// as 10 Gbit/s: the learner's is then the slowest hop of each way. No plan rents such an offer (defect_of()).
inline OfferLinks links_of(const Offer& offer, const FleetSettings& fleet, const PathSettings& paths) {
  constexpr BitRate kUnstated{1e10};
  const auto link = [&](const std::optional<BitRate>& stated, const std::optional<BitRate>& assumed) {
    return paths.capped(stated ? *stated : assumed.value_or(kUnstated));
  };
  return {link(offer.up, fleet.assume.up), link(offer.down, fleet.assume.down)};
}

}  // namespace echoline::provisioner
