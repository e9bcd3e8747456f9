// Parts of every protocol core: the download limit, and messages of the application in parts. Called by the cores.
#include "overlay/core.hpp"

#include <algorithm>
#include <cmath>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kReadAfterPause = std::chrono::milliseconds(2);  // time in which the driver reads bytes that waited

}  // namespace

void Core::on_received(std::size_t bytes, TimePoint now) {
  bytes_received_ += bytes;
  if (!down_.rate()) return;
  // Bytes occupy the link after reading: reading resumes when the link would have carried them. Bytes read right after
  // a pause arrived before its end, on any connection.
  const TimePoint paid_at = down_.occupy({bytes}, now, now - resumed_at_ <= kReadAfterPause);
  if (reading_ && paid_at > now) {
    reading_ = false;
    actions_.push_back(act::SetReading{{}, false});
  }
}

void Core::resume_reading(TimePoint now) {
  if (reading_ || down_.free_at() > now) return;
  reading_ = true;
  resumed_at_ = now;
  actions_.push_back(act::SetReading{{}, true});
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
  const std::size_t size = std::min(kPartBytes, message.size() - front_bytes_sent_);
  const bool more = front_bytes_sent_ + size < message.size();
  OutFrame frame{Slice(application_header(size, more)), message.part(front_bytes_sent_, size)};
  front_bytes_sent_ += size;
  bytes_ -= size;
  if (!more) {
    messages_.pop_front();
    front_bytes_sent_ = 0;
  }
  return frame;
}

Result<std::optional<std::string>> MessageAssembler::add(const Frame& part, std::size_t most) {
  if (skipped_ > 0 || bytes_.size() + part.body.size() > most) {
    const bool reported = skipped_ == 0 || skipped_ + part.body.size() > most;
    bytes_ = std::string();
    skipped_ = !part.more ? 0 : reported ? 1 : skipped_ + part.body.size();
    if (!reported) return std::optional<std::string>();
    return fail(Code::kExhausted, "receive message", "it has more than {} bytes", most);
  }
  bytes_.append(reinterpret_cast<const char*>(part.body.data()), part.body.size());
  if (part.more) return std::optional<std::string>();
  return std::optional(std::exchange(bytes_, {}));
}

void SilenceMeter::on_beat(TimePoint now) {
  const double gap_s = seconds(now - regular_at_);
  regular_at_ = now;
  deviation_s_ += 0.25 * (std::abs(gap_s - mean_s_) - deviation_s_);
  mean_s_ += 0.125 * (gap_s - mean_s_);
}

TimePoint SilenceMeter::deadline() const {
  if (interval_ == Duration{}) return kNever;
  const double interval_s = seconds(interval_);
  return std::max(regular_at_, other_at_) +
         from_seconds(std::clamp(mean_s_ + 6 * deviation_s_, 4 * interval_s, 12 * interval_s)) * (1 << backoffs_);
}

}  // namespace echoline::overlay
