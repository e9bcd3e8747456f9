// What links of machines have shown that they carry.
#pragma once
#include <optional>
#include <span>
#include <string>

#include "base/clock.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// The highest rate of one direction of a link over a second or more in which bytes kept coming, by a counter that is
// heard every now and then. It is the least that the link can do: what is sent may be held to less.
class LinkMeter {
 public:
  static constexpr Duration kLeast = std::chrono::seconds(1);
  static constexpr Duration kGapMax = std::chrono::seconds(5);  // between two beats of one stretch

  void heard(Bytes total, TimePoint at);
  const std::optional<BitRate>& best() const { return best_; }

 private:
  struct Sample {
    Bytes total;
    TimePoint at;
  };
  std::optional<Sample> last_, begin_;
  std::optional<BitRate> best_;
};

// A host's links as runs have measured them.
struct KnownLinks {
  std::string provider, host;
  std::optional<BitRate> up, down;
};
// Offers that do not state a link get what their host has shown, the highest of it. Local processes are not learned
// from.
void fill_links(std::span<Offer> offers, std::span<const KnownLinks> known);

}  // namespace echoline::provisioner
