#include "replay_buffer/fleet_paces.hpp"

#include <cmath>

#include "base/result.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr double kUnitsPerGroup = 4294967296.0;  // 2^32
constexpr double kRateMax = 1e9;                 // groups/s; the limit of a measured rate

std::int64_t units(double rate) { return static_cast<std::int64_t>(std::fmin(rate, kRateMax) * kUnitsPerGroup); }

void erase_one(std::multiset<double>& values, std::multiset<double>::iterator at) {
  ECHO_CHECK(at != values.end(), "the value was not inserted");
  values.erase(at);
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
  if (const auto at = upper_.find(value); at != upper_.end())
    upper_.erase(at);
  else
    erase_one(lower_, lower_.find(value));
  balance();
}

void RunningMedian::balance() {
  const std::size_t below = size() / 2;
  while (lower_.size() > below) upper_.insert(lower_.extract(std::prev(lower_.end())));
  while (lower_.size() < below) lower_.insert(upper_.extract(upper_.begin()));
}

std::optional<double> RunningMedian::value() const {
  return upper_.empty() ? std::nullopt : std::optional(*upper_.begin());
}

void CountedRates::insert(double rate) {
  median_.insert(rate);
  beyond_.insert(rate);
  move_limit();
}

void CountedRates::erase(double rate) {
  median_.erase(rate);
  if (const auto at = within_.find(rate); at != within_.end()) {
    within_.erase(at);
    sum_within_ -= units(rate);
  } else {
    erase_one(beyond_, beyond_.find(rate));
  }
  move_limit();
}

void CountedRates::move_limit() {
  const auto counts_whole = [limit = median_.value()](double rate) { return rate_that_counts(rate, limit) == rate; };
  while (!beyond_.empty() && counts_whole(*beyond_.begin())) {
    sum_within_ += units(*beyond_.begin());
    within_.insert(beyond_.extract(beyond_.begin()));
  }
  while (!within_.empty() && !counts_whole(*within_.rbegin())) {
    sum_within_ -= units(*within_.rbegin());
    beyond_.insert(within_.extract(std::prev(within_.end())));
  }
}

double CountedRates::sum() const {
  const double most = beyond_.empty() ? 0 : rate_that_counts(*beyond_.begin(), median_.value());
  return static_cast<double>(sum_within_ + static_cast<Int128>(units(most)) * static_cast<Int128>(beyond_.size())) /
         kUnitsPerGroup;
}

void FleetPaces::set(WorkerId worker, const WorkerPace& pace) {
  replace(measured_[worker], {pace.batch_seconds(), pace.seconds_per_token(), pace.groups_per_s()});
}

void FleetPaces::remove(WorkerId worker) {
  const auto it = measured_.find(worker);
  if (it == measured_.end()) return;
  replace(it->second, {});
  measured_.erase(it);
}

void FleetPaces::replace(Measured& of, const Measured& by) {
  const auto move = [](auto& values, const std::optional<double>& before, const std::optional<double>& after) {
    if (before == after) return;
    if (before) values.erase(*before);
    if (after) values.insert(*after);
  };
  move(batches_, of.batch_s, by.batch_s);
  move(tokens_, of.seconds_per_token, by.seconds_per_token);
  move(rates_, of.groups_per_s, by.groups_per_s);
  of = by;
}

}  // namespace echoline::replay_buffer
