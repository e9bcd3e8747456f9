#include "overlay/core.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::overlay {

void Core::on_received(std::size_t bytes, TimePoint now) {
  bytes_received_ += bytes;
  if (!down_.rate()) return;
  // Paid for after reading: reading goes on when the link would have carried what was read.
  const TimePoint paid_at = down_.occupy({bytes}, now, was_paused_);
  was_paused_ = false;
  if (reading_ && paid_at > now) {
    reading_ = false;
    actions_.push_back(act::SetReading{{}, false});
  }
}

void Core::resume_reading(TimePoint now) {
  if (reading_ || down_.free_at() > now) return;
  reading_ = was_paused_ = true;
  actions_.push_back(act::SetReading{{}, true});
}

void Core::send_control(ConnId conn, const ControlMessage& message, TimePoint now) {
  Slice frame(encode_control(message));
  control_bytes_ += frame.size();
  up_.occupy({frame.size()}, now, false);
  actions_.push_back(act::Send{conn, std::move(frame), {}});
}

ConnId Core::dial(const Endpoint& to, act::Service service, WorkerId expected) {
  const ConnId conn{next_conn_};
  next_conn_ += 2;
  actions_.push_back(act::Dial{conn, to, service, expected});
  return conn;
}

void MessageQueue::push(std::span<const std::byte> message) {
  frames_.emplace_back(encode_frame(FrameType::kApplication, message));
  bytes_ += frames_.back().size();
}

std::optional<OutFrame> MessageQueue::next(ConnId) {
  if (frames_.empty()) return std::nullopt;
  OutFrame frame{std::move(frames_.front()), {}};
  frames_.pop_front();
  bytes_ -= frame.size();
  return frame;
}

void SilenceMeter::heard(TimePoint now) {
  const double gap_s = seconds(now - heard_);
  heard_ = now;
  deviation_s_ += 0.25 * (std::abs(gap_s - mean_s_) - deviation_s_);
  mean_s_ += 0.125 * (gap_s - mean_s_);
}

TimePoint SilenceMeter::deadline() const {
  if (interval_ == Duration{}) return kNever;
  const double interval_s = seconds(interval_);
  return std::max(heard_, alive_) +
         from_seconds(std::clamp(mean_s_ + 6 * deviation_s_, 4 * interval_s, 12 * interval_s)) * (1 << backoffs_);
}

}  // namespace echoline::overlay
