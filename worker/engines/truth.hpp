// Checks an engine's weights against the learner's log-probabilities of a text. Private to worker/engines/.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "base/result.hpp"

namespace echoline::worker {

// An engine has its own kernels and number formats, so its log-probabilities differ a little from the learner's: by
// 7e-6 nats a token in fp32 and 0.03 in bf16 (vLLM 0.32 on a CPU, SmolLM2-135M). That distance stays about the same
// from policy to policy. If a part of the weights is stale, it grows with every policy.
class Truth {
 public:
  static constexpr double kFarthest = 0.5;  // mean nats per token
  static constexpr double kLeast = 5e-5;    // smaller distances are rounding, whatever was usual
  static constexpr double kGrowth = 4;      // times the usual distance

  static double distance(std::span<const double> engine, std::span<const double> learner) {
    if (engine.size() != learner.size() || engine.empty()) return HUGE_VAL;
    double sum = 0;
    for (std::size_t i = 0; i < engine.size(); ++i) sum += std::abs(engine[i] - learner[i]);
    return sum / static_cast<double>(engine.size());
  }

  // The distance that counts as usual; 0: none has been seen.
  double usual() const { return usual_.value_or(0); }

  // `fresh`: the engine has just started with these weights, so none can be of an earlier policy.
  Status check(double distance, bool fresh) {
    if (!(distance <= kFarthest))
      return fail(
          Code::kStale, "engine",
          "the log-probabilities that it gives a text are {:.2g} nats a token from the learner's in the mean, at "
          "most {} is allowed: does it serve this model, with all positions and without quantisation?",
          distance, kFarthest);
    if (fresh || !usual_) {
      usual_ = distance;
      return ok();
    }
    if (const double limit = std::max(kLeast, kGrowth * *usual_); distance > limit)
      return fail(Code::kStale, "engine",
                  "the log-probabilities that it gives a text are {:.2g} nats a token from the learner's in the mean, "
                  "and were {:.2g}: a part of its weights is of an earlier policy",
                  distance, *usual_);
    return ok();
  }

 private:
  std::optional<double> usual_;
};

}  // namespace echoline::worker
