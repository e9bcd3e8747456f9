// The offers that FleetCore may rent, with their failures and their hosts' measured shares.
#include "provisioner/offer_book.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace echoline::provisioner {

OfferBook::OfferBook(const std::vector<FleetOffer>& offers) {
  for (const FleetOffer& offer : offers) entries_[offer.id] = Entry{offer};
}

std::string OfferBook::refresh(const std::vector<FleetOffer>& offers) {
  std::map<std::string, Entry, std::less<>> fresh;
  std::size_t added = 0, cheaper = 0, dearer = 0;
  for (const FleetOffer& offer : offers) {
    Entry entry{offer};
    if (const Entry* known = find(offer.id); known == nullptr) {
      ++added;
    } else {
      cheaper += offer.usd_per_hour < known->offer.usd_per_hour ? 1 : 0;
      dearer += offer.usd_per_hour > known->offer.usd_per_hour ? 1 : 0;
      entry.not_before = known->not_before;
      entry.failures = known->failures;
    }
    fresh[offer.id] = std::move(entry);
  }
  const std::size_t gone = entries_.size() + added - std::min(entries_.size() + added, fresh.size());
  entries_ = std::move(fresh);
  if (added + cheaper + dearer + gone == 0) return "";
  return fmt::format("{} offers: {} new, {} gone, {} cheaper, {} dearer", entries_.size(), added, gone, cheaper,
                     dearer);
}

void OfferBook::record_failure(const std::string& offer, bool refused, TimePoint now) {
  const auto it = entries_.find(offer);
  if (it == entries_.end()) return;
  it->second.refused = it->second.refused || refused;
  it->second.not_before = now + std::chrono::minutes(1) * (1 << std::min(it->second.failures, 6));
  ++it->second.failures;
}

void OfferBook::record_success(const std::string& offer) {
  if (const auto it = entries_.find(offer); it != entries_.end()) it->second.failures = 0;
}

bool OfferBook::demote(const FleetOffer& offer, double share) {
  return shares_.insert_or_assign(host_of(offer), share).second;
}

double OfferBook::share_of(const FleetOffer& offer) const {
  const auto it = shares_.find(host_of(offer));
  return it == shares_.end() ? 1 : it->second;
}

const OfferBook::Entry* OfferBook::find(const std::string& offer) const {
  const auto it = entries_.find(offer);
  return it == entries_.end() ? nullptr : &it->second;
}

}  // namespace echoline::provisioner
