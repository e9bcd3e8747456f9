// Count, sum, extremes and quantiles of many values, added one by one. Beyond kExactMax values, memory does not grow
// with their number.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace echoline::learner {

// Sums of finite values; other values are ignored.
class Totals {
 public:
  void add(double value);
  std::uint64_t count() const { return count_; }
  double sum() const { return sum_; }
  // Absent without values.
  std::optional<double> mean() const;
  std::optional<double> deviation() const;  // of the population
  std::optional<double> min() const { return count_ > 0 ? std::optional(min_) : std::nullopt; }
  std::optional<double> max() const { return count_ > 0 ? std::optional(max_) : std::nullopt; }

 private:
  std::uint64_t count_ = 0;
  double sum_ = 0, min_ = 0, max_ = 0;
  double running_mean_ = 0, squared_deviations_ = 0;  // Welford's running mean, and the squared distances from it
};

// Quantiles of finite, non-negative values. They are exact up to kExactMax values, and within kRelativeError beyond
// that. The order of the values does not matter.
class Distribution {
 public:
  static constexpr std::size_t kExactMax = 65'536;
  static constexpr double kRelativeError = 0.006;

  void add(double value);
  const Totals& totals() const { return totals_; }
  // The value below which a fraction q of the values lies (nearest rank); absent without values.
  std::optional<double> quantile(double q) const;
  // The memory that grows with the number of values, at most 1.2 MB.
  std::size_t memory_bytes() const;

 private:
  static std::int32_t bucket_of(double value);
  Totals totals_;
  std::vector<double> exact_;
  std::map<std::int32_t, std::uint64_t> buckets_;  // bucket -> number of values; empty up to kExactMax values
};

}  // namespace echoline::learner
