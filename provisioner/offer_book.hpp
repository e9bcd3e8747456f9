// The offers that a fleet can rent now. An offer that failed waits for a while, and a host that does not keep its
// promise counts with its measured share of it. Private to provisioner/. Pure.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "provisioner/fleet_machines.hpp"

namespace echoline::provisioner {

class OfferBook {
 public:
  struct Entry {
    FleetOffer offer;
    TimePoint not_before{};  // it failed
    int failures = 0;
    bool refused = false;  // it is not to be had, until it is offered again

    bool available(TimePoint now) const { return !refused && now >= not_before && offer.rollouts_per_s > 0; }
  };

  explicit OfferBook(const std::vector<FleetOffer>& offers);

  // All that can be rented now. Returns how that differs from before; "" if it does not.
  std::string refresh(const std::vector<FleetOffer>& offers);
  // It failed: it waits, each time twice as long. `refused`: until it is offered again.
  void blame(const std::string& offer, bool refused, TimePoint now);
  void worked(const std::string& offer);
  // The host keeps this share of what it promises. Returns whether that is said of it for the first time.
  bool demote(const FleetOffer& offer, double share);
  bool demoted(const FleetOffer& offer) const { return shares_.contains(host_of(offer)); }
  double share_of(const FleetOffer& offer) const;
  const Entry* find(const std::string& offer) const;
  const std::map<std::string, Entry, std::less<>>& all() const { return entries_; }
  static std::string host_of(const FleetOffer& offer) {
    return offer.host.empty() ? offer.provider + "/offer " + offer.id : offer.provider + "/" + offer.host;
  }

 private:
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, double> shares_;  // by host_of()
};

}  // namespace echoline::provisioner
