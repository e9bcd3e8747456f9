#include "overlay/core.hpp"

namespace echoline::overlay {

void Core::on_received(std::size_t bytes, TimePoint now) {
  bytes_received_ += bytes;
  if (!down_.rate()) return;
  // Paid for after reading: reading goes on when the link would have carried what was read.
  const TimePoint paid_at = down_.occupy({bytes}, now, was_paused_);
  was_paused_ = false;
  if (reading_ && paid_at > now) {
    reading_ = false;
    actions_.push_back(act::SetReading{false});
  }
}

void Core::resume_reading(TimePoint now) {
  if (reading_ || down_.free_at() > now) return;
  reading_ = was_paused_ = true;
  actions_.push_back(act::SetReading{true});
}

void Core::send_frame(ConnId conn, std::vector<std::byte> frame, TimePoint now) {
  bytes_sent_ += frame.size();
  up_.occupy({frame.size()}, now, false);
  actions_.push_back(act::Send{conn, std::move(frame), {}});
}

ConnId Core::dial(const Endpoint& to) {
  const ConnId conn{next_conn_};
  next_conn_ += 2;
  actions_.push_back(act::Dial{conn, to});
  return conn;
}

}  // namespace echoline::overlay
