#include "overlay/member/stall_watch.hpp"

#include "base/result.hpp"

namespace echoline::overlay {

// Counts the first kBegunMax publications.
bool StallWatch::farther(const PublicationKey& key, std::uint32_t chunks) {
  if (most_.size() >= kBegunMax && !most_.contains(key)) return false;
  std::uint32_t& most = most_[key];
  if (chunks <= most) return false;
  most = chunks;
  return true;
}

void StallWatch::progressed(const PublicationKey& key, std::uint32_t chunks, bool can_end, TimePoint now) {
  if (!waits() || !farther(key, chunks) || !can_end) return;
  since_ = now;
  parents_got_time_ = false;
  calls_ = 0;
}

void StallWatch::activated(bool newest_is_here, TimePoint now) {
  refusals_ = calls_ = 0;
  lost_here_ = false;
  most_.clear();
  since_ = newest_is_here ? kNever : now;
}

bool StallWatch::take_stall(TimePoint now) {
  if (!waits() || now - since_ < patience()) return false;
  since_ = now;
  parents_got_time_ = false;
  most_.clear();
  return true;
}

bool StallWatch::may_ask(Duration pause, TimePoint now) {
  if (asked_at_ != kNever && now < asked_at_ + pause) {
    since_ = std::min(since_, asked_at_ + pause - patience());
    return false;
  }
  asked_at_ = now;
  return true;
}

void StallWatch::postpone(Duration late) {
  for (TimePoint* at : {&since_, &asked_at_})
    if (*at != kNever) *at += late;
}

void StallWatch::check() const {
  ECHO_CHECK(most_.size() <= kBegunMax && refusals_ >= 0 && calls_ >= 0);
  ECHO_CHECK(!waits() || patience() >= kStallHeartbeats * heartbeat_);
}

}  // namespace echoline::overlay
