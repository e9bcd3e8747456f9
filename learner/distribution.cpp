// Statistics of values added one by one, for a run's report.
#include "learner/distribution.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kBucketsPerOctave = 64;     // so that a value is within kRelativeError of its bucket's middle
constexpr std::size_t kBytesPerBucket = 64;  // a node of the map, estimated
// Smaller values share one bucket, larger values another; there are at most 6,400 buckets.
constexpr double kBucketedMin = 1e-12, kBucketedMax = 1e18;

// The index of quantile q among `count` ascending values, by the nearest rank.
std::size_t nearest_rank_index(double q, std::uint64_t count) {
  const double nearest = std::ceil(q * static_cast<double>(count));
  return static_cast<std::size_t>(std::clamp(nearest - 1, 0.0, static_cast<double>(count - 1)));
}

}  // namespace

void Totals::add(double value) {
  if (!std::isfinite(value)) return;
  min_ = count_ == 0 ? value : std::min(min_, value);
  max_ = count_ == 0 ? value : std::max(max_, value);
  ++count_;
  sum_ += value;
  const double deviation_from_mean = value - running_mean_;
  running_mean_ += deviation_from_mean / static_cast<double>(count_);
  squared_deviations_ += deviation_from_mean * (value - running_mean_);  // from the mean before and after the value
}

std::optional<double> Totals::mean() const {
  return count_ > 0 ? std::optional(sum_ / static_cast<double>(count_)) : std::nullopt;
}

std::optional<double> Totals::deviation() const {
  return count_ > 0 ? std::optional(std::sqrt(squared_deviations_ / static_cast<double>(count_))) : std::nullopt;
}

std::int32_t Distribution::bucket_of(double value) {
  if (value < kBucketedMin) return INT32_MIN;  // the bucket of values that count as 0
  return static_cast<std::int32_t>(std::floor(std::log2(std::min(value, kBucketedMax)) * kBucketsPerOctave));
}

void Distribution::add(double value) {
  if (!std::isfinite(value)) return;
  totals_.add(value);
  if (!buckets_.empty()) {
    ++buckets_[bucket_of(value)];
    return;
  }
  exact_.push_back(value);
  if (exact_.size() <= kExactMax) return;
  for (const double exact : exact_) ++buckets_[bucket_of(exact)];
  exact_ = {};  // from now on, only the buckets count
}

std::optional<double> Distribution::quantile(double q) const {
  const std::uint64_t count = totals_.count();
  if (count == 0) return std::nullopt;
  const std::size_t position = nearest_rank_index(q, count);
  if (position == 0) return totals_.min();
  if (position + 1 == count) return totals_.max();
  if (buckets_.empty()) {
    std::vector<double> values = exact_;
    const auto nearest = values.begin() + static_cast<std::ptrdiff_t>(position);
    std::nth_element(values.begin(), nearest, values.end());
    return *nearest;
  }
  std::uint64_t values_up_to_bucket = 0;
  for (const auto& [bucket, values] : buckets_) {
    values_up_to_bucket += values;
    if (values_up_to_bucket <= position) continue;
    const double middle = bucket == INT32_MIN ? 0 : std::exp2((bucket + 0.5) / kBucketsPerOctave);
    return std::clamp(middle, *totals_.min(), *totals_.max());
  }
  return totals_.max();
}

std::size_t Distribution::memory_bytes() const {
  return exact_.capacity() * sizeof(double) + buckets_.size() * kBytesPerBucket;
}

}  // namespace echoline::learner
