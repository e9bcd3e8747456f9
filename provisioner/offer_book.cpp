// The offers that FleetCore may rent, with their failures and their hosts' measured shares.
#include "provisioner/offer_book.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace echoline::provisioner {
namespace {

constexpr Duration kFailurePauseFirst = std::chrono::minutes(1);  // doubles with each failure
constexpr int kPauseDoublingsMax = 6;                             // so the longest pause is 64 minutes

}  // namespace

OfferBook::OfferBook(const std::vector<FleetOffer>& offers) {
  for (const FleetOffer& offer : offers) entries_[offer.id] = Entry{offer};
}

std::string OfferBook::refresh(const std::vector<FleetOffer>& offers) {
  std::map<std::string, Entry, std::less<>> refreshed;
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
    refreshed[offer.id] = std::move(entry);
  }
  // If `offers` repeats a new id, `added` counts it twice, and `gone` is too high.
  const std::size_t count_without_losses = entries_.size() + added;
  const std::size_t gone = count_without_losses - std::min(count_without_losses, refreshed.size());
  entries_ = std::move(refreshed);
  if (added + cheaper + dearer + gone == 0) return "";
  return fmt::format("{} offers: {} new, {} gone, {} cheaper, {} dearer", entries_.size(), added, gone, cheaper,
                     dearer);
}

void OfferBook::record_failure(const std::string& offer, bool until_refresh, TimePoint now) {
  const auto it = entries_.find(offer);
  if (it == entries_.end()) return;
  Entry& entry = it->second;
  entry.needs_refresh = entry.needs_refresh || until_refresh;
  entry.not_before = now + kFailurePauseFirst * (1 << std::min(entry.failures, kPauseDoublingsMax));
  ++entry.failures;
}

void OfferBook::record_success(const std::string& offer) {
  if (const auto it = entries_.find(offer); it != entries_.end()) it->second.failures = 0;
}

bool OfferBook::demote(const FleetOffer& offer, double share) {
  return shares_.insert_or_assign(host_of(offer), share).second;
}

double OfferBook::rate_share_of(const FleetOffer& offer) const {
  const auto it = shares_.find(host_of(offer));
  return it == shares_.end() ? 1 : it->second;
}

const OfferBook::Entry* OfferBook::find(const std::string& offer) const {
  const auto it = entries_.find(offer);
  return it == entries_.end() ? nullptr : &it->second;
}

}  // namespace echoline::provisioner
