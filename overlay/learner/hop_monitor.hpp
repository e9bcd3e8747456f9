// Finds the hop, the edge from one node to the next, that slows a broadcast down. Uses the bytes that both of its ends
// report to hold. No I/O and no clock.
//
// A relay forwards every chunk at once. So at other hops, sender and receiver hold nearly the same; at the slow hop,
// the sender is ahead and stays ahead. The rate is computed from the receiver's reports, so a sender cannot overstate
// it.
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
  static constexpr Duration kGapTimeMin = std::chrono::milliseconds(2000);  // a gap counts once it has lasted this long
  static constexpr Duration kSettlingTime = std::chrono::milliseconds(1500);  // a newer hop is not judged
  static constexpr double kSlowFraction = 0.3;               // slow: below this fraction of the planned rate
  static constexpr double kSlowFractionOfMedian = 0.25;      // the same of the hops' median, if none is planned
  static constexpr std::uint64_t kGapBytesMin = 256 * 1024;  // a receiver is behind if it lacks this much
  // A hop without an observation for this long is forgotten.
  static constexpr Duration kForgetAfter = std::chrono::minutes(1);

  struct Hop {
    WorkerId from, to;
    friend auto operator<=>(const Hop&, const Hop&) = default;
  };
  struct Finding {
    Hop hop;
    BitRate rate, expected;
    bool others_keep_up = false;  // its sender keeps up with another of its receivers, and has for a while
  };

  // Records how many bytes both ends hold of the chunks that cross this hop, in the publications under way. `expected`:
  // the planned rate; absent: the hop should be about as fast as the other hops of the fleet.
  void observe(const Hop& hop, std::uint64_t held_by_sender, std::uint64_t held_by_receiver,
               std::optional<BitRate> expected, TimePoint now);
  // Returns the hops that have been slow for a window of kGapTimeMin, and forgets their windows. Windows overlap by
  // half. If a worker receives slowly and sends more slowly still, only the hop from it is returned, because an
  // exhausted uplink also delays its acknowledgements.
  std::vector<Finding> find();
  void forget(WorkerId worker);
  std::size_t size() const { return observed_.size(); }  // observed hops

 private:
  // A hop whose receiver has been behind during the whole window.
  struct Watch {
    TimePoint window_begin, observed_at;            // `observed_at`: time of the last observation
    std::uint64_t held_at_begin = 0, held_now = 0;  // bytes held by the receiver; if they fall, the window begins again
    std::optional<TimePoint> next_window_begin;     // in the middle of this window
    std::uint64_t held_at_next_begin = 0;
    std::optional<BitRate> expected;
    double bytes_per_s() const {
      return static_cast<double>(held_now - held_at_begin) / seconds(observed_at - window_begin);
    }
  };
  // Median rate of the fleet's hops [bytes/s]; absent for fewer than three.
  std::optional<double> median_rate() const;
  // Whether the hop's sender keeps up with another of its receivers.
  bool keeps_up_elsewhere(const Hop& hop, std::optional<double> median) const;
  // Absent while the gap is younger than `gap_time_min`, no rate is expected, or the hop is fast enough.
  static std::optional<Finding> find_slow(const Hop& hop, const Watch& watch, std::optional<double> median,
                                          Duration gap_time_min);

  std::map<Hop, Watch> watched_;
  // Rates of hops that carry something [bytes/s]. Hops behind a slow one are slow too, so the best rate of each counts.
  struct Speed {
    double smoothed = 0, best = 0;
  };
  std::map<Hop, Speed> speeds_;
  struct Observation {
    TimePoint first_at, changed_at, last_at;  // the first report, the last change of `held`, the last report
    std::uint64_t held = 0;                   // bytes held by the receiver
  };
  std::map<Hop, Observation> observed_;
  TimePoint latest_report_at_{};
};

}  // namespace echoline::overlay
