// Tests by dialling whether workers can be reached, and decides which end of an edge dials the other. No I/O and no
// clock.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "overlay/action.hpp"

namespace echoline::overlay {

class Reachability {
 public:
  static constexpr Duration kDialPause = std::chrono::seconds(1);   // between two dials of one endpoint
  static constexpr Duration kRetryPause = std::chrono::minutes(1);  // after a worker could not be reached

  struct Outcome {  // of a dial
    WorkerId worker;
    Duration took{};
    bool reachable = false, changed = false;
  };
  struct Turn {
    bool parent_dials = false;
    bool changed = false;
    bool first = false;  // the edge has not failed to open before
  };

  // A connected worker counts as reachable until a dial fails.
  void add(WorkerId worker);
  // Forgets the worker. Returns the connection of a dial under way, for the caller to close.
  std::optional<ConnId> remove(WorkerId worker);
  std::vector<ConnId> end_all_dials();

  // Whether the caller dials the worker now, and then reports dialled(). Otherwise a dial is under way, or planned.
  bool begin_dial(WorkerId worker, const Endpoint& to, TimePoint now);
  void dialled(WorkerId worker, ConnId conn, TimePoint now);
  // The dial's connection has opened or failed; absent for other connections.
  std::optional<Outcome> end_dial(ConnId conn, bool connected, TimePoint now);
  std::vector<WorkerId> take_planned(TimePoint now);  // workers whose planned dial is due
  TimePoint next_deadline() const { return planned_.empty() ? kNever : planned_.begin()->first; }
  bool is_reachable(WorkerId worker) const { return workers_.at(worker).reachable; }

  // Whether the endpoint was not dialled within kDialPause. It then counts as dialled now.
  bool take_dial(const Endpoint& to, TimePoint now) { return !busy_until(to, now); }
  // Whether the parent dials this edge; otherwise its child does.
  bool parent_dials(WorkerId parent, WorkerId child) const;
  // One end could not open the edge. The ends take turns, because the obstacle at either may pass; an unreachable
  // child always dials itself.
  Turn pass_turn(WorkerId parent, WorkerId child, const Endpoint& child_at, TimePoint now);
  void forget_turns(WorkerId worker);
  void check() const;

 private:
  enum class Phase : std::uint8_t { kIdle, kPlanned, kDialling };
  struct Worker {
    Phase phase = Phase::kIdle;
    bool reachable = true;
    TimePoint at = kNever;  // of the planned dial, or of the one under way
  };
  void move(WorkerId id, Phase next, TimePoint at);
  std::optional<TimePoint> busy_until(const Endpoint& to, TimePoint now);

  std::map<WorkerId, Worker> workers_;
  std::map<ConnId, WorkerId> dials_;
  std::set<std::pair<TimePoint, WorkerId>> planned_;
  std::map<std::string, TimePoint> recent_;                     // endpoints dialled within kDialPause
  std::map<std::pair<WorkerId, WorkerId>, bool> parents_turn_;  // edges (parent, child) that could not be opened
};

}  // namespace echoline::overlay
