// Decides when a worker has waited too long. Called by MemberCore and Parents.
#include "overlay/member/stall_watch.hpp"

#include "base/result.hpp"

namespace echoline::overlay {

// Counts the first kBegunMax publications.
bool StallWatch::is_new_maximum(const PublicationKey& key, std::uint32_t chunks) {
  if (chunks_max_.size() >= kBegunMax && !chunks_max_.contains(key)) return false;
  std::uint32_t& most = chunks_max_[key];
  if (chunks <= most) return false;
  most = chunks;
  return true;
}

void StallWatch::record_progress(const PublicationKey& key, std::uint32_t chunks, bool can_end, TimePoint now) {
  if (!is_waiting() || !is_new_maximum(key, chunks) || !can_end) return;
  since_ = now;
  parents_got_time_ = false;
  calls_ = 0;
}

void StallWatch::on_activated(bool newest_is_here, TimePoint now) {
  refusals_ = calls_ = 0;
  chunks_lost_ = false;
  chunks_max_.clear();
  since_ = newest_is_here ? kNever : now;
}

bool StallWatch::take_stall(TimePoint now) {
  if (!is_waiting() || now - since_ < patience()) return false;
  since_ = now;
  parents_got_time_ = false;
  chunks_max_.clear();
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

void StallWatch::postpone(Duration pause) {
  for (TimePoint* at : {&since_, &asked_at_})
    if (*at != kNever) *at += pause;
}

void StallWatch::check() const {
  ECHO_CHECK(chunks_max_.size() <= kBegunMax && refusals_ >= 0 && calls_ >= 0);
  ECHO_CHECK(!is_waiting() || patience() >= kStallHeartbeats * heartbeat_);
}

}  // namespace echoline::overlay
