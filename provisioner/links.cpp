// Measures links from counters of bytes, and fills in offers' unknown links.
#include "provisioner/links.hpp"

#include <map>

#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {

void LinkMeter::add_reading(Bytes total, TimePoint at) {
  const bool flows = last_ && total > last_->total && at > last_->at && at - last_->at <= kGapMax;
  if (!flows) {
    begin_.reset();
  } else if (!begin_) {
    begin_ = Sample{total, at};  // the stretch began at an unknown time before this reading
  } else if (at - begin_->at >= kStretchMin) {
    const BitRate rate{static_cast<double>(total.count - begin_->total.count) * 8 / seconds(at - begin_->at)};
    if (!highest_ || rate > *highest_) highest_ = rate;
  }
  last_ = Sample{total, at};
}

void fill_links(std::span<Offer> offers, std::span<const KnownLinks> known) {
  std::map<std::pair<std::string_view, std::string_view>, KnownLinks> best;
  const auto raise = [](std::optional<BitRate>& to, const std::optional<BitRate>& rate) {
    if (rate && (!to || *rate > *to)) to = rate;
  };
  for (const KnownLinks& links : known) {
    if (is_local_provider(links.provider) || links.host.empty()) continue;
    KnownLinks& host = best[{links.provider, links.host}];
    raise(host.up, links.up);
    raise(host.down, links.down);
  }
  if (best.empty()) return;
  for (Offer& offer : offers) {
    const auto it = best.find({offer.provider, offer.host});
    if (it == best.end()) continue;
    if (!offer.up) offer.up = it->second.up;
    if (!offer.down) offer.down = it->second.down;
  }
}

}  // namespace echoline::provisioner
