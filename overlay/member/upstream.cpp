#include "overlay/member/upstream.hpp"

#include <algorithm>

namespace echoline::overlay {

std::uint32_t StreamProbe::observe(std::uint64_t bytes, bool busy, TimePoint now) {
  if (settled_) return streams_;
  if (!busy || !since_) {  // only unbroken windows count
    since_ = now;
    bytes_ = bytes;
    return streams_;
  }
  if (now - *since_ < kWindow) return streams_;
  const double rate = static_cast<double>(bytes - bytes_) / seconds(now - *since_);
  since_ = now;
  bytes_ = bytes;
  if (std::exchange(settling_, false)) return streams_;  // new connections have found their speed by now
  if (rate < rate_before_ * kWorthIt || streams_ >= kStreamsMax) {
    settled_ = true;
    return streams_;
  }
  rate_before_ = rate;
  settling_ = true;
  return streams_ *= 2;
}

bool Upstream::up() const {
  return std::any_of(streams.begin(), streams.end(), [](const Stream& s) { return s.up; });
}

Upstream::Stream* Upstream::stream_of(ConnId conn) {
  const auto it = std::find_if(streams.begin(), streams.end(), [&](const Stream& s) { return s.conn == conn; });
  return it == streams.end() ? nullptr : &*it;
}

}  // namespace echoline::overlay
