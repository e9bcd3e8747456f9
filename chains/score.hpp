// How good a peer is at forwarding: the score that orders chains, and the role a failing peer falls to.
#pragma once
#include <cstdint>
#include <optional>

#include "base/clock.hpp"

namespace echoline::chains {

// What the learner has seen of one peer.
struct PeerStats {
  BitRate forwarding_rate;      // measured while it forwarded
  std::optional<BitRate> cap;   // the rate it is allowed; without a cap the bandwidth term is 1
  std::uint32_t attempts = 0;   // forwards begun
  std::uint32_t successes = 0;  // forwards finished, at most `attempts`
  Duration age{};               // since it was last heard
};

struct ScoreWeights {
  double bandwidth = 0.60;
  double success = 0.25;
  double freshness = 0.15;
  std::uint32_t attempts_trusted = 20;  // success counts in full from this many attempts on
  Duration age_scale = std::chrono::seconds(300);
};

// bandwidth * min(1, rate / cap) + success * (successes / max(attempts, attempts_trusted))
//   + freshness * exp(-age / age_scale); in [0, 1] for the default weights. (ECHO-2 App. C.3.)
double peer_score(const PeerStats& stats, const ScoreWeights& weights = {});

// What a peer may do in the topology. A seed may stand anywhere; a tail forwards but is not put first; a
// rollout-only peer receives and generates but forwards to nobody.
enum class Role { kSeed, kTail, kRolloutOnly };

// Steps down a role when it is found to fail, and up again for every ten deliveries to others: what it installs itself
// says nothing about its uplink. Who may not forward at all is given another try after a while, longer every time.
class RoleLadder {
 public:
  static constexpr int kDeliveriesPerStep = 10;
  static constexpr Duration kRest = std::chrono::minutes(2), kRestMax = std::chrono::hours(1);

  RoleLadder() = default;
  RoleLadder(Role role, TimePoint now) : role_(role), rests_until_(now + kRest) {}
  Role role() const { return role_; }
  // All return whether the role changed.
  bool demoted(TimePoint now);
  bool delivered();
  bool tries_again(TimePoint now);

 private:
  Role role_ = Role::kSeed;
  int deliveries_ = 0;
  Duration rest_ = kRest;
  TimePoint rests_until_{};
};

}  // namespace echoline::chains
