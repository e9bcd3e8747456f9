// Decides when a worker has waited too long. Called by MemberCore and Parents.
#include "overlay/member/stall_watch.hpp"

#include "base/result.hpp"

namespace echoline::overlay {

// Publications beyond the first kBegunMax do not count.
bool StallWatch::is_new_maximum(const PublicationKey& key, std::uint32_t chunks) {
  if (most_chunks_.size() >= kBegunMax && !most_chunks_.contains(key)) return false;
  std::uint32_t& maximum = most_chunks_[key];
  if (chunks <= maximum) return false;
  maximum = chunks;
  return true;
}

void StallWatch::record_progress(const PublicationKey& key, std::uint32_t chunks, bool can_be_completed,
                                 TimePoint now) {
  if (!is_waiting() || !is_new_maximum(key, chunks) || !can_be_completed) return;
  last_progress_at_ = now;
  parents_got_time_ = false;
  unanswered_calls_ = 0;
}

void StallWatch::on_activated(bool newest_is_here, TimePoint now) {
  store_refusals_ = unanswered_calls_ = 0;
  chunks_lost_ = false;
  most_chunks_.clear();
  last_progress_at_ = newest_is_here ? kNever : now;
}

bool StallWatch::take_stall(TimePoint now) {
  if (!is_waiting() || now - last_progress_at_ < patience()) return false;
  last_progress_at_ = now;
  parents_got_time_ = false;
  most_chunks_.clear();
  return true;
}

bool StallWatch::begin_call(Duration pause, TimePoint now) {
  if (called_at_ != kNever && now < called_at_ + pause) {
    // So that deadline() is not after the end of the pause.
    last_progress_at_ = std::min(last_progress_at_, called_at_ + pause - patience());
    return false;
  }
  called_at_ = now;
  return true;
}

void StallWatch::postpone(Duration pause) {
  for (TimePoint* at : {&last_progress_at_, &called_at_})
    if (*at != kNever) *at += pause;
}

void StallWatch::check() const {
  ECHO_CHECK(most_chunks_.size() <= kBegunMax && store_refusals_ >= 0 && unanswered_calls_ >= 0);
  ECHO_CHECK(!is_waiting() || patience() >= kStallHeartbeats * heartbeat_);
}

}  // namespace echoline::overlay
