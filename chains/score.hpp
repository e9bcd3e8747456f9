// How good a peer is at forwarding: the score that orders chains, and the role a failing peer falls to.
#pragma once
#include <cstdint>
#include <optional>

#include "base/units.hpp"

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

// Steps down one role after every three failures in a row, and up again after ten versions installed without one; a
// success ends a row of failures.
class RoleLadder {
 public:
  static constexpr int kFailuresPerStep = 3;
  static constexpr int kInstalledPerStep = 10;
  Role role() const { return role_; }
  int consecutive_failures() const { return failures_; }
  void succeeded() { failures_ = 0; }
  // Both return whether the role changed.
  bool failed();
  bool installed();

 private:
  Role role_ = Role::kSeed;
  int failures_ = 0, installed_ = 0;
};

}  // namespace echoline::chains
