// The offers that a fleet can rent now. An offer that failed is not available for a while. A host that is slower than
// promised is demoted: its offers count with its measured share of the promised rate. Private to provisioner/. No I/O
// and no clock.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "provisioner/fleet_machines.hpp"

namespace echoline::provisioner {

class OfferBook {
 public:
  struct Entry {
    FleetOffer offer;
    TimePoint not_before{};      // not available earlier; set after a failure
    int failures = 0;            // since the last success
    bool needs_refresh = false;  // not available until a refresh contains it again

    bool is_available(TimePoint now) const { return !needs_refresh && now >= not_before && offer.rollouts_per_s > 0; }
  };

  explicit OfferBook(const std::vector<FleetOffer>& offers);

  // Replaces the offers and returns a description of the difference; "" if there is none.
  std::string refresh(const std::vector<FleetOffer>& offers);
  // Makes the offer unavailable for a pause, which doubles with each failure. With `until_refresh`, also until a
  // refresh contains the offer again.
  void record_failure(const std::string& offer, bool until_refresh, TimePoint now);
  void record_success(const std::string& offer);
  // Records the measured share of its promised rate for the offer's host. Returns whether this is the host's first
  // demotion.
  bool demote(const FleetOffer& offer, double share);
  bool is_demoted(const FleetOffer& offer) const { return shares_.contains(host_of(offer)); }
  double rate_share_of(const FleetOffer& offer) const;  // 1 if the host is not demoted
  const Entry* find(const std::string& offer) const;
  const std::map<std::string, Entry, std::less<>>& all() const { return entries_; }
  // Records that nothing can be rented from the provider. Returns whether that, or the reason, is new.
  bool block(const std::string& provider, const std::string& why) {
    return std::exchange(blocked_[provider], why) != why;
  }
  bool unblock(const std::string& provider) { return blocked_.erase(provider) > 0; }  // false: it was not blocked
  const std::map<std::string, std::string>& blocked() const { return blocked_; }      // the reasons by provider
  // The key of the offer's host, unique over all providers. An offer without a stated host counts as a host of its own.
  static std::string host_of(const FleetOffer& offer) {
    return offer.host.empty() ? offer.provider + "/offer " + offer.id : offer.provider + "/" + offer.host;
  }

 private:
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, double> shares_;        // of demoted hosts, by host_of()
  std::map<std::string, std::string> blocked_;  // the reasons by provider
};

}  // namespace echoline::provisioner
