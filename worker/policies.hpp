// Published policies that wait for their installation, and the time that installations took. No I/O, no clock. Private
// to worker/.
#pragma once
#include <deque>

#include "base/result.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

// First in, first out. At most one policy is being installed at a time.
class InstallationQueue {
 public:
  struct Counts {
    std::uint64_t installed = 0;
    // Sums over all installations: from the complete arrival of the publication until its installation began, and from
    // then until the policy was in place and reported.
    Duration total_wait{}, total_install_time{};
  };

  // `publication`: has arrived completely, and is newer than all before.
  void add(overlay::Publication publication, TimePoint arrived) {
    waiting_.push_back({std::move(publication), arrived});
  }
  bool empty() const { return waiting_.empty(); }
  // Removes and returns the oldest policy (there must be one). Its `activate` is false if a newer one waits: the engine
  // then need not generate with it. The installation lasts until on_installed() or on_failed().
  overlay::Publication begin_installation(TimePoint now) {
    ECHO_CHECK(installation_begun_ == kNever, "{} policies wait, and one is in installation", waiting_.size());
    ECHO_CHECK(!waiting_.empty(), "0 policies wait");
    auto [publication, arrived] = std::move(waiting_.front());
    waiting_.pop_front();
    const bool newer_waits = !waiting_.empty();
    if (newer_waits) publication.activate = false;
    current_wait_ = now - arrived;
    installation_begun_ = now;
    return std::move(publication);
  }
  void on_installed(TimePoint now) {
    ++counts_.installed;
    counts_.total_wait += current_wait_;
    counts_.total_install_time += now - installation_begun_;
    installation_begun_ = kNever;
  }
  void on_failed() { installation_begun_ = kNever; }
  const Counts& counts() const { return counts_; }
  void check() const {
    ECHO_CHECK(counts_.installed > 0 || counts_.total_install_time == Duration(0), "time without an installation");
    ECHO_CHECK(counts_.total_wait >= Duration(0) && counts_.total_install_time >= Duration(0),
               "an installation before its publication");
  }

 private:
  struct Waiting {
    overlay::Publication publication;
    TimePoint arrived;
  };
  std::deque<Waiting> waiting_;
  TimePoint installation_begun_ = kNever;  // kNever: none is in progress
  Duration current_wait_{};                // time that the policy in installation had waited
  Counts counts_;
};

}  // namespace echoline::worker
