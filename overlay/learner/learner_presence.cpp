// The learner's workers while they are there, silent, away and gone.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {

// The learner dials the worker's endpoint, now or when its pause has ended.
void LearnerCore::dial_back(const Worker& worker, TimePoint now) {
  const MemberInfo& info = worker.view.info;
  if (reach_.begin_dial(info.id, info.data, now))
    reach_.dialled(info.id, dial(info.data, act::Service::kData, info.id), now);
}

void LearnerCore::on_dialled_back(const Reachability::Outcome& dial, const std::string& reason, TimePoint now) {
  Worker& worker = workers_.at(dial.worker);
  if (dial.reachable) {  // after a segment there and one back, and the same for TLS
    const Duration one_way = dial.took / 4;
    worker.view.delay = std::min(worker.view.delay.value_or(one_way), one_way);
  }
  if (!dial.changed) return;
  if (!dial.reachable) {
    const std::string text = fmt::format("worker {} cannot be reached at {}: {}; it will not forward", dial.worker,
                                         to_text(worker.view.info.data), reason);
    log::info("{}", text);
    send_control(worker.control, Notice{text + " (--bind, --advertise, or `echoline token --reach` say where it is)"},
                 now);
  }
  move_back(dial.worker, now);
}

// Whatever comes from it: it is there.
void LearnerCore::heard_from(Worker& worker, TimePoint now) {
  worker.heard = now;
  worker.silence.alive(now);
  if (!std::exchange(worker.silent, false)) return;
  worker.silence.begin(config_.heartbeat, now, std::min(worker.silences, kSilencesMax));
  log::info("worker {} is heard again", worker.view.info.id);
  plan_soon(now);
}

// Nothing is expected of it, and nothing sent to it, until it is heard again; but it keeps what costs money.
void LearnerCore::silence(WorkerId id, const std::string& reason, TimePoint now) {
  Worker& worker = workers_.at(id);
  if (std::exchange(worker.silent, true)) return;
  ++worker.silences;
  log::info("worker {} loses its place: {}", id, reason);
  lose_place(worker, now);
}

void LearnerCore::lose_place(Worker& worker, TimePoint now) {
  const WorkerId id = worker.view.info.id;
  end_help(worker);
  if (worker.assigned)
    for (const Parent& p : worker.assigned->parents) worker.senders[p.worker] = now + kAccusationTime;
  worker.assigned.reset();
  worker.progress.clear();
  worker.edges.clear();
  worker.holdings.clear();
  hops_.forget(id);
  reach_.forget_turns(id);
  for (const ConnId edge : edges_.connections_of(id)) {
    edges_.close(edge);
    close(edge);
  }
  broadcasts_.remove(id);
  take_out(id, now);
  check_broadcasts(now);
}

// Ends its connections and takes it out of the connected ones.
std::map<WorkerId, LearnerCore::Worker>::node_type LearnerCore::disconnect(WorkerId id, const std::string* goodbye,
                                                                           TimePoint now) {
  auto node = workers_.extract(id);
  if (!node) return node;
  Worker& worker = node.mapped();
  if (goodbye) send_control(worker.control, Goodbye{*goodbye}, now);
  uplink_.close(worker.control);
  close(worker.control);
  control_.erase(worker.control);
  worker.messages.clear();
  assembling_ -= worker.incoming.bytes();
  worker.incoming = {};
  if (const auto dial = reach_.remove(id)) close(*dial);
  lose_place(worker, now);
  worker.silent = false;
  return node;
}

// Out of reach, and expected back. It is not told to leave: it may not know that it is missed.
void LearnerCore::part(WorkerId id, const std::string& reason, TimePoint now) {
  auto node = disconnect(id, nullptr, now);
  if (!node) return;
  if (away_.size() >= chains::kChainWorkersMax) {
    const auto oldest = std::min_element(away_.begin(), away_.end(), [](const auto& a, const auto& b) {
      return a.second.away_since < b.second.away_since;
    });
    gone(WorkerId(oldest->first), "too many are away");
  }
  node.mapped().away_since = now;
  node.mapped().away_reason = reason;
  away_.insert(std::move(node));
  actions_.push_back(act::WorkerAway{id, reason});
}

// It left, or is told to.
void LearnerCore::lose(WorkerId id, const std::string& reason, bool say_goodbye, TimePoint now) {
  if (!disconnect(id, say_goodbye ? &reason : nullptr, now)) return;
  ++lost_;
  actions_.push_back(act::Lost{id, reason});
}

void LearnerCore::gone(WorkerId id, const std::string& reason) {
  if (away_.erase(id) == 0) return;
  ++lost_;
  actions_.push_back(act::Lost{id, reason});
}

// For so long this process did not run: what the others said meanwhile is still to be read. Before anything else is
// done with what comes first after it, which begins times of its own.
void LearnerCore::excuse_pause(TimePoint now) {
  if (now - beat_at_ <= config_.heartbeat) return;
  const Duration late = now - std::exchange(beat_at_, now);
  if (late >= config_.network.heartbeat_timeout)
    log::info("this process was held up for {}: nobody is judged for that time", echoline::to_text(late));
  for (auto& [id, worker] : workers_) {
    worker.heard = std::min(worker.heard + late, now);  // it may have been heard since
    worker.silence.excuse(late, now);
    for (auto& [sender, until] : worker.senders) until += late;
  }
  for (auto& [id, worker] : away_) worker.away_since += late;
  strangers_.excuse(late);
  hops_ = {};
}

void LearnerCore::watch_presence(TimePoint now) {
  std::vector<WorkerId> silent, away, gone_for_good;
  for (const auto& [id, worker] : workers_) {
    // What was learned may cost a place before the time that was agreed on, but neither money nor work.
    const TimePoint learned =
        is_silent_to(worker, now) ? now : std::max(worker.silence.deadline(), earliest_silence(worker));
    const TimePoint agreed = worker.heard + config_.network.heartbeat_timeout;
    if (now >= std::max(learned, agreed))
      away.push_back(id);
    else if (now >= std::min(learned, agreed))
      silent.push_back(id);
  }
  const auto silence_of = [&](WorkerId id) { return echoline::to_text(now - workers_.at(id).heard); };
  for (const WorkerId id : silent) silence(id, fmt::format("no heartbeat for {}", silence_of(id)), now);
  for (const WorkerId id : away) part(id, fmt::format("no heartbeat for {}", silence_of(id)), now);
  for (const auto& [id, worker] : away_)
    if (now >= worker.away_since + config_.away_max) gone_for_good.push_back(id);
  for (const WorkerId id : gone_for_good)
    gone(id, fmt::format("it has been away for {} ({})", echoline::to_text(now - away_.at(id).away_since),
                         away_.at(id).away_reason));
}

}  // namespace echoline::overlay
