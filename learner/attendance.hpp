// The presence of the run's workers: the one place that decides it and passes each change on. Private to learner/.
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
    kLeaving,  // its machine ends soon: it gets no more work
    kRetired,  // the fleet ends its machine once it has drained: likewise
    kDrained,  // it gets no more work, and has submitted all that it had
  };
  Kind kind = Kind::kJoined;
  WorkerId worker;
  std::string offer = {};    // joined and back: the offer that it was rented as
  std::uint32_t region = 0;  // likewise
  std::string reason = {};   // away and lost

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
  void add(Listener listener);

  // Reports of the overlay.
  void joined(WorkerId worker, const std::string& offer, std::uint32_t region);
  void away(WorkerId worker, const std::string& reason);
  void lost(WorkerId worker, const std::string& reason);
  // Reports of the desk and the fleet. They have no effect on a worker that is lost or unknown; leaving() is false
  // then.
  bool leaving(WorkerId worker);
  void retired(WorkerId worker);
  void drained(WorkerId worker);
  // The run ends and stops its workers: from now on no worker is away or lost.
  void close();
  bool is_closed() const;

  std::size_t alive() const;  // present or away

  void check() const;  // aborts if its parts disagree

 private:
  struct Worker {
    Presence presence = Presence::kPresent;
    bool is_retired = false;  // it gets no more work until it joins again
    std::string offer;
    std::uint32_t region = 0;
  };
  bool retire(WorkerId worker, PresenceChange::Kind kind);
  void depart(WorkerId worker, Presence presence, const std::string& reason);
  void pass_on(const PresenceChange& change) const;

  mutable std::mutex mutex_;  // guards what follows
  std::map<WorkerId, Worker> workers_;
  std::vector<Listener> listeners_;
  bool closed_ = false;
};

}  // namespace echoline::learner
