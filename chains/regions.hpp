// Regions of workers, and the capacity of the links between regions.
#pragma once
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/units.hpp"

namespace echoline::chains {

inline constexpr std::size_t kRegionsMax = 32;

// The link from one region to another, in one direction.
struct RegionLink {
  BitRate rate{std::numeric_limits<double>::infinity()};  // of all traffic together
  std::optional<Duration> delay;                          // one way; absent: use the delay of the worker's own link
};

// Regions are groups of workers. Within a region, links have no limit but the workers' own.
struct Regions {
  std::uint32_t learner_region = 0;            // an index in `links`
  std::vector<std::vector<RegionLink>> links;  // [from][to], square; empty: a single region without limits

  bool several() const { return links.size() > 1; }
  BitRate rate(std::uint32_t from, std::uint32_t to) const {
    return from == to || !several() ? BitRate{std::numeric_limits<double>::infinity()} : links[from][to].rate;
  }
  // `default_delay`: if the link states none.
  Duration delay(std::uint32_t from, std::uint32_t to, Duration default_delay) const {
    return several() ? links[from][to].delay.value_or(default_delay) : default_delay;
  }
};

// Returns an upper bound of the rate at which the learner's data reaches each region, possibly through other regions.
// It is the maximum flow from the learner (uplink `learner_up`) through the links and through the total uplink of each
// region's workers (`region_up`). Computed by push-relabel (Goldberg and Tarjan, 1988).
std::vector<BitRate> inflow_max(const Regions& regions, BitRate learner_up, std::span<const BitRate> region_up);

// Returns an upper bound of the total rate of all receivers: the maximum flow from the uplinks of the regions
// (`region_up`, the learner's included), over the links, to the total downlinks of the regions (`region_down`).
BitRate delivered_rate_max(const Regions& regions, std::span<const BitRate> region_up,
                           std::span<const BitRate> region_down);

// Uplink that regions with a surplus lend to regions with a deficit: workers of the lender send to workers of the
// borrower. A region that borrows uplink may in turn lend to a third region, because its own workers then need less of
// its uplink.
struct Lending {
  double bits_per_s_total = 0;
  std::vector<std::vector<double>> bits_per_s_by_link;  // [from][to]
};
// Returns the largest lending, a maximum flow over the free capacity of the links. All values are by region, in bit/s.
// `spare`: surplus; negative: deficit. `forwardable`: the uplink that a region may lend if it borrows as much.
// `link_load`: used capacity of each link, [from][to].
Lending plan_lending(const Regions& regions, std::span<const double> spare, std::span<const double> forwardable,
                     const std::vector<std::vector<double>>& link_load);

}  // namespace echoline::chains
