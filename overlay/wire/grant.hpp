// A grant is the learner's signed permission for a parent to serve a child that the parent does not know. It is valid
// for twice away_max, the time that workers and learner wait for each other, and is renewed after half of that. So if
// the learner is down, parents keep serving for at least as long as the workers wait for it. No I/O and no clock.
#pragma once
#include <algorithm>

#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct Grant {
  struct From {
    WorkerId parent;
    std::uint64_t stripe_mask = 1;  // bit j: stripe j
    friend bool operator==(const From&, const From&) = default;
  };
  std::string run_id;
  WorkerId child;
  std::uint64_t issued = 0;           // the learner's issue time [ms]; never goes back (LearnerCore::issue_time)
  std::uint64_t expires_unix_ms = 0;  // by the learner's clock
  std::uint32_t stripe_count = 1;
  std::vector<From> from;
  // If set, this is a temporary grant for help: the one parent in `from` sends publications that the child's own
  // parents cannot send, up to this version.
  std::optional<Version> catch_up_to;
  bool full_only = false;  // help by a full snapshot: the child cannot install deltas
  friend bool operator==(const Grant&, const Grant&) = default;
};

inline constexpr std::size_t kGrantBytesMax = 2048;  // with 64 parents; below kPendingPeerBytesMax
inline constexpr Duration kGrantLifetimeMin = std::chrono::minutes(2);
constexpr Duration grant_lifetime(Duration away_max) { return std::max(kGrantLifetimeMin, 2 * away_max); }
constexpr std::uint64_t grant_lifetime_ms(Duration away_max) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(grant_lifetime(away_max)).count());
}

SignedGrant sign(const Grant& grant, const trust::SigningKey& key);
// kCorrupt: not signed by this run's learner, of another run, or breaking a limit.
Result<Grant> open(const SignatureChecker& checker, const SignedGrant& grant);

// The accepted grants of one node's children. The referenced checker must outlive this object.
class GrantBook {
 public:
  GrantBook(const SignatureChecker& checker, WorkerId self) : checker_(checker), self_(self) {}

  // Checks the grant in the child's hello and stores it. Call before serving a child. Fails with kCorrupt, kInvalid or
  // kStale.
  Status accept(WorkerId child, const PeerHello& hello, std::uint64_t now_unix_ms);
  // Checks a newer grant and replaces the stored one by it.
  Status renew(WorkerId child, const SignedGrant& grant, std::uint64_t now_unix_ms);
  // kInvalid: the stored grant does not cover these stripes.
  Status check_wanted(WorkerId child, const StripeMask& wanted) const;
  // A message of the learner with issue time `issued` was received. Ends all grants issued more than `lifetime_ms`
  // before it. Their expiry time alone does not, because the learner's clock can go back; its issue times cannot.
  void on_beacon(std::uint64_t issued, std::uint64_t lifetime_ms) {
    ended_up_to_ = std::max(ended_up_to_, issued - std::min(issued, lifetime_ms));
  }
  // The learner has given the child other parents: grants issued up to `issued` end at this node, except grants for
  // help. `forget_at_unix_ms`: when they would have expired anyway.
  void release(WorkerId child, std::uint64_t issued, std::uint64_t forget_at_unix_ms);
  // Removes and returns the children whose grants have ended. The second value: whether the grant was for help.
  std::vector<std::pair<WorkerId, bool>> take_ended(std::uint64_t now_unix_ms);
  void forget(WorkerId child, bool helped) { accepted_.erase({child, helped}); }

 private:
  static constexpr std::size_t kReleasedMax = 4096;
  struct Accepted {
    SignedGrant as_signed;
    Grant grant;
  };
  Status check(const Grant& grant, WorkerId child, std::uint64_t now_unix_ms) const;

  const SignatureChecker& checker_;
  WorkerId self_;
  std::uint64_t ended_up_to_ = 0;                           // grants issued before this issue time have ended
  std::map<std::pair<WorkerId, bool>, Accepted> accepted_;  // key: the child, and whether the grant is for help
  struct Released {
    std::uint64_t issued_up_to = 0;       // grants issued up to this issue time have ended
    std::uint64_t forget_at_unix_ms = 0;  // when this entry is no longer needed
  };
  std::map<WorkerId, Released> released_;  // by child
};

}  // namespace echoline::overlay
