// Keeps which workers of the run are present, away or lost, and notifies listeners of each change. Private to learner/.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "provisioner/fleet_core.hpp"

namespace echoline::learner {

enum class Presence : std::uint8_t {
  kPresent,
  kAway,  // out of reach, but expected back
  kLost,  // gone for good
};

struct PresenceChange {
  enum class Kind : std::uint8_t {
    kJoined,
    kBack,  // joined after it was away or lost
    kAway,
    kLost,
    kLeaving,  // its machine ends soon, so it gets no more work
    kRetired,  // the fleet ends its machine once it has drained, so it gets no more work
    kDrained,  // it gets no more work, and has submitted all that it had
  };
  Kind kind = Kind::kJoined;
  WorkerId worker;
  std::string offer = {};    // if joined or back: the offer from which it was rented
  std::uint32_t region = 0;  // if joined or back: index in network.regions
  std::string reason = {};   // if away or lost

  bool has_joined() const { return kind == Kind::kJoined || kind == Kind::kBack; }
};

// The fleet's event for a change; absent if the fleet does not act on it.
std::optional<provisioner::FleetEvent> fleet_event(const PresenceChange& change);

// Thread-safe. Every listener gets every change, one change at a time, in the order in which the listeners were added.
// A listener runs on the thread that reports the change; it must not block or call the Attendance.
class Attendance {
 public:
  using Listener = std::function<void(const PresenceChange&)>;

  // First calls `listener` for each present worker, as if it joined now.
  void add_listener(Listener listener);

  // Called for the overlay's events.
  void on_joined(WorkerId worker, const std::string& offer, std::uint32_t region);
  void on_away(WorkerId worker, const std::string& reason);
  void on_lost(WorkerId worker, const std::string& reason);
  // Called for events of the desk and the fleet. No effect on a lost or unknown worker; on_leaving() then returns
  // false.
  bool on_leaving(WorkerId worker);
  void on_retired(WorkerId worker);
  void on_drained(WorkerId worker);
  // The run ends and stops its workers. So from now on no worker counts as away or lost.
  void close();
  bool is_closed() const;

  std::size_t alive_count() const;  // present or away

  void check() const;  // aborts if its parts disagree

 private:
  struct Worker {
    Presence presence = Presence::kPresent;
    bool is_retired = false;  // it gets no more work until it joins again
    std::string offer;
    std::uint32_t region = 0;
  };
  bool mark_retired(WorkerId worker, PresenceChange::Kind kind);
  void mark_gone(WorkerId worker, Presence presence, const std::string& reason);
  void notify_listeners(const PresenceChange& change) const;

  mutable std::mutex mutex_;  // guards the members below
  std::map<WorkerId, Worker> workers_;
  std::vector<Listener> listeners_;
  bool closed_ = false;
};

}  // namespace echoline::learner
