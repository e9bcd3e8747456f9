// Where workers stand, and what the ways between those places carry.
#pragma once
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/units.hpp"

namespace echoline::chains {

inline constexpr std::size_t kRegionsMax = 32;

// From one region to another, one way.
struct RegionWay {
  BitRate rate{std::numeric_limits<double>::infinity()};  // of all that crosses, together
  std::optional<Duration> delay;                          // one way; absent: as it is known of a worker's own link
};

struct Regions {
  std::uint32_t learner = 0;                 // where it stands
  std::vector<std::vector<RegionWay>> ways;  // [from][to], square; empty: one place, that nothing limits

  bool several() const { return ways.size() > 1; }
  BitRate rate(std::uint32_t from, std::uint32_t to) const {
    return from == to || !several() ? BitRate{std::numeric_limits<double>::infinity()} : ways[from][to].rate;
  }
  Duration delay(std::uint32_t from, std::uint32_t to, Duration otherwise) const {
    return several() ? ways[from][to].delay.value_or(otherwise) : otherwise;
  }
};

// At most so much of what the learner sends reaches each region, over whichever regions: the maximum flow from the
// learner, whose uplink is `learner_up`, through the ways and through what the workers of every region send together
// (`up`, by region). Push-relabel (Goldberg and Tarjan, 1988).
std::vector<BitRate> inflow(const Regions& regions, BitRate learner_up, std::span<const BitRate> up);

// How much all that receive get together, at most: the maximum flow from what is sent in every region (`up`, the
// learner's own uplink among it), over the ways, to what is taken in there (`taken`).
BitRate delivered(const Regions& regions, std::span<const BitRate> up, std::span<const BitRate> taken);

// What some regions lack of uplink, and others send for them over what the ways still carry, so that as much as
// possible comes to where it is lacking. One that is helped may help a third with what its own workers then need not
// send (`through`, at most).
struct Lending {
  double all = 0;                         // bit/s
  std::vector<std::vector<double>> over;  // [from][to], bit/s
};
// `spare` by region, bit/s; negative: so much is lacking there. `taken` of each way is in use, [from][to].
Lending lend(const Regions& regions, std::span<const double> spare, std::span<const double> through,
             const std::vector<std::vector<double>>& taken);

}  // namespace echoline::chains
