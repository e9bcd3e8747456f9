// Whether an engine has the policy's weights: by what the learner says of a text. Private to worker/engines/.
#pragma once
#include <algorithm>
#include <cmath>
#include <optional>
#include <span>

#include "base/result.hpp"

namespace echoline::worker {

// Kernels and number formats of an engine are its own, so its log-probabilities differ a little from the learner's: by
// 7e-6 nats a token in fp32 and 0.03 in bf16 (vLLM 0.32 on a CPU, SmolLM2-135M). That distance stays about the same
// from policy to policy. It grows with every policy if a part of the weights stays behind.
class Truth {
 public:
  static constexpr double kFarthest = 0.5;  // nats a token, in the mean
  static constexpr double kLeast = 5e-5;    // a distance below it is rounding, whatever was usual
  static constexpr double kGrowth = 4;      // times what was usual

  static double distance(std::span<const double> engine, std::span<const double> learner) {
    if (engine.size() != learner.size() || engine.empty()) return HUGE_VAL;
    double sum = 0;
    for (std::size_t i = 0; i < engine.size(); ++i) sum += std::abs(engine[i] - learner[i]);
    return sum / static_cast<double>(engine.size());
  }

  // `fresh`: the engine has just begun with these weights, so that none can be of an earlier policy.
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
