// Notices that a worker comes no nearer to the newest version: the progress that counts, the time to wait for it, and
// when the worker may ask for help. Pure.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>

#include "base/clock.hpp"
#include "overlay/wire/frame.hpp"

namespace echoline::overlay {

class StallWatch {
 public:
  static constexpr int kStallHeartbeats = 20;  // without progress, before the worker asks for help
  // The time doubles with every refusal of the store, and with every call for help that nothing followed, up to so
  // many.
  static constexpr int kRefusalsMax = 3, kCallsMax = 2;
  // Publications whose chunks count as progress until one is activated or help is asked for. Without a limit, parents
  // that complete none of them would put off the call for help for ever.
  static constexpr std::size_t kBegunMax = 3;

  void set_heartbeat(Duration heartbeat) { heartbeat_ = heartbeat; }

  // The newest version is here.
  void arrived() { since_ = kNever; }
  // The newest version is not here.
  void wait(TimePoint now) {
    if (!waits()) since_ = now;
  }
  // A helper gets the full time.
  void restart(TimePoint now) {
    if (waits()) since_ = now;
  }
  // New parents get the full time, once: parents that come and go would put off the call for help for ever.
  void restart_for_parents(TimePoint now) {
    if (waits() && !std::exchange(parents_got_time_, true)) since_ = now;
  }
  // `chunks` of a publication with this key are here. They are progress if they are more than ever since the last
  // activation, and if the publication can be completed and installed (`can_end`).
  void progressed(const PublicationKey& key, std::uint32_t chunks, bool can_end, TimePoint now);
  // `newest_is_here`: the wait is over.
  void activated(bool newest_is_here, TimePoint now);
  // The present position is void.
  void begin_anew(TimePoint now) { most_.clear(), since_ = now; }
  void begin_epoch() { most_.clear(), lost_here_ = false; }
  // Chunks that are needed were lost here, and the parents take them for sent.
  void lost_here() { most_.clear(), lost_here_ = true; }
  void store_refused() { ++refusals_, lost_here(); }
  void parents_begin_anew() { lost_here_ = false; }
  bool is_lost_here() const { return lost_here_; }

  // Returns whether there was no progress for too long, once.
  bool take_stall(TimePoint now);
  // No frame came from the helper or parents since they were dialled.
  void nothing_heard() { ++calls_; }
  // Returns whether help may be asked for, and counts the call. If not, the next stall ends when it may.
  bool may_ask(Duration pause, TimePoint now);
  void help_came() { asked_at_ = kNever; }
  // This node stood still for this time.
  void postpone(Duration late);
  bool waits() const { return since_ != kNever; }
  TimePoint deadline() const { return waits() ? since_ + patience() : kNever; }
  void check() const;

 private:
  Duration patience() const {
    return heartbeat_ * (kStallHeartbeats << std::max(std::min(refusals_, kRefusalsMax), std::min(calls_, kCallsMax)));
  }
  bool farther(const PublicationKey& key, std::uint32_t chunks);

  Duration heartbeat_{};
  TimePoint since_ = kNever;     // the last progress; kNever: the newest version is here.
  TimePoint asked_at_ = kNever;  // for help, without an answer so far.
  // Since the last progress.
  bool parents_got_time_ = false;
  int calls_ = 0;
  // Since the last activation. `most_`: the most chunks that were here, of each publication.
  bool lost_here_ = false;
  int refusals_ = 0;
  std::map<PublicationKey, std::uint32_t> most_;
};

}  // namespace echoline::overlay
