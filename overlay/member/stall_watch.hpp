// Notices that a worker does not get any nearer to the newest version, and when it may ask for help: what counts as
// progress, and how long it waits for it. Pure.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>

#include "base/clock.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

class StallWatch {
 public:
  static constexpr int kStallHeartbeats = 20;  // without progress: time to ask for help
  static constexpr int kRefusalsMax = 3;       // of the store, that this time doubles with
  static constexpr int kCallsMax = 2;          // for help, after which nothing at all was heard: likewise
  // Publications that may begin, until one is activated or help is asked for: parents that bring none of them to an end
  // would otherwise keep it from asking for ever.
  static constexpr std::size_t kBegunMax = 3;

  void set_heartbeat(Duration heartbeat) { heartbeat_ = heartbeat; }

  // The newest version is here, or is not.
  void arrived() { since_ = kNever; }
  void wait(TimePoint now) {
    if (!waits()) since_ = now;
  }
  // The time begins anew, if it runs: others are about to bring what is missing.
  void restart(TimePoint now) {
    if (waits()) since_ = now;
  }
  // Other parents get their time, but only once: parents that come and go would keep it from asking for ever.
  void restart_for_parents(TimePoint now) {
    if (waits() && !std::exchange(parents_got_time_, true)) since_ = now;
  }
  // More of what leads on has come: `chunks` of a publication with this key. It counts if that is more than ever since
  // the last activation, and if that publication can be installed once it is whole.
  void progressed(const PublicationKey& key, std::uint32_t chunks, bool can_end, TimePoint now);
  // Something was activated. `newest_is_here`: nothing more is waited for.
  void activated(bool newest_is_here, TimePoint now);
  // The present position is void, and so is what was counted as progress.
  void begin_anew(TimePoint now) { most_.clear(), since_ = now; }
  void begin_epoch() { most_.clear(), lost_here_ = false; }
  // What leads on was lost here, and the parents take it for sent.
  void lost_here() { most_.clear(), lost_here_ = true; }
  void store_refused() { ++refusals_, lost_here(); }
  void parents_begin_anew() { lost_here_ = false; }
  bool is_lost_here() const { return lost_here_; }

  // No progress for too long: begins anew, and the caller asks for help.
  bool take_stall(TimePoint now);
  // Nothing at all was heard from those who were to help.
  void nothing_heard() { ++calls_; }
  // Whether help may be asked for now, which then counts; otherwise the stall ends when it may.
  bool may_ask(Duration pause, TimePoint now);
  void help_came() { asked_at_ = kNever; }
  void excuse(Duration late);
  bool waits() const { return since_ != kNever; }
  TimePoint deadline() const { return waits() ? since_ + patience() : kNever; }
  void check() const;

 private:
  Duration patience() const {
    return heartbeat_ * (kStallHeartbeats << std::max(std::min(refusals_, kRefusalsMax), std::min(calls_, kCallsMax)));
  }
  bool farther(const PublicationKey& key, std::uint32_t chunks);

  Duration heartbeat_{};
  TimePoint since_ = kNever;                      // the last progress towards the newest version; kNever: it is here
  TimePoint asked_at_ = kNever;                   // for help, and no answer has come
  bool parents_got_time_ = false;                 // since the last progress
  bool lost_here_ = false;                        // since something was activated
  int refusals_ = 0;                              // of the store, since something was activated
  int calls_ = 0;                                 // for help, after which nothing was heard, since the last progress
  std::map<PublicationKey, std::uint32_t> most_;  // chunks that were here, of each
};

}  // namespace echoline::overlay
