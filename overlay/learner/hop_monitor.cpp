// Measures hops and finds slow ones. Called by SlowHops and LearnerCore at every heartbeat.
#include "overlay/learner/hop_monitor.hpp"

#include <algorithm>

namespace echoline::overlay {
namespace {

constexpr double kNewRateWeight = 0.5;  // of a newly measured rate in the smoothed one

}  // namespace

void HopMonitor::observe(const Hop& hop, std::uint64_t held_by_sender, std::uint64_t held_by_receiver,
                         std::optional<BitRate> expected, TimePoint now) {
  Observation& observation =
      observed_
          .try_emplace(hop, Observation{.first_at = now, .changed_at = now, .last_at = now, .held = held_by_receiver})
          .first->second;
  latest_report_at_ = observation.last_at = now;
  if (held_by_receiver < observation.held)  // the bytes are of another publication
    observation.changed_at = now, observation.held = held_by_receiver;
  if (now > observation.changed_at && held_by_receiver > observation.held) {
    const double rate =
        static_cast<double>(held_by_receiver - observation.held) / seconds(now - observation.changed_at);
    Speed& speed = speeds_.try_emplace(hop, Speed{.smoothed = rate, .best = 0}).first->second;
    speed.smoothed = (1 - kNewRateWeight) * speed.smoothed + kNewRateWeight * rate;
    speed.best = std::max(speed.best, speed.smoothed);
  }
  if (held_by_receiver != observation.held) observation.changed_at = now, observation.held = held_by_receiver;

  // The receiver keeps up, or the hop is too new to be judged.
  if (held_by_sender < held_by_receiver + kGapBytesMin || now < observation.first_at + kSettlingTime) {
    watched_.erase(hop);
    return;
  }
  const auto [it, added] = watched_.try_emplace(hop);
  Watch& watch = it->second;
  // A receiver that holds less than before has begun another publication, so the window begins again.
  if (added || held_by_receiver < watch.held_now)
    watch = {.window_begin = now,
             .observed_at = now,
             .held_at_begin = held_by_receiver,
             .held_now = held_by_receiver,
             .next_window_begin = {},
             .held_at_next_begin = 0,
             .expected = {}};
  if (!watch.next_window_begin && now - watch.window_begin >= kGapTimeMin / 2) {
    watch.next_window_begin = now;
    watch.held_at_next_begin = held_by_receiver;
  }
  watch.held_now = held_by_receiver;
  watch.observed_at = now;
  watch.expected = expected;
}

std::optional<double> HopMonitor::median_rate() const {
  if (speeds_.size() < 3) return std::nullopt;  // too few to compare
  std::vector<double> rates;
  for (const auto& [hop, speed] : speeds_) rates.push_back(speed.best);
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

std::optional<HopMonitor::Finding> HopMonitor::find_slow(const Hop& hop, const Watch& watch,
                                                         std::optional<double> median, Duration gap_time_min) {
  if (watch.observed_at - watch.window_begin < gap_time_min) return std::nullopt;
  const auto expected = watch.expected ? std::optional(watch.expected->bytes_per_s()) : median;
  if (!expected || watch.bytes_per_s() >= (watch.expected ? kSlowFraction : kSlowFractionOfMedian) * *expected)
    return std::nullopt;
  return Finding{hop, BitRate::from_bytes_per_s(watch.bytes_per_s()), BitRate::from_bytes_per_s(*expected)};
}

std::vector<HopMonitor::Finding> HopMonitor::find() {
  std::erase_if(observed_, [&](const auto& item) { return item.second.last_at + kForgetAfter < latest_report_at_; });
  const auto is_not_observed = [&](const auto& item) { return !observed_.contains(item.first); };
  std::erase_if(watched_, is_not_observed);
  std::erase_if(speeds_, is_not_observed);
  const auto relative_rate = [](const Finding& finding) {
    return finding.rate.bits_per_s / finding.expected.bits_per_s;
  };
  const auto median = median_rate();
  std::map<Hop, Finding> found;
  for (auto& [hop, watch] : watched_) {
    if (watch.observed_at - watch.window_begin < kGapTimeMin) continue;
    auto finding = find_slow(hop, watch, median, kGapTimeMin);
    if (!finding) {                                   // fast enough over this window: go on with the next one
      watch.window_begin = *watch.next_window_begin;  // set in the middle of this window
      watch.held_at_begin = watch.held_at_next_begin;
      watch.next_window_begin.reset();
      continue;
    }
    // If the receiver sends more slowly still, its exhausted uplink is the cause: take that hop instead. Its window may
    // just have moved on, and then covers half of the time. {hop.to, 0} is before all hops from this worker.
    for (auto it = watched_.lower_bound({hop.to, WorkerId{0}}); it != watched_.end() && it->first.from == hop.to; ++it)
      if (const auto slower = find_slow(it->first, it->second, median, kGapTimeMin / 2);
          slower && relative_rate(*slower) < relative_rate(*finding))
        finding = slower;
    found.try_emplace(finding->hop, *finding);
  }
  std::vector<Finding> worst_first;
  for (auto& [hop, finding] : found) finding.others_keep_up = keeps_up_elsewhere(hop, median);
  for (const auto& [hop, finding] : found) {
    watched_.erase(hop);
    worst_first.push_back(finding);
  }
  std::sort(worst_first.begin(), worst_first.end(),
            [&](const Finding& a, const Finding& b) { return relative_rate(a) < relative_rate(b); });
  return worst_first;
}

bool HopMonitor::keeps_up_elsewhere(const Hop& hop, std::optional<double> median) const {
  for (auto it = observed_.lower_bound({hop.from, WorkerId{0}}); it != observed_.end() && it->first.from == hop.from;
       ++it) {
    const Observation& observation = it->second;
    if (it->first.to == hop.to || !speeds_.contains(it->first)) continue;  // without a speed, nothing has crossed it
    if (observation.last_at < latest_report_at_ ||
        observation.last_at < observation.first_at + kSettlingTime + kGapTimeMin)
      continue;
    const auto watch = watched_.find(it->first);
    if (watch == watched_.end()) return true;  // its receiver is not behind
    if (watch->second.observed_at - watch->second.window_begin >= kGapTimeMin / 2 &&
        !find_slow(it->first, watch->second, median, kGapTimeMin / 2))
      return true;
  }
  return false;
}

void HopMonitor::forget(WorkerId worker) {
  const auto involves_worker = [&](const auto& item) { return item.first.from == worker || item.first.to == worker; };
  std::erase_if(watched_, involves_worker);
  std::erase_if(speeds_, involves_worker);
  std::erase_if(observed_, involves_worker);
}

}  // namespace echoline::overlay
