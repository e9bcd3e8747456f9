// Checks an engine's weights against the learner's log-probabilities of a text. Private to worker/engines/.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "base/result.hpp"

namespace echoline::worker {

// An engine has its own kernels and number formats, so its log-probabilities differ a little from the learner's: by
// 7e-6 nats a token in fp32 and 0.03 in bf16 (vLLM 0.32 on a CPU, SmolLM2-135M). This distance stays about the same
// from policy to policy. If a part of the weights is of an earlier policy, the distance grows with every policy.
class LearnerComparison {
 public:
  static constexpr double kDistanceMax = 0.5;      // mean nats per token; a larger distance is never accepted
  static constexpr double kRoundingMax = 5e-5;     // nats per token; smaller distances are always accepted
  static constexpr double kUsualDistancesMax = 4;  // a distance may be this many times the usual one

  // Mean absolute difference in nats per token; infinite if the lengths differ or nothing is compared.
  static double distance(std::span<const double> engine, std::span<const double> learner) {
    if (engine.size() != learner.size() || engine.empty()) return HUGE_VAL;
    double sum = 0;
    for (std::size_t i = 0; i < engine.size(); ++i) sum += std::abs(engine[i] - learner[i]);
    return sum / static_cast<double>(engine.size());
  }

  // Returns an error if the weights are not the learner's. `has_just_started`: the engine has just started with these
  // weights, so none can be of an earlier policy, and the distance is the usual one from now on.
  Status check(double distance, bool has_just_started) {
    if (!(distance <= kDistanceMax))  // not `>`, because a distance that is not a number is refused, too
      return fail(
          Code::kStale, "engine",
          "its log-probabilities of a text differ from the learner's by {:.2g} nats per token on average; at most {} "
          "is allowed: does it serve this model, with all positions and without quantisation?",
          distance, kDistanceMax);
    if (has_just_started || !usual_distance_) {
      usual_distance_ = distance;
      return ok();
    }
    if (const double limit = std::max(kRoundingMax, kUsualDistancesMax * *usual_distance_); distance > limit)
      return fail(Code::kStale, "engine",
                  "its log-probabilities of a text differ from the learner's by {:.2g} nats per token on average, and "
                  "did by {:.2g} before: a part of its weights is of an earlier policy",
                  distance, *usual_distance_);
    return ok();
  }
  // The distance with which check() compares; 0 before the first accepted check.
  double usual_distance() const { return usual_distance_.value_or(0); }

 private:
  // That of the last accepted check with `has_just_started`; without such a check, that of the first accepted one.
  std::optional<double> usual_distance_;
};

}  // namespace echoline::worker
