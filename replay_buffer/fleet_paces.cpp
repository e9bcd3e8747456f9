// Statistics of workers' speed, for LeaseCore.
#include "replay_buffer/fleet_paces.hpp"

#include <cmath>

#include "base/result.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr double kUnitsPerGroup = 4294967296.0;  // 2^32; fixed-point units in one group/s
constexpr double kRateMax = 1e9;                 // groups/s; the limit of a measured rate

std::int64_t fixed_point(double rate) { return static_cast<std::int64_t>(std::fmin(rate, kRateMax) * kUnitsPerGroup); }

void erase_one(std::multiset<double>& values, double value) {
  const auto it = values.find(value);
  ECHO_CHECK(it != values.end(), "the value was not inserted");
  values.erase(it);
}

}  // namespace

void RunningMedian::insert(double value) {
  if (!upper_.empty() && value >= *upper_.begin())
    upper_.insert(value);
  else
    lower_.insert(value);
  balance();
}

void RunningMedian::erase(double value) {
  if (const auto it = upper_.find(value); it != upper_.end())
    upper_.erase(it);
  else
    erase_one(lower_, value);
  balance();
}

void RunningMedian::balance() {
  const std::size_t lower_size = size() / 2;
  while (lower_.size() > lower_size) upper_.insert(lower_.extract(std::prev(lower_.end())));
  while (lower_.size() < lower_size) lower_.insert(upper_.extract(upper_.begin()));
}

std::optional<double> RunningMedian::value() const {
  return upper_.empty() ? std::nullopt : std::optional(*upper_.begin());
}

void CappedRates::insert(double rate) {
  median_.insert(rate);
  capped_.insert(rate);  // move_across_limit() moves it to uncapped_ if it is below the new limit
  move_across_limit();
}

void CappedRates::erase(double rate) {
  median_.erase(rate);
  if (const auto it = uncapped_.find(rate); it != uncapped_.end()) {
    uncapped_.erase(it);
    uncapped_sum_ -= fixed_point(rate);
  } else {
    erase_one(capped_, rate);
  }
  move_across_limit();
}

// Moves rates between uncapped_ and capped_ after the median, and with it the limit, has changed.
void CappedRates::move_across_limit() {
  const auto is_uncapped = [median_rate = median_.value()](double rate) {
    return capped_rate(rate, median_rate) == rate;
  };
  while (!capped_.empty() && is_uncapped(*capped_.begin())) {
    uncapped_sum_ += fixed_point(*capped_.begin());
    uncapped_.insert(capped_.extract(capped_.begin()));
  }
  while (!uncapped_.empty() && !is_uncapped(*uncapped_.rbegin())) {
    uncapped_sum_ -= fixed_point(*uncapped_.rbegin());
    capped_.insert(uncapped_.extract(std::prev(uncapped_.end())));
  }
}

double CappedRates::sum() const {  // every capped rate counts as the limit
  const double cap = capped_.empty() ? 0 : capped_rate(*capped_.begin(), median_.value());
  return static_cast<double>(uncapped_sum_ +
                             static_cast<Int128>(fixed_point(cap)) * static_cast<Int128>(capped_.size())) /
         kUnitsPerGroup;
}

void FleetPaces::set(WorkerId worker, const WorkerPace& pace) {
  replace(measured_[worker], {.batch_s = pace.batch_seconds(),
                              .seconds_per_token = pace.seconds_per_token(),
                              .groups_per_s = pace.groups_per_s()});
}

void FleetPaces::remove(WorkerId worker) {
  const auto it = measured_.find(worker);
  if (it == measured_.end()) return;
  replace(it->second, Measured{});
  measured_.erase(it);
}

void FleetPaces::replace(Measured& current, const Measured& updated) {
  const auto replace_value = [](auto& values, const std::optional<double>& before, const std::optional<double>& after) {
    if (before == after) return;
    if (before) values.erase(*before);
    if (after) values.insert(*after);
  };
  replace_value(median_batch_seconds_, current.batch_s, updated.batch_s);
  replace_value(median_seconds_per_token_, current.seconds_per_token, updated.seconds_per_token);
  replace_value(rates_, current.groups_per_s, updated.groups_per_s);
  current = updated;
}

}  // namespace echoline::replay_buffer
