// Measures links from counters of bytes, and fills in offers' unknown links.
#include "provisioner/links.hpp"

#include <map>

#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {

void LinkMeter::add_reading(Bytes counter, TimePoint at) {
  const bool is_continuous =
      last_reading_ && counter > last_reading_->counter && at > last_reading_->at && at - last_reading_->at <= kGapMax;
  if (!is_continuous) {
    stretch_begin_.reset();
  } else if (!stretch_begin_) {
    stretch_begin_ = Reading{counter, at};  // the stretch began at an unknown time before this reading
  } else if (at - stretch_begin_->at >= kStretchMin) {
    constexpr double kBitsPerByte = 8;
    const auto bytes = static_cast<double>(counter.count - stretch_begin_->counter.count);
    const BitRate rate{bytes * kBitsPerByte / seconds(at - stretch_begin_->at)};
    if (!highest_ || rate > *highest_) highest_ = rate;
  }
  last_reading_ = Reading{counter, at};
}

void fill_links(std::span<Offer> offers, std::span<const KnownLinks> known) {
  std::map<std::pair<std::string_view, std::string_view>, KnownLinks> fastest_by_host;  // by provider and host
  const auto raise = [](std::optional<BitRate>& highest, const std::optional<BitRate>& rate) {
    if (rate && (!highest || *rate > *highest)) highest = rate;
  };
  for (const KnownLinks& links : known) {
    if (is_local_provider(links.provider) || links.host.empty()) continue;
    KnownLinks& fastest = fastest_by_host[{links.provider, links.host}];
    raise(fastest.up, links.up);
    raise(fastest.down, links.down);
  }
  if (fastest_by_host.empty()) return;
  for (Offer& offer : offers) {
    const auto it = fastest_by_host.find({offer.provider, offer.host});
    if (it == fastest_by_host.end()) continue;
    if (!offer.up) offer.up = it->second.up;
    if (!offer.down) offer.down = it->second.down;
  }
}

}  // namespace echoline::provisioner
