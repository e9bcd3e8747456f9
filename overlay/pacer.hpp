// A link of a fixed rate, as its two ends see it. Pure: the caller passes the time.
#pragma once
#include <algorithm>
#include <optional>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline::overlay {

// Bytes occupy the link one after another, each for bytes / rate. Unlike a token bucket it grants nothing for time
// spent idle, so a payload never leaves earlier than a real link would carry it; time lost because the caller came late
// while the link was busy is made up, up to kLatenessMax.
class Pacer {
 public:
  static constexpr Duration kLatenessMax = std::chrono::milliseconds(50);

  Pacer() = default;
  // `overhead`: bytes the link carries beside every byte passed, headers for example.
  explicit Pacer(std::optional<BitRate> rate, double overhead = 0) : rate_(rate), wire_bytes_(1 + overhead) {}

  // Occupies the link with `bytes` and returns when the last of them is through. `busy`: the caller had more to pass
  // all the time since the link fell free, so the bytes follow on what was before.
  TimePoint occupy(Bytes bytes, TimePoint now, bool busy) {
    if (!rate_) return now;
    const TimePoint earliest = busy ? now - kLatenessMax : now;
    free_at_ = std::max(free_at_, earliest) +
               from_seconds(static_cast<double>(bytes.count) * wire_bytes_ / rate_->bytes_per_s());
    return free_at_;
  }
  TimePoint free_at() const { return free_at_; }
  std::optional<BitRate> rate() const { return rate_; }

  // How many bytes to pass at a time so that the rate is even over a few milliseconds, within [2 KiB, whole].
  std::size_t slice_bytes(std::size_t whole) const {
    if (!rate_) return whole;
    return std::min(whole, std::max<std::size_t>(2048, static_cast<std::size_t>(rate_->bytes_per_s() * 0.008)));
  }

 private:
  std::optional<BitRate> rate_;
  double wire_bytes_ = 1;
  TimePoint free_at_{};
};

}  // namespace echoline::overlay
