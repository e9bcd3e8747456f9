// Checks an engine's weights by the log-probabilities of one fixed text. Pure. Private to worker/.
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

// The differences between answers of the same weights in one process, in nats per token.
class ProbeNoise {
 public:
  static constexpr double kLeast = 2e-5;  // of answers in fp32, computed beside other requests

  void measured(double distance) { most_ = std::max(most_.value_or(0), 2 * distance); }
  // A bound by which one answer can be judged; absent: two answers are needed. `usual`: the usual distance from other
  // kernels, which answers beside other requests may have from each other.
  std::optional<double> bound(double usual) const {
    if (!most_) return std::nullopt;
    return std::max({kLeast, *most_, usual});
  }

 private:
  std::optional<double> most_;
};

// Proves that weights changed when they had to, and that the same weights are present again after a restart. Does not
// prove that changed weights are the right ones: that takes a run of the model.
class Fingerprints {
 public:
  using Values = std::vector<double>;  // nats
  static constexpr std::size_t kKept = 16;
  static constexpr double kSameMax = 0.1;  // nats per token, mean; kernels differ between processes

  enum class Verdict {
    kNew,    // unlike every earlier policy
    kSame,   // as with this policy before
    kStale,  // exactly as with another policy before
    kOther,  // not as with this policy before
  };

  // `noise`: the distance between two answers of the same weights in the same process.
  Verdict judge(const overlay::Digest& digest, const Values& values, double noise) const {
    double own = -1, nearest = std::numeric_limits<double>::infinity();
    for (const auto& [known, seen] : seen_) {
      const double apart = distance(seen, values);
      if (known == digest)
        own = apart;
      else
        nearest = std::min(nearest, apart);
    }
    if (own >= 0)
      return own <= std::max(noise, kSameMax) && own <= std::max(noise, nearest) ? Verdict::kSame : Verdict::kOther;
    return nearest <= noise ? Verdict::kStale : Verdict::kNew;
  }

  void keep(const overlay::Digest& digest, Values values) {
    std::erase_if(seen_, [&](const auto& s) { return s.first == digest; });
    seen_.emplace_back(digest, std::move(values));
    if (seen_.size() > kKept) seen_.pop_front();
  }

  // Nats per token, mean; infinite if they are not comparable.
  static double distance(const Values& a, const Values& b) {
    if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b[i]);
    return sum / static_cast<double>(a.size());
  }

 private:
  std::deque<std::pair<overlay::Digest, Values>> seen_;  // newest last
};

}  // namespace echoline::worker
