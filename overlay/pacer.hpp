// Spreads bytes over time, so that they keep to a link's rate, at either end of the link. No I/O; the caller passes the
// time.
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
  static constexpr Duration kSliceTime = std::chrono::milliseconds(8);
  static constexpr std::size_t kSliceBytesMin = 2048;

  Pacer() = default;
  // `overhead`: bytes that the link carries for every byte passed, such as headers.
  explicit Pacer(std::optional<BitRate> rate, double overhead = 0) : rate_(rate), wire_bytes_per_byte_(1 + overhead) {}

  // Occupies the link with `bytes` and returns the time at which the last of them is through. `busy`: the caller has
  // had bytes to pass ever since the link became free, so these bytes follow the earlier ones without a gap.
  TimePoint occupy(Bytes bytes, TimePoint now, bool busy) {
    if (!rate_) return now;
    const TimePoint earliest = busy ? now - kLatenessMax : now;
    free_at_ = std::max(free_at_, earliest) +
               from_seconds(static_cast<double>(bytes.count) * wire_bytes_per_byte_ / rate_->bytes_per_s());
    return free_at_;
  }
  TimePoint free_at() const { return free_at_; }
  std::optional<BitRate> rate() const { return rate_; }

  // Returns how many of `bytes` bytes to pass at a time: those that the link carries in kSliceTime, but at least
  // kSliceBytesMin. So the rate is even over a few milliseconds.
  std::size_t slice_bytes(std::size_t bytes) const {
    if (!rate_) return bytes;
    const auto slice = static_cast<std::size_t>(rate_->bytes_per_s() * seconds(kSliceTime));
    return std::min(bytes, std::max(kSliceBytesMin, slice));
  }

 private:
  std::optional<BitRate> rate_;
  double wire_bytes_per_byte_ = 1;
  TimePoint free_at_{};
};

}  // namespace echoline::overlay
