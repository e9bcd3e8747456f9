// Checks an engine's weights by the log-probabilities of one fixed text. No I/O, no clock. Private to worker/.
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "overlay/types.hpp"

namespace echoline::worker {

// Bounds how much two answers to one probe (the log-probabilities of a fixed text) can differ although the weights are
// the same. In nats per token, for one process of the server.
class ProbeNoise {
 public:
  // Nats per token. Two fp32 answers can differ this much if the server computes other requests at the same time.
  static constexpr double kNoiseMin = 2e-5;

  // Records the distance of two answers under the same weights. Twice the largest distance becomes the bound, because
  // other answers may differ by more than these two.
  void record_distance(double distance) { bound_ = std::max(bound_.value_or(0), 2 * distance); }
  // The noise to assume when a single answer is judged. Absent: no distance was recorded, so two answers are needed.
  // `usual_distance`: LearnerComparison::usual_distance(); answers may differ that much while the server computes other
  // requests.
  std::optional<double> bound(double usual_distance) const {
    if (!bound_) return std::nullopt;
    return std::max({kNoiseMin, *bound_, usual_distance});
  }

 private:
  std::optional<double> bound_;  // nats per token; absent: no distance was recorded
};

// Shows that weights changed when they had to, and that the same weights are present again after a restart. Does not
// show that changed weights are the right ones; LearnerComparison does that, if the learner sends its
// log-probabilities.
class Fingerprints {
 public:
  using Values = std::vector<double>;              // log-probabilities of the text's tokens, nats
  static constexpr std::size_t kPoliciesMax = 16;  // number of policies whose answers are kept
  // Mean nats per token. Answers of one policy may differ this much, because kernels differ between server processes.
  static constexpr double kSameMax = 0.1;

  enum class Verdict {
    kNew,    // the policy has no earlier answer, and this one differs from those of all others
    kSame,   // equal to this policy's earlier answer
    kStale,  // the policy has no earlier answer, and this one equals another policy's
    kOther,  // differs from this policy's earlier answer
  };

  // `noise`: the distance between two answers of the same weights in the same process.
  Verdict judge(const overlay::Digest& digest, const Values& values, double noise) const {
    std::optional<double> own_distance;  // absent: this policy has no earlier answer
    double nearest_other = std::numeric_limits<double>::infinity();
    for (const auto& [earlier_digest, earlier_values] : answers_) {
      const double earlier_distance = distance(earlier_values, values);
      if (earlier_digest == digest)
        own_distance = earlier_distance;
      else
        nearest_other = std::min(nearest_other, earlier_distance);
    }
    // Under the same weights, the answer is near this policy's earlier answer, and not nearer to another policy's.
    // Differences within the noise do not count.
    if (own_distance) {
      const bool is_near = *own_distance <= std::max(noise, kSameMax);
      const bool is_nearest = *own_distance <= std::max(noise, nearest_other);
      return is_near && is_nearest ? Verdict::kSame : Verdict::kOther;
    }
    return nearest_other <= noise ? Verdict::kStale : Verdict::kNew;
  }

  void keep(const overlay::Digest& digest, Values values) {
    std::erase_if(answers_, [&](const auto& answer) { return answer.first == digest; });
    answers_.emplace_back(digest, std::move(values));
    if (answers_.size() > kPoliciesMax) answers_.pop_front();
  }

  // Mean absolute difference in nats per token; infinite if the lengths differ or nothing is compared.
  static double distance(const Values& a, const Values& b) {
    if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
    return sum / static_cast<double>(a.size());
  }

 private:
  std::deque<std::pair<overlay::Digest, Values>> answers_;  // newest last
};

}  // namespace echoline::worker
