// The presence of the learner's workers: connected, silent, away, gone. Called by the other parts of LearnerCore.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {

// Dials the worker's endpoint to test whether other workers can reach it. If the endpoint was dialled just before, the
// dial waits for its retry time.
void LearnerCore::test_reachability(const Worker& worker, TimePoint now) {
  const MemberInfo& info = worker.view.info;
  if (reach_.begin_dial(info.id, info.data, now))
    reach_.record_dial(info.id, dial(info.data, act::Service::kData, info.id), now);
}

void LearnerCore::on_reachability_tested(const Reachability::Outcome& dial, const std::string& reason, TimePoint now) {
  Worker& worker = workers_.at(dial.worker);
  if (dial.reachable) {
    constexpr int kOneWaysPerHandshake = 4;  // TCP and TLS take a round trip each: four one-way delays
    const Duration one_way = dial.took / kOneWaysPerHandshake;
    worker.view.delay = std::min(worker.view.delay.value_or(one_way), one_way);
  }
  if (!dial.changed) return;
  if (!dial.reachable) {
    const std::string text = fmt::format("worker {} cannot be reached at {}: {}; it will not forward", dial.worker,
                                         to_text(worker.view.info.data), reason);
    log::info("{}", text);
    send_control(worker.control, Notice{text + " (--bind, --advertise, or `echoline token --reach` set its address)"},
                 now);
  }
  move_behind_others(dial.worker, now);
}

// The worker loses its place in the topology until it is heard again. It keeps its leases.
void LearnerCore::mark_silent(WorkerId id, const std::string& reason, TimePoint now) {
  Worker& worker = workers_.at(id);
  if (worker.presence.is_silent()) return;
  worker.presence.fall_silent();
  log::info("worker {} loses its place: {}", id, reason);
  lose_place(worker, now);
}

// Ends all that depends on the worker's place in the topology: its edges, help and measurements.
void LearnerCore::lose_place(Worker& worker, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  helpers_.end(id);
  worker.place.clear(now);
  worker.reported = {};
  slow_hops_.monitor().forget(id);
  reach_.forget_dial_turns(id);
  close_edges(edges_.connections_of(id));
  publications_.broadcasts().remove(id);
  remove_from_topology(id, now);
  report_finished_broadcasts(now);  // a broadcast may have waited only for this worker
}

// Ends the worker's connections. `goodbye`: the reason to send; null: none. workers_.set_away() or drop() follows.
Roster::Workers::node_type LearnerCore::disconnect(WorkerId id, const std::string* goodbye, TimePoint now) {
  auto node = workers_.disconnect(id);
  if (!node) return node;
  Worker& worker = node.mapped();
  if (goodbye) send_control(worker.control, Goodbye{*goodbye}, now);
  uplink_.close(worker.control);
  close(worker.control);
  worker.messages.clear();
  if (const auto dial = reach_.remove(id)) close(*dial);
  lose_place(worker, now);
  return node;
}

// Sends no goodbye, because the worker may still run and is expected to reconnect.
void LearnerCore::set_away(WorkerId id, const std::string& reason, TimePoint now) {
  auto node = disconnect(id, /*goodbye=*/nullptr, now);
  if (!node) return;
  const auto& away = workers_.away();
  if (away.size() >= chains::kChainWorkersMax) {
    const auto oldest = std::min_element(away.begin(), away.end(), [](const auto& a, const auto& b) {
      return a.second.presence.away_since() < b.second.presence.away_since();
    });
    forget_away(WorkerId(oldest->first), "too many are away");
  }
  workers_.set_away(std::move(node), reason, now);
  actions_.push_back(act::ReportWorkerAway{id, reason});
}

// The worker has left, or must leave.
void LearnerCore::remove_worker(WorkerId id, const std::string& reason, bool send_goodbye, TimePoint now) {
  auto node = disconnect(id, send_goodbye ? &reason : nullptr, now);
  if (!node) return;
  workers_.drop(std::move(node));
  forget_records(id);
  actions_.push_back(act::ReportWorkerLost{id, reason});
}

void LearnerCore::forget_away(WorkerId id, const std::string& reason) {
  if (!workers_.forget_away(id)) return;
  forget_records(id);
  actions_.push_back(act::ReportWorkerLost{id, reason});
}

void LearnerCore::forget_records(WorkerId id) {
  helpers_.forget(id);
  slow_hops_.forget(id);
}

// If this process was suspended for a while, messages of that time are still unread, so all deadlines are postponed by
// the length of the pause. A beat that is late by more than a heartbeat interval shows a pause. Every event calls this
// function first, because the event may set new deadlines.
void LearnerCore::postpone_after_pause(TimePoint now) {
  if (now - next_beat_at_ <= config_.heartbeat) return;
  const Duration late = now - std::exchange(next_beat_at_, now);
  if (late >= config_.network.heartbeat_timeout)
    log::info("this process did not run for {}: heartbeat timeouts are extended by that time", echoline::to_text(late));
  workers_.postpone(late, now);
  pending_peers_.postpone(late);
  slow_hops_.monitor() = {};  // its rates would include the pause
}

void LearnerCore::check_presence(TimePoint now) {
  std::vector<WorkerId> silent, away, gone_for_good;
  for (const auto& [id, worker] : workers_) {
    const Presence::State due = worker.presence.due_state(config_, now);
    if (due == Presence::State::kSilent)
      silent.push_back(id);
    else if (due == Presence::State::kAway)
      away.push_back(id);
  }
  const auto reason = [&](WorkerId id) {
    return fmt::format("no heartbeat for {}", echoline::to_text(now - workers_.at(id).presence.last_frame_at()));
  };
  for (const WorkerId id : silent) mark_silent(id, reason(id), now);
  for (const WorkerId id : away) set_away(id, reason(id), now);
  for (const auto& [id, worker] : workers_.away())
    if (now >= worker.presence.away_since() + config_.away_max) gone_for_good.push_back(id);
  for (const WorkerId id : gone_for_good) {
    const Presence& presence = workers_.away().at(id).presence;
    forget_away(id, fmt::format("it has been away for {} ({})", echoline::to_text(now - presence.away_since()),
                                presence.away_reason()));
  }
}

}  // namespace echoline::overlay
