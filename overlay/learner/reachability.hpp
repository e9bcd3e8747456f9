// Tests by dialling whether workers can be reached. Decides which end of an edge, the connection from a parent to its
// child, dials the other. No I/O and no clock.
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
    bool reachable = false;
    bool changed = false;  // `reachable` differs from the state before
  };
  struct Turn {  // of dialling an edge
    bool parent_dials = false;
    bool changed = false;        // the other end dials now
    bool first_failure = false;  // the edge has not failed to open before
  };

  // A connected worker counts as reachable until a dial fails.
  void add(WorkerId worker);
  // Forgets the worker. Returns the connection of a dial under way, for the caller to close.
  std::optional<ConnId> remove(WorkerId worker);
  std::vector<ConnId> end_all_dials();

  // Returns whether the caller must dial the worker now and report record_dial(). Otherwise a dial is under way, or
  // planned for later.
  bool begin_dial(WorkerId worker, const Endpoint& to, TimePoint now);
  void record_dial(WorkerId worker, ConnId conn, TimePoint now);
  // The dial's connection has opened or failed; absent for other connections.
  std::optional<Outcome> end_dial(ConnId conn, bool connected, TimePoint now);
  std::vector<WorkerId> take_planned(TimePoint now);  // workers whose planned dial is due
  TimePoint next_deadline() const { return planned_.empty() ? kNever : planned_.begin()->first; }
  bool is_reachable(WorkerId worker) const { return workers_.at(worker).reachable; }

  // Returns whether the endpoint may be dialled: it was not within kDialPause. It then counts as dialled now.
  bool claim_dial(const Endpoint& to, TimePoint now) { return !claim_unless_blocked(to, now); }
  // Whether the parent dials this edge; otherwise its child does.
  bool parent_dials(WorkerId parent, WorkerId child) const;
  // One end could not open the edge, so it is the other end's turn. The ends take turns, because the obstacle at either
  // may be temporary. If the child is unreachable, the child always dials.
  Turn pass_dial_turn(WorkerId parent, WorkerId child, const Endpoint& child_endpoint, TimePoint now);
  void forget_dial_turns(WorkerId worker);
  void check() const;

 private:
  enum class Phase : std::uint8_t { kIdle, kPlanned, kDialling };
  struct Worker {
    Phase phase = Phase::kIdle;
    bool reachable = true;
    TimePoint dial_at = kNever;  // of the planned dial, or of the one under way
  };
  void move_to(WorkerId id, Phase next, TimePoint dial_at);
  // Absent: the endpoint may be dialled, and counts as dialled now. Otherwise returns the time from which it may be.
  std::optional<TimePoint> claim_unless_blocked(const Endpoint& to, TimePoint now);

  std::map<WorkerId, Worker> workers_;
  std::map<ConnId, WorkerId> dials_;
  std::set<std::pair<TimePoint, WorkerId>> planned_;
  std::map<std::string, TimePoint> dialled_at_;  // by endpoint, of the last kDialPause
  // By edge (parent, child) that could not be opened: whether the parent dials next.
  std::map<std::pair<WorkerId, WorkerId>, bool> is_parents_turn_;
};

}  // namespace echoline::overlay
