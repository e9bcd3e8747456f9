// Rates a peer's forwarding. A peer is a worker that passes payloads on. Its score decides its place in chains, and its
// failures and deliveries decide its role.
#pragma once
#include <cstdint>
#include <optional>

#include "base/clock.hpp"

namespace echoline::chains {

// The learner's observations of one peer.
struct PeerStats {
  BitRate forwarding_rate;      // measured while it forwarded
  std::optional<BitRate> cap;   // its allowed rate; absent: none, so that the score counts the full bandwidth
  std::uint32_t attempts = 0;   // forwards begun
  std::uint32_t successes = 0;  // forwards finished, at most `attempts`
  Duration age{};               // since its last message
};

struct ScoreWeights {
  double bandwidth = 0.60;
  double success = 0.25;
  double freshness = 0.15;
  std::uint32_t attempts_trusted = 20;  // with fewer attempts the success rate counts less
  Duration age_scale = std::chrono::seconds(300);
};

// Returns bandwidth * min(1, forwarding_rate / cap) + success * (successes / max(attempts, attempts_trusted))
//   + freshness * exp(-age / age_scale); in [0, 1] for the default weights. (ECHO-2 App. C.3.)
double peer_score(const PeerStats& stats, const ScoreWeights& weights = {});

// A peer's place in the topology. A seed may be anywhere. A tail forwards but is not placed first. A rollout-only peer
// receives and generates but does not forward.
enum class Role { kSeed, kTail, kRolloutOnly };

// A peer's role over time. It falls a step at each failure and rises a step for every ten deliveries to other peers.
// Payloads that the peer itself receives do not count, because they say nothing about its uplink. A rollout-only peer
// may try again as a tail after a pause, which doubles each time until the peer is a seed again.
class RoleLadder {
 public:
  static constexpr int kDeliveriesToPromote = 10;
  static constexpr Duration kPause = std::chrono::minutes(2), kPauseMax = std::chrono::hours(1);

  RoleLadder() = default;
  // A peer with a role from an earlier process. The number of its earlier pauses is not known, so this pause is not
  // counted: the next one is kPause again. Only kRolloutOnly has a pause.
  RoleLadder(Role role, TimePoint now) : role_(role), paused_until_(now + kPause) {}
  Role role() const { return role_; }
  // All three return whether the role changed. retry_if_rested() makes a rollout-only peer a tail once its pause is
  // over.
  bool demote(TimePoint now);
  bool record_delivery();
  bool retry_if_rested(TimePoint now);

 private:
  Role role_ = Role::kSeed;
  int deliveries_ = 0;            // to other peers, since the role changed
  Duration next_pause_ = kPause;  // length of the pause after the next fall to kRolloutOnly
  TimePoint paused_until_{};      // of the last pause
};

}  // namespace echoline::chains
