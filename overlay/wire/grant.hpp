// A grant: the learner's signed assignment, with which a parent serves a child it does not know. It is valid for twice
// the time that the learner keeps an absent worker, and is renewed after half of that. So a fleet without its learner
// keeps forwarding at least as long as its workers wait. Pure.
#pragma once
#include <algorithm>

#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct Grant {
  struct From {
    WorkerId parent;
    std::uint64_t stripes = 1;  // bit j: stripe j
    friend bool operator==(const From&, const From&) = default;
  };
  std::string run_id;
  WorkerId child;
  std::uint64_t issued = 0;           // LearnerCore::issue_time
  std::uint64_t expires_unix_ms = 0;  // by the learner's clock
  std::uint32_t stripes = 1;
  std::vector<From> from;
  std::optional<Version> catch_up_to;  // help up to this version, by the one parent named
  bool full_only = false;
  friend bool operator==(const Grant&, const Grant&) = default;
};

inline constexpr std::size_t kGrantBytesMax = 2048;  // with 64 parents; below kStrangerBytesMax
inline constexpr Duration kGrantLifetimeMin = std::chrono::minutes(2);
constexpr Duration grant_lifetime(Duration away_max) { return std::max(kGrantLifetimeMin, 2 * away_max); }
constexpr std::uint64_t grant_lifetime_ms(Duration away_max) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(grant_lifetime(away_max)).count());
}

SignedGrant sign(const Grant& grant, const trust::SigningKey& key);
// kCorrupt: not signed by this run's learner, of another run, or breaking a limit.
Result<Grant> open(const Checker& checker, const SignedGrant& grant);

// The grants shown by the children of one node. References must outlive it.
class GrantBook {
 public:
  GrantBook(const Checker& checker, WorkerId self) : checker_(checker), self_(self) {}

  // Call before serving a child. kCorrupt, kInvalid or kStale with the reason.
  Status show(WorkerId child, const PeerHello& hello, std::uint64_t now_unix_ms);
  // Replaces a shown grant by a newer one.
  Status show_anew(WorkerId child, const SignedGrant& grant, std::uint64_t now_unix_ms);
  Status check_wanted(WorkerId child, const StripeMask& wanted) const;
  // A message of the learner with issue time `issued` was received. A grant issued `lifetime_ms` before it has ended,
  // whatever the clock says: the learner's clock can go back, its issue times (LearnerCore::issue_time) cannot.
  void heard(std::uint64_t issued, std::uint64_t lifetime_ms) {
    ended_until_ = std::max(ended_until_, issued - std::min(issued, lifetime_ms));
  }
  // The learner has given the child other parents: grants issued up to `issued` end here.
  void release(WorkerId child, std::uint64_t issued, std::uint64_t forget_at_unix_ms);
  // Removes and returns the children whose grants have ended. The second value: the child was helped.
  std::vector<std::pair<WorkerId, bool>> take_ended(std::uint64_t now_unix_ms);
  void forget(WorkerId child, bool helped) { shown_.erase({child, helped}); }

 private:
  static constexpr std::size_t kReleasedMax = 4096;
  struct Shown {
    SignedGrant as_signed;
    Grant grant;
  };
  Status check(const Grant& grant, WorkerId child, std::uint64_t now_unix_ms) const;

  const Checker& checker_;
  WorkerId self_;
  std::uint64_t ended_until_ = 0;                     // by issue time
  std::map<std::pair<WorkerId, bool>, Shown> shown_;  // key: the child, and whether it is helped
  // latest ended issue time, and when to forget the entry
  std::map<WorkerId, std::pair<std::uint64_t, std::uint64_t>> released_;
};

}  // namespace echoline::overlay
