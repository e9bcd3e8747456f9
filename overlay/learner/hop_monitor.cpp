// Measures hops and finds slow ones. Called by SlowHops and LearnerCore at every heartbeat.
#include "overlay/learner/hop_monitor.hpp"

#include <algorithm>

namespace echoline::overlay {

void HopMonitor::observe(const Hop& hop, std::uint64_t held_by_sender, std::uint64_t held_by_receiver,
                         std::optional<BitRate> expected, TimePoint now) {
  Observation& last = observed_.try_emplace(hop, Observation{now, now, now, held_by_receiver}).first->second;
  latest_ = last.seen = now;
  if (held_by_receiver < last.held) last.changed_at = now, last.held = held_by_receiver;  // another publication
  if (now > last.changed_at && held_by_receiver > last.held) {
    const double rate = static_cast<double>(held_by_receiver - last.held) / seconds(now - last.changed_at);
    Speed& speed = speeds_.try_emplace(hop, Speed{rate, 0}).first->second;
    speed.now = 0.5 * speed.now + 0.5 * rate;
    speed.best = std::max(speed.best, speed.now);
  }
  if (held_by_receiver != last.held) last.changed_at = now, last.held = held_by_receiver;

  if (held_by_sender < held_by_receiver + kGapBytesMin || now < last.first + kSettlingTime) {
    watched_.erase(hop);
    return;
  }
  const auto [it, added] = watched_.try_emplace(hop);
  Watch& watch = it->second;
  if (added || held_by_receiver < watch.held_now) watch = {now, now, held_by_receiver, held_by_receiver, {}, 0, {}};
  if (!watch.middle && now - watch.window_begin >= kGapTimeMin / 2) {
    watch.middle = now;
    watch.held_at_middle = held_by_receiver;
  }
  watch.held_now = held_by_receiver;
  watch.seen = now;
  watch.expected = expected;
}

std::optional<double> HopMonitor::median_rate() const {
  if (speeds_.size() < 3) return std::nullopt;
  std::vector<double> rates;
  for (const auto& [hop, speed] : speeds_) rates.push_back(speed.best);
  std::nth_element(rates.begin(), rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2), rates.end());
  return rates[rates.size() / 2];
}

std::optional<HopMonitor::Finding> HopMonitor::find_slow(const Hop& hop, const Watch& watch,
                                                         std::optional<double> usual, Duration patience) {
  if (watch.seen - watch.window_begin < patience) return std::nullopt;
  const auto expected = watch.expected ? std::optional(watch.expected->bytes_per_s()) : usual;
  if (!expected || watch.rate() >= (watch.expected ? kSlowFraction : kSlowFractionOfMedian) * *expected)
    return std::nullopt;
  return Finding{hop, BitRate::from_bytes_per_s(watch.rate()), BitRate::from_bytes_per_s(*expected)};
}

std::vector<HopMonitor::Finding> HopMonitor::find() {
  std::erase_if(observed_, [&](const auto& item) { return item.second.seen + kForgetAfter < latest_; });
  const auto unknown = [&](const auto& item) { return !observed_.contains(item.first); };
  std::erase_if(watched_, unknown);
  std::erase_if(speeds_, unknown);
  const auto relative_rate = [](const Finding& f) { return f.rate.bits_per_s / f.expected.bits_per_s; };
  const auto usual = median_rate();
  std::map<Hop, Finding> found;
  for (auto& [hop, watch] : watched_) {
    if (watch.seen - watch.window_begin < kGapTimeMin) continue;
    auto finding = find_slow(hop, watch, usual, kGapTimeMin);
    if (!finding) {  // fast enough over this window: the next one
      watch.window_begin = *watch.middle;
      watch.held_at_begin = watch.held_at_middle;
      watch.middle.reset();
      continue;
    }
    for (auto it = watched_.lower_bound({hop.to, WorkerId{0}}); it != watched_.end() && it->first.from == hop.to; ++it)
      if (const auto slower = find_slow(it->first, it->second, usual, kGapTimeMin / 2);
          slower && relative_rate(*slower) < relative_rate(*finding))
        finding = slower;
    found.try_emplace(finding->hop, *finding);
  }
  std::vector<Finding> worst_first;
  for (auto& [hop, finding] : found) finding.others_keep_up = keeps_up_elsewhere(hop, usual);
  for (const auto& [hop, finding] : found) {
    watched_.erase(hop);
    worst_first.push_back(finding);
  }
  std::sort(worst_first.begin(), worst_first.end(),
            [&](const Finding& a, const Finding& b) { return relative_rate(a) < relative_rate(b); });
  return worst_first;
}

bool HopMonitor::keeps_up_elsewhere(const Hop& hop, std::optional<double> usual) const {
  for (auto it = observed_.lower_bound({hop.from, WorkerId{0}}); it != observed_.end() && it->first.from == hop.from;
       ++it) {
    const Observation& last = it->second;
    if (it->first.to == hop.to || !speeds_.contains(it->first)) continue;  // nothing has gone over it
    if (last.seen < latest_ || last.seen < last.first + kSettlingTime + kGapTimeMin) continue;
    const auto watch = watched_.find(it->first);
    if (watch == watched_.end()) return true;
    if (watch->second.seen - watch->second.window_begin >= kGapTimeMin / 2 &&
        !find_slow(it->first, watch->second, usual, kGapTimeMin / 2))
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
