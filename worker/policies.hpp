// Published policies that wait for their installation, and the time that installations took. Pure. Private to worker/.
#pragma once
#include <deque>

#include "base/result.hpp"
#include "overlay/types.hpp"

namespace echoline::worker {

class Policies {
 public:
  struct Counts {
    std::uint64_t installed = 0;
    Duration waits{};  // sums over them: from the complete publication until the installation began,
    Duration times{};  // and from then until the policy was in place and reported
  };

  // Publications come complete and in order.
  void add(overlay::Publication publication, TimePoint arrived) {
    waiting_.push_back({std::move(publication), arrived});
  }
  bool empty() const { return waiting_.empty(); }
  // The oldest (there is one), not to be activated if a newer one waits behind it. It is being installed until
  // installed() or failed().
  overlay::Publication begin(TimePoint now) {
    ECHO_CHECK(begun_ == kNever && !waiting_.empty(), "{} policies wait", waiting_.size());
    auto [publication, arrived] = std::move(waiting_.front());
    waiting_.pop_front();
    if (!waiting_.empty()) publication.activate = false;
    waited_ = now - arrived;
    begun_ = now;
    return std::move(publication);
  }
  void installed(TimePoint now) {
    ++counts_.installed;
    counts_.waits += waited_;
    counts_.times += now - begun_;
    begun_ = kNever;
  }
  void failed() { begun_ = kNever; }
  const Counts& counts() const { return counts_; }
  void check() const {
    ECHO_CHECK(counts_.installed > 0 || counts_.times == Duration(0), "time without an installation");
    ECHO_CHECK(counts_.waits >= Duration(0) && counts_.times >= Duration(0), "an installation before its publication");
  }

 private:
  struct Waiting {
    overlay::Publication publication;
    TimePoint arrived;
  };
  std::deque<Waiting> waiting_;
  TimePoint begun_ = kNever;  // not kNever: one is being installed
  Duration waited_{};         // that one
  Counts counts_;
};

}  // namespace echoline::worker
