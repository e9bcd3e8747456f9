// Notices a stall: for too long, a worker has made no progress towards the newest version. Defines the progress that
// counts, the time to wait for it, and when the worker may ask for help. No I/O and no clock.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>

#include "base/clock.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

class StallWatch {
 public:
  static constexpr int kStallHeartbeats = 20;  // heartbeats without progress, before the worker asks for help
  // That time doubles with every chunk that the store refuses, and with every call for help without an answer, up to
  // these numbers of times.
  static constexpr int kDoublingRefusalsMax = 3, kDoublingCallsMax = 2;
  // Publications whose chunks count as progress until one is activated or help is asked for. Without a limit, parents
  // that complete none of them could delay the call for help for ever.
  static constexpr std::size_t kBegunMax = 3;

  void set_heartbeat(Duration heartbeat) { heartbeat_ = heartbeat; }

  // The newest version is here.
  void on_newest_arrived() { last_progress_at_ = kNever; }
  // The newest version is not here.
  void begin_wait(TimePoint now) {
    if (!is_waiting()) last_progress_at_ = now;
  }
  // There is a helper now, a node that sends what the parents no longer have. It gets the full time.
  void restart_for_helper(TimePoint now) {
    if (is_waiting()) last_progress_at_ = now;
  }
  // There are new parents: they get the full time, but only once. Otherwise parents that come and go could delay the
  // call for help for ever.
  void restart_for_parents(TimePoint now) {
    if (is_waiting() && !std::exchange(parents_got_time_, true)) last_progress_at_ = now;
  }
  // `chunks` chunks of this publication are here. That is progress if it is the most since the last activation, and if
  // `can_be_completed`: the publication can be completed and installed.
  void record_progress(const PublicationKey& key, std::uint32_t chunks, bool can_be_completed, TimePoint now);
  // `newest_is_here`: the wait is over.
  void on_activated(bool newest_is_here, TimePoint now);
  // The worker's version has become void, so it needs a full snapshot.
  void on_position_void(TimePoint now) { most_chunks_.clear(), last_progress_at_ = now; }
  void begin_epoch() { most_chunks_.clear(), chunks_lost_ = false; }
  // Needed chunks were lost here. The parents count them as sent, so they will not send them again.
  void on_chunks_lost() { most_chunks_.clear(), chunks_lost_ = true; }
  void on_store_refused() { ++store_refusals_, on_chunks_lost(); }
  void on_parents_restarted() { chunks_lost_ = false; }
  bool has_lost_chunks() const { return chunks_lost_; }

  // Returns, once, whether there was no progress for too long.
  bool take_stall(TimePoint now);
  // A call for help had no effect: no frame has come from the helper or a parent since it was dialled.
  void count_unanswered_call() { ++unanswered_calls_; }
  // Returns whether the worker may call for help now, and records the call. A call must come at least `pause` after the
  // one before. If it comes too soon, the next stall comes at the end of that pause.
  bool begin_call(Duration pause, TimePoint now);
  // The learner has answered the last call, so the next one need not wait for the end of the pause.
  void on_help() { called_at_ = kNever; }
  // This process was suspended for `pause`.
  void postpone(Duration pause);
  bool is_waiting() const { return last_progress_at_ != kNever; }
  TimePoint deadline() const { return is_waiting() ? last_progress_at_ + patience() : kNever; }
  void check() const;

 private:
  Duration patience() const {
    const int by_refusals = std::min(store_refusals_, kDoublingRefusalsMax);
    const int by_calls = std::min(unanswered_calls_, kDoublingCallsMax);
    return heartbeat_ * (kStallHeartbeats << std::max(by_refusals, by_calls));
  }
  // Records the number of chunks here. Returns whether it is the most so far.
  bool is_new_maximum(const PublicationKey& key, std::uint32_t chunks);

  Duration heartbeat_{};
  TimePoint last_progress_at_ = kNever;  // kNever: the newest version is here
  TimePoint called_at_ = kNever;         // time of a call for help that has no answer yet
  // The next two count since the last progress.
  bool parents_got_time_ = false;
  int unanswered_calls_ = 0;  // calls for help
  // The rest counts since the last activation.
  bool chunks_lost_ = false;
  int store_refusals_ = 0;
  std::map<PublicationKey, std::uint32_t> most_chunks_;  // the most chunks that were here, by publication
};

}  // namespace echoline::overlay
