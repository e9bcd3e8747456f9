// Learns the capacity of machines' links from their traffic.
#pragma once
#include <optional>
#include <span>
#include <string>

#include "base/clock.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// Measures the highest rate of one direction of a link, from occasional readings of a byte counter. A rate counts if
// continuous traffic lasts for kStretchMin. The highest rate is a lower bound of the capacity, because something else
// may have limited the sender.
class LinkMeter {
 public:
  static constexpr Duration kStretchMin = std::chrono::seconds(1);
  static constexpr Duration kGapMax = std::chrono::seconds(5);  // between two readings of one stretch of traffic

  // `counter`: the counter's value at this time.
  void add_reading(Bytes counter, TimePoint at);
  const std::optional<BitRate>& highest() const { return highest_; }

 private:
  struct Reading {
    Bytes counter;
    TimePoint at;
  };
  std::optional<Reading> last_reading_;
  std::optional<Reading> stretch_begin_;  // of the present stretch of continuous traffic
  std::optional<BitRate> highest_;
};

// The measured links of a host in earlier runs.
struct KnownLinks {
  std::string provider, host;
  std::optional<BitRate> up, down;
};
// Fills in unstated links with the highest measurement of the offer's host. Measurements of a local provider
// (ProviderKind::is_local) are not used, because traffic between processes of one machine crosses no link.
void fill_links(std::span<Offer> offers, std::span<const KnownLinks> known);

}  // namespace echoline::provisioner
