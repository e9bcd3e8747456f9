#include "overlay/hop_monitor.hpp"

#include <algorithm>

namespace echoline::overlay {

void HopMonitor::observe(const Hop& hop, std::uint64_t held_by_sender, std::uint64_t held_by_receiver,
                         std::optional<BitRate> expected, TimePoint now) {
  Last& last = last_.try_emplace(hop, Last{now, held_by_receiver}).first->second;
  if (held_by_receiver < last.held) last = {now, held_by_receiver};  // another publication
  if (now > last.at && held_by_receiver > last.held) {
    const double rate = static_cast<double>(held_by_receiver - last.held) / seconds(now - last.at);
    Speed& speed = speeds_.try_emplace(hop, Speed{rate, 0}).first->second;
    speed.now = 0.5 * speed.now + 0.5 * rate;
    speed.best = std::max(speed.best, speed.now);
  }
  if (held_by_receiver != last.held) last = {now, held_by_receiver};

  if (held_by_sender < held_by_receiver + kGapBytesMin) {
    watched_.erase(hop);
    return;
  }
  const auto [it, added] = watched_.try_emplace(hop);
  Watch& watch = it->second;
  if (added || held_by_receiver < watch.held_now) {
    watch.since = now;
    watch.held_then = held_by_receiver;
  }
  watch.held_now = held_by_receiver;
  watch.seen = now;
  watch.expected = expected;
}

std::vector<HopMonitor::Finding> HopMonitor::find(TimePoint now) {
  std::vector<double> rates;
  for (const auto& [hop, speed] : speeds_) rates.push_back(speed.best);
  std::sort(rates.begin(), rates.end());
  std::vector<Finding> found;
  for (auto it = watched_.begin(); it != watched_.end();) {
    Watch& watch = it->second;
    const Duration gap = watch.seen - watch.since;
    if (gap < kPatience) {
      ++it;
      continue;
    }
    const double rate = static_cast<double>(watch.held_now - watch.held_then) / seconds(gap);
    std::optional<double> expected;
    if (watch.expected)
      expected = watch.expected->bytes_per_s();
    else if (rates.size() >= 3)
      expected = rates[rates.size() / 2];
    if (expected && rate < (watch.expected ? kSlow : kSlowOfOthers) * *expected) {
      found.push_back({it->first, BitRate::from_bytes_per_s(rate), BitRate::from_bytes_per_s(*expected)});
      it = watched_.erase(it);
      continue;
    }
    // Fast enough over this window: the next one begins.
    watch.since = now;
    watch.held_then = watch.held_now;
    ++it;
  }
  return found;
}

void HopMonitor::forget(WorkerId worker) {
  const auto of = [&](const auto& item) { return item.first.from == worker || item.first.to == worker; };
  std::erase_if(watched_, of);
  std::erase_if(speeds_, of);
  std::erase_if(last_, of);
}

}  // namespace echoline::overlay
