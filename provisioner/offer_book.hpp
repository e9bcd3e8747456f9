// The offers that a fleet can rent now. A failed offer waits for a while. A host that falls short of its promise counts
// with its measured share. Private to provisioner/. Pure.
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
    TimePoint not_before{};  // set after a failure
    int failures = 0;
    bool refused = false;  // unavailable until it is offered again

    bool available(TimePoint now) const { return !refused && now >= not_before && offer.rollouts_per_s > 0; }
  };

  explicit OfferBook(const std::vector<FleetOffer>& offers);

  // Replaces the offers. Describes the difference; "" if there is none.
  std::string refresh(const std::vector<FleetOffer>& offers);
  // Records a failure: the offer waits, twice as long each time. `refused`: until it is offered again.
  void record_failure(const std::string& offer, bool refused, TimePoint now);
  void record_success(const std::string& offer);
  // Records the share of its promise that the host keeps. Returns whether this is its first demotion.
  bool demote(const FleetOffer& offer, double share);
  bool is_demoted(const FleetOffer& offer) const { return shares_.contains(host_of(offer)); }
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
