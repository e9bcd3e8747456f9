#include "learner/attendance.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

using Kind = PresenceChange::Kind;

std::optional<provisioner::FleetEvent> fleet_event(const PresenceChange& change) {
  switch (change.kind) {
    case Kind::kJoined:
    case Kind::kBack:
      return provisioner::fleet::Joined{change.worker, change.offer};
    case Kind::kLost:
      return provisioner::fleet::Left{change.worker, change.reason};
    case Kind::kLeaving:
      return provisioner::fleet::Leaving{change.worker};
    case Kind::kDrained:
      return provisioner::fleet::Drained{change.worker};
    default:
      return std::nullopt;
  }
}

void Attendance::pass_on(const PresenceChange& change) const {
  for (const Listener& listener : listeners_) listener(change);
}

void Attendance::add(Listener listener) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, w] : workers_)
    if (w.presence == Presence::kPresent) listener({Kind::kJoined, id, w.offer, w.region, {}});
  listeners_.push_back(std::move(listener));
}

void Attendance::joined(WorkerId worker, const std::string& offer, std::uint32_t region) {
  const std::lock_guard lock(mutex_);
  const auto known = workers_.find(worker);
  const bool back = known != workers_.end() && known->second.presence != Presence::kPresent;
  workers_[worker] = {Presence::kPresent, false, offer, region};
  pass_on({back ? Kind::kBack : Kind::kJoined, worker, offer, region, {}});
}

void Attendance::away(WorkerId worker, const std::string& reason) { depart(worker, Presence::kAway, reason); }

void Attendance::lost(WorkerId worker, const std::string& reason) { depart(worker, Presence::kLost, reason); }

// Also of an unknown worker: an earlier process of this run may have known it.
void Attendance::depart(WorkerId worker, Presence presence, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  Worker& w = workers_[worker];
  if (w.presence == Presence::kLost) return;
  w.presence = presence;
  if (presence == Presence::kLost) w.is_retired = false;
  pass_on({presence == Presence::kLost ? Kind::kLost : Kind::kAway, worker, {}, 0, reason});
}

bool Attendance::leaving(WorkerId worker) { return retire(worker, Kind::kLeaving); }

void Attendance::retired(WorkerId worker) { (void)retire(worker, Kind::kRetired); }

bool Attendance::retire(WorkerId worker, Kind kind) {
  const std::lock_guard lock(mutex_);
  const auto known = workers_.find(worker);
  if (known == workers_.end() || known->second.presence == Presence::kLost) return false;
  known->second.is_retired = true;
  pass_on({kind, worker, {}, 0, {}});
  return true;
}

void Attendance::drained(WorkerId worker) {
  const std::lock_guard lock(mutex_);
  const auto known = workers_.find(worker);
  if (known != workers_.end() && known->second.is_retired) pass_on({Kind::kDrained, worker, {}, 0, {}});
}

void Attendance::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Attendance::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::size_t Attendance::alive() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::ranges::count_if(workers_, [](const auto& w) { return w.second.presence != Presence::kLost; }));
}

void Attendance::check() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, w] : workers_)
    ECHO_CHECK(!w.is_retired || w.presence != Presence::kLost, "worker {} is lost and retired", id);
}

}  // namespace echoline::learner
