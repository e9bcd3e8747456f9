// Workers' presence. RunWorkers passes it the overlay's events; the desk, roster and fleet listen.
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
    default:  // kAway: the machine is still rented. kRetired: the fleet itself decided it.
      return std::nullopt;
  }
}

void Attendance::notify_listeners(const PresenceChange& change) const {
  for (const Listener& listener : listeners_) listener(change);
}

void Attendance::add_listener(Listener listener) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : workers_)
    if (entry.presence == Presence::kPresent)
      listener({.kind = Kind::kJoined, .worker = id, .offer = entry.offer, .region = entry.region});
  listeners_.push_back(std::move(listener));
}

void Attendance::on_joined(WorkerId worker, const std::string& offer, std::uint32_t region) {
  const std::lock_guard lock(mutex_);
  const auto entry = workers_.find(worker);
  const bool is_back = entry != workers_.end() && entry->second.presence != Presence::kPresent;
  workers_[worker] = {.presence = Presence::kPresent, .is_retired = false, .offer = offer, .region = region};
  notify_listeners({.kind = is_back ? Kind::kBack : Kind::kJoined, .worker = worker, .offer = offer, .region = region});
}

void Attendance::on_away(WorkerId worker, const std::string& reason) { mark_gone(worker, Presence::kAway, reason); }

void Attendance::on_lost(WorkerId worker, const std::string& reason) { mark_gone(worker, Presence::kLost, reason); }

// Accepts an unknown worker, because an earlier process of this run may have known it.
void Attendance::mark_gone(WorkerId worker, Presence presence, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  Worker& entry = workers_[worker];
  if (entry.presence == Presence::kLost) return;
  entry.presence = presence;
  if (presence == Presence::kLost) entry.is_retired = false;  // it cannot drain any more
  notify_listeners(
      {.kind = presence == Presence::kLost ? Kind::kLost : Kind::kAway, .worker = worker, .reason = reason});
}

bool Attendance::on_leaving(WorkerId worker) { return mark_retired(worker, Kind::kLeaving); }

void Attendance::on_retired(WorkerId worker) { (void)mark_retired(worker, Kind::kRetired); }

bool Attendance::mark_retired(WorkerId worker, Kind kind) {
  const std::lock_guard lock(mutex_);
  const auto entry = workers_.find(worker);
  if (entry == workers_.end() || entry->second.presence == Presence::kLost) return false;
  entry->second.is_retired = true;
  notify_listeners({.kind = kind, .worker = worker});
  return true;
}

void Attendance::on_drained(WorkerId worker) {
  const std::lock_guard lock(mutex_);
  const auto entry = workers_.find(worker);
  if (entry != workers_.end() && entry->second.is_retired) notify_listeners({.kind = Kind::kDrained, .worker = worker});
}

void Attendance::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Attendance::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::size_t Attendance::alive_count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::ranges::count_if(workers_, [](const auto& entry) { return entry.second.presence != Presence::kLost; }));
}

void Attendance::check() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : workers_)
    ECHO_CHECK(!entry.is_retired || entry.presence != Presence::kLost, "worker {} is lost and retired", id);
}

}  // namespace echoline::learner
