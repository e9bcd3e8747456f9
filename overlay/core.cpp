// Code that all protocol cores share: the download limit, application messages sent in parts, and the silence timeout.
#include "overlay/core.hpp"

#include <algorithm>
#include <cmath>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

// For this long after a pause of reading, the driver reads bytes that waited in the network.
constexpr Duration kReadAfterPause = std::chrono::milliseconds(2);
// A peer is silent after the mean and kDeviationFactor deviations of the gaps between its messages. Both are smoothed
// with these weights, as in RFC 6298, which has the factor 4.
constexpr double kMeanWeight = 0.125, kDeviationWeight = 0.25, kDeviationFactor = 6;
constexpr double kTimeoutIntervalsMin = 4, kTimeoutIntervalsMax = 12;  // of the silence timeout, in message intervals

}  // namespace

void Core::on_received(std::size_t bytes, TimePoint now) {
  bytes_received_ += bytes;
  if (!down_pacer_.rate()) return;
  // Reading stops until a link of the limited rate would have carried these bytes. Bytes read right after such a pause
  // have waited in the network, so they follow the earlier ones without a gap.
  const bool waited_during_pause = now - resumed_at_ <= kReadAfterPause;
  const TimePoint link_free_at = down_pacer_.occupy({bytes}, now, waited_during_pause);
  if (is_reading_ && link_free_at > now) {
    is_reading_ = false;
    actions_.push_back(act::SetReading{.conn = {}, .on = false});  // all connections
  }
}

void Core::resume_reading(TimePoint now) {
  if (is_reading_ || down_pacer_.free_at() > now) return;
  is_reading_ = true;
  resumed_at_ = now;
  actions_.push_back(act::SetReading{.conn = {}, .on = true});
}

void Core::on_large_packets_dropped(WorkerId, const std::string& what, TimePoint) { log::warn("{}", what); }

void MessageQueue::push(Slice message) {
  ECHO_CHECK(message.size() <= kMessageBytesMax, "a message of {} bytes", message.size());
  bytes_ += message.size();
  messages_.push_back(std::move(message));
}

std::optional<OutFrame> MessageQueue::next(ConnId) {
  if (messages_.empty()) return std::nullopt;
  const Slice& message = messages_.front();
  const std::size_t part_bytes = std::min(kPartBytes, message.size() - front_bytes_sent_);
  const bool has_more = front_bytes_sent_ + part_bytes < message.size();
  OutFrame frame{Slice(application_header(part_bytes, has_more)), message.part(front_bytes_sent_, part_bytes)};
  front_bytes_sent_ += part_bytes;
  bytes_ -= part_bytes;
  if (!has_more) {
    messages_.pop_front();
    front_bytes_sent_ = 0;
  }
  return frame;
}

// Skips the rest of a message that is too large. Fails at its first skipped part, and again after every `bytes_max`
// skipped bytes, so that the caller counts the message by its size.
Result<std::optional<std::string>> MessageAssembler::add(const Frame& part, std::size_t bytes_max) {
  if (skipped_bytes_ > 0 || bytes_.size() + part.body.size() > bytes_max) {
    const bool report_now = skipped_bytes_ == 0 || skipped_bytes_ + part.body.size() > bytes_max;
    bytes_ = std::string();
    if (!part.more)
      skipped_bytes_ = 0;  // the next part begins another message
    else if (report_now)
      skipped_bytes_ = 1;  // begins the count again, but not at 0, which would mean that no part is skipped
    else
      skipped_bytes_ += part.body.size();
    if (!report_now) return std::optional<std::string>();
    return fail(Code::kExhausted, "receive message", "it has more than {} bytes", bytes_max);
  }
  bytes_.append(reinterpret_cast<const char*>(part.body.data()), part.body.size());
  if (part.more) return std::optional<std::string>();
  return std::optional(std::exchange(bytes_, {}));
}

void SilenceMeter::on_regular_message(TimePoint now) {
  const double gap_s = seconds(now - last_regular_at_);
  last_regular_at_ = now;
  // First the deviation, because it is measured from the old mean.
  deviation_s_ += kDeviationWeight * (std::abs(gap_s - mean_s_) - deviation_s_);
  mean_s_ += kMeanWeight * (gap_s - mean_s_);
}

TimePoint SilenceMeter::deadline() const {
  if (interval_ == Duration{}) return kNever;
  const double interval_s = seconds(interval_);
  const double learned_s = std::clamp(mean_s_ + kDeviationFactor * deviation_s_, kTimeoutIntervalsMin * interval_s,
                                      kTimeoutIntervalsMax * interval_s);
  return std::max(last_regular_at_, last_other_at_) + from_seconds(learned_s) * (1 << backoffs_);
}

}  // namespace echoline::overlay
