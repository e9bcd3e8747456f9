// The speed of a fleet's workers: medians, and the sum of rates, updated in O(log n) per change.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/ids.hpp"
#include "replay_buffer/pace.hpp"

namespace echoline::replay_buffer {

__extension__ using Int128 = __int128;  // __extension__: no warning, although __int128 is not standard C++

// The median of a changing multiset; for an even number of values the upper one, as median() in rules.hpp.
class RunningMedian {
 public:
  void insert(double value);
  void erase(double value);  // must have been inserted
  std::optional<double> value() const;
  std::size_t size() const { return lower_.size() + upper_.size(); }

 private:
  void balance();
  // The smaller half and the larger half of the values. `upper_` begins with the median.
  std::multiset<double> lower_, upper_;
};

// The sum of all rates, each limited by capped_rate() (rules.hpp) to a multiple of the median. The sum is in fixed
// point, because a sum of doubles would depend on the order in which rates were added.
class CappedRates {
 public:
  void insert(double rate);
  void erase(double rate);
  std::optional<double> median() const { return median_.value(); }
  std::size_t size() const { return median_.size(); }
  double sum() const;

 private:
  void move_across_limit();
  RunningMedian median_;
  std::multiset<double> uncapped_, capped_;  // rates up to the limit, and those that it lowers
  Int128 uncapped_sum_ = 0;                  // sum of `uncapped_`, in units of 2^-32 groups/s
};

// The measured paces of the present workers. A worker without results has none.
class FleetPaces {
 public:
  void set(WorkerId worker, const WorkerPace& pace);
  void remove(WorkerId worker);
  std::optional<double> batch_seconds() const { return median_batch_seconds_.value(); }
  std::optional<double> seconds_per_token() const { return median_seconds_per_token_.value(); }
  const CappedRates& rates() const { return rates_; }  // groups/s

 private:
  struct Measured {
    std::optional<double> batch_s, seconds_per_token, groups_per_s;
  };
  void replace(Measured& current, const Measured& updated);
  std::unordered_map<WorkerId, Measured> measured_;
  RunningMedian median_batch_seconds_, median_seconds_per_token_;
  CappedRates rates_;
};

}  // namespace echoline::replay_buffer
