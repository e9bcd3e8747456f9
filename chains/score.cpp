// Scores and roles of peers, for the learner's records of conduct.
#include "chains/score.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::chains {

double peer_score(const PeerStats& stats, const ScoreWeights& weights) {
  double bandwidth = 1;  // without a cap
  if (stats.cap)
    bandwidth = stats.cap->bits_per_s > 0 ? std::min(1.0, stats.forwarding_rate.bits_per_s / stats.cap->bits_per_s) : 0;
  // At least attempts_trusted, so that a peer with few attempts cannot have a high success rate. Not 0, because it is a
  // divisor.
  const std::uint32_t attempts_counted = std::max({stats.attempts, weights.attempts_trusted, 1u});
  // min(): a caller that counts more successes than attempts must not raise the score above its range.
  const double success = static_cast<double>(std::min(stats.successes, stats.attempts)) / attempts_counted;
  const double freshness = std::exp(-std::max(0.0, seconds(stats.age)) / seconds(weights.age_scale));
  return weights.bandwidth * bandwidth + weights.success * success + weights.freshness * freshness;
}

bool RoleLadder::demote(TimePoint now) {
  deliveries_ = 0;
  if (role_ == Role::kRolloutOnly) return false;
  role_ = role_ == Role::kSeed ? Role::kTail : Role::kRolloutOnly;
  if (role_ == Role::kRolloutOnly) {
    paused_until_ = now + next_pause_;
    next_pause_ = std::min<Duration>(2 * next_pause_, kPauseMax);
  }
  return true;
}

bool RoleLadder::record_delivery() {
  if (role_ == Role::kSeed || ++deliveries_ < kDeliveriesToPromote) return false;
  deliveries_ = 0;
  // A rollout-only peer still delivers if the learner lets it help a worker that missed versions. Enough of these
  // deliveries end its pause early.
  role_ = role_ == Role::kRolloutOnly ? Role::kTail : Role::kSeed;
  if (role_ == Role::kSeed) next_pause_ = kPause;
  return true;
}

bool RoleLadder::retry_if_rested(TimePoint now) {
  if (role_ != Role::kRolloutOnly || now < paused_until_) return false;
  role_ = Role::kTail;
  return true;
}

}  // namespace echoline::chains
