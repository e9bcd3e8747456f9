// Decides which end of a slow hop is at fault. Called by LearnerCore (learner_topology.cpp).
#include "overlay/learner/slow_hops.hpp"

#include <algorithm>

namespace echoline::overlay {

std::vector<HopMonitor::Finding> SlowHops::find(TimePoint now) {
  std::erase_if(suspected_until_, [&](const auto& entry) { return entry.second <= now; });
  std::vector<HopMonitor::Finding> found = monitor_.find();
  // A worker that receives slowly from several parents at once is the cause, whatever their uplinks do.
  std::map<WorkerId, std::size_t> slow_parents;
  for (const HopMonitor::Finding& finding : found)
    if (++slow_parents[finding.hop.to] == 2) suspected_until_[finding.hop.to] = now + kSuspicionTime;
  // Keeps only the worst of the hops that share a worker, because it may slow the others down. The worst come first.
  std::set<WorkerId> workers_of_kept_hops;
  std::erase_if(found, [&](const HopMonitor::Finding& finding) {
    if (workers_of_kept_hops.contains(finding.hop.from) || workers_of_kept_hops.contains(finding.hop.to)) return true;
    workers_of_kept_hops.insert({finding.hop.from, finding.hop.to});
    return false;
  });
  return found;
}

bool SlowHops::is_silent_to_several(WorkerId parent, WorkerId child, TimePoint now) {
  auto& silent_to = slow_workers_[parent].silent_to;
  silent_to[child] = now;
  std::erase_if(silent_to, [&](const auto& report) { return report.second + kSilentTogether < now; });
  return silent_to.size() >= 2;
}

// At first the sender is held to be the cause, and the topology changes. If the receiver then receives slowly again,
// the receiver is the cause. So it is if the sender's other receivers keep up, because they share the
// sender's uplink.
std::optional<SlowHops::Fault> SlowHops::find_cause(const HopMonitor::Finding& finding, std::optional<EdgeLimit> limit,
                                                    std::optional<BitRate> sender_up, TimePoint now) {
  const auto [from, to] = finding.hop;
  if (is_slow(to, now)) return std::nullopt;  // the receiver is known to be slow, and delays no other worker
  const auto suspect = suspected_until_.find(to);
  const bool slow_there_again = suspect != suspected_until_.end() && now < suspect->second;
  const bool blame_receiver = from == kLearnerId || slow_there_again || finding.others_keep_up;
  const std::string cause = limit == EdgeLimit::kOwnLimit   ? "the sender's own rate limit"
                            : limit == EdgeLimit::kReceiver ? "the receiver, which does not read fast enough"
                            : blame_receiver                ? "the receiver's link"
                                                            : "sender uplink";
  SlowHop hop{from, to,
              fmt::format("{} -> {} limited by {}: {} instead of {}",
                          from == kLearnerId ? std::string("learner") : fmt::format("worker {}", from), to, cause,
                          echoline::to_text(finding.rate), echoline::to_text(finding.expected))};
  recent_.push_back(hop);
  if (recent_.size() > kRecentMax) recent_.erase(recent_.begin());
  suspected_until_[to] = now + kSuspicionTime;
  const WorkerId worker_at_fault = blame_receiver ? to : from;
  SlowWorker& slow = slow_workers_[worker_at_fault];
  slow.slow_until = now + kSlowTime;
  if (!blame_receiver) {  // all edges share the sender's uplink, so all of it counts as slower by as much as this edge
    const double slowdown = finding.rate.bits_per_s / finding.expected.bits_per_s;
    slow.measured_up = BitRate{std::max(1.0, sender_up ? sender_up->bits_per_s * slowdown : finding.rate.bits_per_s)};
  }
  monitor_.forget(worker_at_fault);
  return Fault{std::move(hop), worker_at_fault};
}

bool SlowHops::is_slow(WorkerId worker, TimePoint now) const {
  const auto it = slow_workers_.find(worker);
  return it != slow_workers_.end() && now < it->second.slow_until;
}

std::optional<BitRate> SlowHops::uplink_of(WorkerId worker) const {
  const auto it = slow_workers_.find(worker);
  return it == slow_workers_.end() ? std::nullopt : it->second.measured_up;
}

}  // namespace echoline::overlay
