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
  // The time doubles with every refusal of the store and with every call for help without effect, up to so many times.
  static constexpr int kRefusalsMax = 3, kCallsMax = 2;
  // Publications whose chunks count as progress until one is activated or help is asked for. Without a limit, parents
  // that complete none of them could delay the call for help for ever.
  static constexpr std::size_t kBegunMax = 3;

  void set_heartbeat(Duration heartbeat) { heartbeat_ = heartbeat; }

  // The newest version is here.
  void on_newest_arrived() { since_ = kNever; }
  // The newest version is not here.
  void begin_wait(TimePoint now) {
    if (!is_waiting()) since_ = now;
  }
  // There is a helper now: it gets the full time.
  void restart_for_helper(TimePoint now) {
    if (is_waiting()) since_ = now;
  }
  // There are new parents: they get the full time, but only once. Otherwise parents that come and go could delay the
  // call for help for ever.
  void restart_for_parents(TimePoint now) {
    if (is_waiting() && !std::exchange(parents_got_time_, true)) since_ = now;
  }
  // `chunks` chunks of this publication are here. That is progress if it is the most since the last activation, and if
  // the publication can be completed and installed (`can_end`).
  void record_progress(const PublicationKey& key, std::uint32_t chunks, bool can_end, TimePoint now);
  // `newest_is_here`: the wait is over.
  void on_activated(bool newest_is_here, TimePoint now);
  // The worker's version has become void, so it needs a full snapshot.
  void on_position_void(TimePoint now) { chunks_max_.clear(), since_ = now; }
  void begin_epoch() { chunks_max_.clear(), chunks_lost_ = false; }
  // Needed chunks were lost here. The parents count them as sent, so they will not send them again.
  void on_chunks_lost() { chunks_max_.clear(), chunks_lost_ = true; }
  void on_store_refused() { ++refusals_, on_chunks_lost(); }
  void on_parents_restarted() { chunks_lost_ = false; }
  bool has_lost_chunks() const { return chunks_lost_; }

  // Returns whether there was no progress for too long, once.
  bool take_stall(TimePoint now);
  // No frame has come from the helper or a parent since it was dialled.
  void count_unanswered_call() { ++calls_; }
  // Returns whether help may be asked for, and counts the call. If not, the next stall comes as soon as it may.
  bool may_ask(Duration pause, TimePoint now);
  void on_help() { asked_at_ = kNever; }
  // This process was suspended for `pause`.
  void postpone(Duration pause);
  bool is_waiting() const { return since_ != kNever; }
  TimePoint deadline() const { return is_waiting() ? since_ + patience() : kNever; }
  void check() const;

 private:
  Duration patience() const {
    return heartbeat_ * (kStallHeartbeats << std::max(std::min(refusals_, kRefusalsMax), std::min(calls_, kCallsMax)));
  }
  bool is_new_maximum(const PublicationKey& key, std::uint32_t chunks);

  Duration heartbeat_{};
  TimePoint since_ = kNever;     // time of the last progress; kNever: the newest version is here
  TimePoint asked_at_ = kNever;  // time of a call for help that has no answer yet
  // Since the last progress.
  bool parents_got_time_ = false;
  int calls_ = 0;  // unanswered calls for help
  // Since the last activation. `chunks_max_`: the most chunks that were here, of each publication.
  bool chunks_lost_ = false;
  int refusals_ = 0;  // of the store
  std::map<PublicationKey, std::uint32_t> chunks_max_;
};

}  // namespace echoline::overlay
