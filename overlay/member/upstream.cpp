// The connections of one edge from a parent or helper. Called by Parents.
#include "overlay/member/upstream.hpp"

#include <algorithm>

#include "base/state_table.hpp"

namespace echoline::overlay {

std::uint32_t StreamProbe::observe(std::uint64_t total_bytes, bool busy, TimePoint now) {
  if (phase_ == Phase::kSettled) return streams_;
  // A time in which the parent has nothing to send shows no rate, so a window begins at its last observation.
  const bool window_counts = busy && window_began_at_;
  if (window_counts && now - *window_began_at_ < kWindow) return streams_;
  const double rate =
      window_counts ? static_cast<double>(total_bytes - bytes_at_begin_) / seconds(now - *window_began_at_) : 0;
  window_began_at_ = now;
  bytes_at_begin_ = total_bytes;
  if (!window_counts) return streams_;
  if (phase_ == Phase::kWarmingUp) {
    phase_ = Phase::kMeasuring;
    return streams_;
  }
  if (rate < rate_before_ * kRateGrowthMin || streams_ >= kStreamsMax) {
    phase_ = Phase::kSettled;
    return streams_;
  }
  rate_before_ = rate;
  phase_ = Phase::kWarmingUp;
  streams_ *= 2;
  return streams_;
}

void Upstream::move_to(State next, TimePoint due) {
  using enum State;
  static constexpr StateRow kTable[] = {
      {"closed", states(kPausing, kDialling, kAwaited)},
      {"pausing", states(kDialling, kAwaited, kOpen, kClosed)},  // the parent may dial early
      {"dialling", states(kOpen, kClosed)},
      {"awaited", states(kOpen, kClosed)},
      {"open", states(kClosed)},
  };
  change_state(state_, next, kTable, "an edge");
  due_at_ = due;
}

std::optional<ConnId> Upstream::open_conn() const {
  for (const Stream& stream : streams_)
    if (stream.is_open) return stream.conn;
  return std::nullopt;
}

std::vector<Upstream::Stream>::iterator Upstream::find(ConnId conn) {
  return std::find_if(streams_.begin(), streams_.end(), [&](const Stream& stream) { return stream.conn == conn; });
}

void Upstream::add_dialled(ConnId conn) {
  if (state_ != State::kOpen) move_to(State::kDialling);
  streams_.push_back({conn, next_stream_++});
}

std::uint32_t Upstream::open_stream(ConnId conn, Duration heartbeat, TimePoint now) {
  const auto stream = find(conn);
  stream->is_open = true;
  if (state_ == State::kOpen) return std::max(1u, stream->number);  // 0 would begin a new edge
  move_to(State::kOpen);
  status_meter_.begin(heartbeat, now, silences_);
  has_received_frame_ = false;
  return 0;
}

bool Upstream::remove_stream(ConnId conn) {
  const auto stream = find(conn);
  const bool was_open = stream->is_open;
  streams_.erase(stream);
  return was_open;
}

void Upstream::close() {
  if (state_ != State::kClosed) move_to(State::kClosed);
  streams_.clear();
  next_stream_ = 0;
  progress_.clear();
}

void Upstream::postpone(Duration suspended_for, TimePoint now) {
  status_meter_.postpone(suspended_for, now);
  if (state_ == State::kAwaited) due_at_ += suspended_for;
}

void Upstream::on_status(const std::vector<Progress>& progress, TimePoint now) {
  status_meter_.on_regular_message(now);
  progress_.clear();
  for (const Progress& report : progress) progress_[report.publication] = report.chunks;
}

void Upstream::check() const {
  ECHO_CHECK((state_ == State::kOpen) == is_open(), "state {}", static_cast<int>(state_));
  ECHO_CHECK((state_ == State::kOpen || state_ == State::kDialling) == !streams_.empty());
  ECHO_CHECK((state_ == State::kPausing || state_ == State::kAwaited) == (due_at_ != kNever));
  ECHO_CHECK(progress_.empty() || is_open(), "a status without a connection");
}

}  // namespace echoline::overlay
