// Plans the learner's dials to its workers. Called by LearnerCore.
#include "overlay/learner/reachability.hpp"

#include <algorithm>
#include <array>

namespace echoline::overlay {

void Reachability::move_to(WorkerId id, Phase next, TimePoint dial_at) {
  // Element p: a bit for each phase that may follow phase p, kIdle being bit 0.
  constexpr std::array<std::uint8_t, 3> allowed_next{0b111, 0b111, 0b011};
  Worker& worker = workers_.at(id);
  ECHO_CHECK((allowed_next[static_cast<std::size_t>(worker.phase)] >> static_cast<int>(next) & 1) != 0,
             "worker {} is dialled twice at a time", id);
  if (worker.phase == Phase::kPlanned) planned_.erase({worker.dial_at, id});
  if (next == Phase::kPlanned) planned_.insert({dial_at, id});
  worker.phase = next;
  worker.dial_at = dial_at;
}

void Reachability::add(WorkerId id) { ECHO_CHECK(workers_.try_emplace(id).second, "worker {} is there already", id); }

std::optional<ConnId> Reachability::remove(WorkerId id) {
  const bool dialling = workers_.at(id).phase == Phase::kDialling;
  move_to(id, Phase::kIdle, kNever);
  workers_.erase(id);
  if (!dialling) return std::nullopt;
  const auto dial = std::find_if(dials_.begin(), dials_.end(), [&](const auto& entry) { return entry.second == id; });
  const ConnId conn = dial->first;
  dials_.erase(dial);
  return conn;
}

std::vector<ConnId> Reachability::end_all_dials() {
  std::vector<ConnId> conns;
  for (const auto& [conn, id] : dials_) conns.push_back(conn);
  for (auto& [id, worker] : workers_) move_to(id, Phase::kIdle, kNever);
  dials_.clear();
  return conns;
}

std::optional<TimePoint> Reachability::claim_unless_blocked(const Endpoint& to, TimePoint now) {
  std::erase_if(dialled_at_, [&](const auto& dial) { return dial.second + kDialPause <= now; });
  const auto [it, added] = dialled_at_.try_emplace(to_text(to), now);
  return added ? std::nullopt : std::optional(it->second + kDialPause);
}

bool Reachability::begin_dial(WorkerId id, const Endpoint& to, TimePoint now) {
  if (workers_.at(id).phase == Phase::kDialling) return false;
  const auto blocked_until = claim_unless_blocked(to, now);
  if (blocked_until) move_to(id, Phase::kPlanned, *blocked_until);
  return !blocked_until;
}

void Reachability::record_dial(WorkerId id, ConnId conn, TimePoint now) {
  move_to(id, Phase::kDialling, now);
  dials_[conn] = id;
}

std::optional<Reachability::Outcome> Reachability::end_dial(ConnId conn, bool connected, TimePoint now) {
  const auto dial = dials_.extract(conn);
  if (!dial) return std::nullopt;
  const WorkerId id = dial.mapped();
  Worker& worker = workers_.at(id);
  const Duration took = now - worker.dial_at;
  const bool changed = std::exchange(worker.reachable, connected) != connected;
  if (connected)
    move_to(id, Phase::kIdle, kNever);
  else
    move_to(id, Phase::kPlanned, now + kRetryPause);
  return Outcome{.worker = id, .took = took, .reachable = connected, .changed = changed};
}

std::vector<WorkerId> Reachability::take_planned(TimePoint now) {
  std::vector<WorkerId> due;
  while (!planned_.empty() && planned_.begin()->first <= now) {
    due.push_back(planned_.begin()->second);
    move_to(due.back(), Phase::kIdle, kNever);
  }
  return due;
}

bool Reachability::parent_dials(WorkerId parent, WorkerId child) const {
  const auto turn = is_parents_turn_.find({parent, child});
  return turn != is_parents_turn_.end() && turn->second;
}

Reachability::Turn Reachability::pass_dial_turn(WorkerId parent, WorkerId child, const Endpoint& child_endpoint,
                                                TimePoint now) {
  const auto [turn, first_failure] = is_parents_turn_.try_emplace({parent, child}, false);
  const bool parent_dialled = turn->second;
  // After its first failure, an edge is dialled from the other end at once; later, an endpoint only once in kDialPause.
  turn->second = !parent_dialled && is_reachable(child) && (first_failure || claim_dial(child_endpoint, now));
  return {.parent_dials = turn->second, .changed = turn->second != parent_dialled, .first_failure = first_failure};
}

void Reachability::forget_dial_turns(WorkerId id) {
  std::erase_if(is_parents_turn_, [&](const auto& turn) { return turn.first.first == id || turn.first.second == id; });
}

void Reachability::check() const {
  std::size_t planned = 0, dialling = 0;
  for (const auto& [id, worker] : workers_) {
    planned += worker.phase == Phase::kPlanned && planned_.contains({worker.dial_at, id});
    dialling += worker.phase == Phase::kDialling;
  }
  ECHO_CHECK(planned == planned_.size(), "{} dials are planned, {} workers wait for one", planned_.size(), planned);
  ECHO_CHECK(dialling == dials_.size(), "{} dials are under way, to {} workers", dials_.size(), dialling);
}

}  // namespace echoline::overlay
