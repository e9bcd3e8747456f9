// How fast the workers of a fleet are: medians, and the sum of their rates, kept up to date in O(log n) a change.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/ids.hpp"
#include "replay_buffer/pace.hpp"

namespace echoline::replay_buffer {

__extension__ using Int128 = __int128;

// The median of a multiset that changes; of an even number of values the upper one, as median() in rules.hpp.
class RunningMedian {
 public:
  void insert(double value);
  void erase(double value);  // one that was inserted
  std::optional<double> value() const;
  std::size_t size() const { return lower_.size() + upper_.size(); }

 private:
  void balance();
  std::multiset<double> lower_,
      upper_;  // no value of `lower_` is above one of `upper_`; `upper_` begins with the median
};

// The sum of rates of which each counts as rate_that_counts() says, so by the median of them all. Kept in fixed point:
// it depends on the rates alone and not on the order in which they came.
class CountedRates {
 public:
  void insert(double rate);
  void erase(double rate);
  std::optional<double> median() const { return median_.value(); }
  std::size_t size() const { return median_.size(); }
  double sum() const;

 private:
  void move_limit();
  RunningMedian median_;
  std::multiset<double> within_, beyond_;  // the limit of what counts
  Int128 sum_within_ = 0;                  // in units of 2^-32
};

// The measured paces of the workers that are there. A worker without results has none.
class FleetPaces {
 public:
  void set(WorkerId worker, const WorkerPace& pace);
  void remove(WorkerId worker);
  std::optional<double> batch_seconds() const { return batches_.value(); }
  std::optional<double> seconds_per_token() const { return tokens_.value(); }
  const CountedRates& rates() const { return rates_; }  // groups/s

 private:
  struct Measured {
    std::optional<double> batch_s, seconds_per_token, groups_per_s;
  };
  void replace(Measured& of, const Measured& by);
  std::unordered_map<WorkerId, Measured> measured_;
  RunningMedian batches_, tokens_;
  CountedRates rates_;
};

}  // namespace echoline::replay_buffer
