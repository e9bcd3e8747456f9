// Finds the hop that holds a broadcast back, from what both of its ends say they hold. Pure.
//
// A relay passes on what it has at once, so before and behind a slow hop sender and receiver hold nearly the same. At
// the slow hop itself the sender is ahead and stays ahead: the gap is there, and nowhere else. The rate is the one the
// receiver sees, which the sender cannot embellish.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"

namespace echoline::overlay {

class HopMonitor {
 public:
  static constexpr Duration kPatience = std::chrono::milliseconds(2000);  // of an unbroken gap, before it counts
  static constexpr Duration kSettling = std::chrono::milliseconds(1500);  // a new hop finds its speed
  static constexpr double kSlow = 0.3;                                    // of the rate that was planned
  static constexpr double kSlowOfOthers = 0.25;                           // of the other hops' median, if none was
  static constexpr std::uint64_t kGapBytesMin = 256 * 1024;
  static constexpr Duration kForgotten = std::chrono::minutes(1);  // a hop that was not observed since

  struct Hop {
    WorkerId from, to;
    friend auto operator<=>(const Hop&, const Hop&) = default;
  };
  struct Finding {
    Hop hop;
    BitRate rate, expected;
    bool alone = false;  // its sender keeps up with another of its receivers, and has for a while
  };

  // `held_by_sender`, `held_by_receiver`: bytes of what should cross this hop, in the publications under way.
  // `expected`: what the hop was planned for; absent: as fast as the other hops of the fleet.
  void observe(const Hop& hop, std::uint64_t held_by_sender, std::uint64_t held_by_receiver,
               std::optional<BitRate> expected, TimePoint now);
  // Hops that have been slow for kPatience, in windows that overlap by half; once found, a hop starts over.
  // Where a worker receives slowly and sends more slowly still, only the latter is found: an exhausted uplink delays
  // what it acknowledges, too.
  std::vector<Finding> find();
  void forget(WorkerId worker);
  std::size_t size() const { return last_.size(); }  // hops it knows

 private:
  struct Watch {
    TimePoint since, seen;                      // the window; the gap has been there
    std::uint64_t held_then = 0, held_now = 0;  // by the receiver
    std::optional<TimePoint> middle;            // where the next window begins
    std::uint64_t held_in_the_middle = 0;
    std::optional<BitRate> expected;
    double rate() const { return static_cast<double>(held_now - held_then) / seconds(seen - since); }  // bytes/s
  };
  // Median of the fleet's hops [bytes/s]; absent while there are too few to compare with.
  std::optional<double> usual_rate() const;
  bool keeps_up_elsewhere(const Hop& hop, std::optional<double> usual) const;
  // Absent while the gap is younger than `patience`, no rate is expected, or the hop is fast enough.
  static std::optional<Finding> judge(const Hop& hop, const Watch& watch, std::optional<double> usual,
                                      Duration patience);

  std::map<Hop, Watch> watched_;
  // Speeds of hops that carry something [bytes/s]. Behind a slow hop all are slow, so the best speed counts.
  struct Speed {
    double now = 0, best = 0;
  };
  std::map<Hop, Speed> speeds_;
  struct Last {
    TimePoint first, at, seen;
    std::uint64_t held = 0;
  };
  std::map<Hop, Last> last_;
  TimePoint latest_{};
};

}  // namespace echoline::overlay
