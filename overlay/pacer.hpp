// A link of a fixed rate, as seen from either end. No I/O; the caller passes the time.
#pragma once
#include <algorithm>
#include <optional>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline::overlay {

// Bytes occupy the link one after another, each for 1 / rate. Unlike a token bucket, it grants no credit for idle time,
// so a payload never leaves earlier than a real link would carry it. If the caller comes late while the link is busy,
// the pacer makes up for the delay, up to kLatenessMax.
class Pacer {
 public:
  static constexpr Duration kLatenessMax = std::chrono::milliseconds(50);

  Pacer() = default;
  // `overhead`: bytes that the link carries for every byte passed, such as headers.
  explicit Pacer(std::optional<BitRate> rate, double overhead = 0) : rate_(rate), wire_bytes_(1 + overhead) {}

  // Occupies the link with `bytes` and returns the time at which the last of them is through. `busy`: the caller has
  // had bytes to pass ever since the link became free, so these bytes follow the earlier ones without a gap.
  TimePoint occupy(Bytes bytes, TimePoint now, bool busy) {
    if (!rate_) return now;
    const TimePoint earliest = busy ? now - kLatenessMax : now;
    free_at_ = std::max(free_at_, earliest) +
               from_seconds(static_cast<double>(bytes.count) * wire_bytes_ / rate_->bytes_per_s());
    return free_at_;
  }
  TimePoint free_at() const { return free_at_; }
  std::optional<BitRate> rate() const { return rate_; }

  // Bytes to pass at a time so that the rate is even over a few milliseconds, within [2 KiB, whole].
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
