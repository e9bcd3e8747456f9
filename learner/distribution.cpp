#include "learner/distribution.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kBucketsPerOctave = 64;
// Smaller and larger values share a bucket; 6,400 buckets in all.
constexpr double kLeastTold = 1e-12, kMostTold = 1e18;

std::size_t rank(double q, std::uint64_t count) {
  const double nearest = std::ceil(q * static_cast<double>(count));
  return static_cast<std::size_t>(std::clamp(nearest - 1, 0.0, static_cast<double>(count - 1)));
}

}  // namespace

void Totals::add(double value) {
  if (!std::isfinite(value)) return;
  least_ = count_ == 0 ? value : std::min(least_, value);
  most_ = count_ == 0 ? value : std::max(most_, value);
  ++count_;
  sum_ += value;
  const double off = value - middle_;
  middle_ += off / static_cast<double>(count_);
  squares_ += off * (value - middle_);
}

std::optional<double> Totals::mean() const {
  return count_ > 0 ? std::optional(sum_ / static_cast<double>(count_)) : std::nullopt;
}

std::optional<double> Totals::deviation() const {
  return count_ > 0 ? std::optional(std::sqrt(squares_ / static_cast<double>(count_))) : std::nullopt;
}

std::int32_t Distribution::bucket(double value) {
  if (value < kLeastTold) return INT32_MIN;
  return static_cast<std::int32_t>(std::floor(std::log2(std::min(value, kMostTold)) * kBucketsPerOctave));
}

void Distribution::add(double value) {
  if (!std::isfinite(value)) return;
  totals_.add(value);
  if (!buckets_.empty()) {
    ++buckets_[bucket(value)];
    return;
  }
  exact_.push_back(value);
  if (exact_.size() <= kExactMax) return;
  for (const double one : exact_) ++buckets_[bucket(one)];
  exact_ = {};
}

std::optional<double> Distribution::quantile(double q) const {
  const std::uint64_t count = totals_.count();
  if (count == 0) return std::nullopt;
  const std::size_t wanted = rank(q, count);
  if (wanted == 0) return totals_.least();
  if (wanted + 1 == count) return totals_.most();
  if (buckets_.empty()) {
    std::vector<double> values = exact_;
    const auto at = values.begin() + static_cast<std::ptrdiff_t>(wanted);
    std::nth_element(values.begin(), at, values.end());
    return *at;
  }
  std::uint64_t below = 0;
  for (const auto& [b, n] : buckets_) {
    below += n;
    if (below <= wanted) continue;
    const double middle = b == INT32_MIN ? 0 : std::exp2((b + 0.5) / kBucketsPerOctave);
    return std::clamp(middle, *totals_.least(), *totals_.most());
  }
  return totals_.most();
}

std::size_t Distribution::memory_bytes() const { return exact_.capacity() * sizeof(double) + buckets_.size() * 64; }

}  // namespace echoline::learner
