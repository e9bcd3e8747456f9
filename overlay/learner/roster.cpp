// The learner's lists of connected and absent workers. Called by LearnerCore.
#include "overlay/learner/roster.hpp"

#include <algorithm>

namespace echoline::overlay {

const Parent* Place::edge_from(WorkerId parent) const {
  const auto all = parents();
  const auto it = std::find_if(all.begin(), all.end(), [&](const Parent& edge) { return edge.worker == parent; });
  return it == all.end() ? nullptr : &*it;
}

bool Place::may_accuse(WorkerId sender, TimePoint now) const {
  const auto former = accusable_until.find(sender);
  return edge_from(sender) || (former != accusable_until.end() && former->second >= now);
}

void Place::replace(Assign next, TimePoint now) {
  std::erase_if(accusable_until, [&](const auto& sender) { return sender.second < now; });
  clear(now);
  assigned = std::move(next);
}

void Place::clear(TimePoint now) {
  for (const Parent& edge : parents()) remember_sender(edge.worker, now);
  assigned.reset();
}

const Worker* Roster::find(WorkerId id) const {
  const auto it = connected_.find(id);
  return it == connected_.end() ? nullptr : &it->second;
}

Worker* Roster::find_by_control(ConnId control) {
  const auto it = by_control_.find(control);
  return it == by_control_.end() ? nullptr : &connected_.at(it->second);
}

std::vector<WorkerId> Roster::all_ids() const {
  std::vector<WorkerId> ids;
  for (const auto* workers : {&connected_, &away_})
    for (const auto& [id, worker] : *workers) ids.push_back(id);
  return ids;
}

Worker& Roster::join(WorkerId id, ConnId control, const LearnerRules& rules, TimePoint now) {
  if (auto returning = away_.extract(id)) connected_.insert(std::move(returning));
  Worker& worker = connected_[id];
  worker.presence.join(rules, now);
  worker.control = control;
  by_control_[control] = id;
  ++joined_;
  return worker;
}

Roster::Workers::node_type Roster::disconnect(WorkerId id) {
  auto node = connected_.extract(id);
  if (!node) return node;
  by_control_.erase(node.mapped().control);
  incomplete_bytes_ -= std::exchange(node.mapped().incoming, {}).bytes();
  return node;
}

Result<std::optional<std::string>> Roster::add_part(WorkerId id, const Frame& part, std::size_t message_bytes_max) {
  MessageAssembler& incoming = at(id).incoming;
  incomplete_bytes_ -= incoming.bytes();
  auto message = incoming.add(part, message_bytes_max);
  incomplete_bytes_ += incoming.bytes();
  return message;
}

const Worker& Roster::sender_of_most_incomplete_bytes() const {
  const auto has_fewer_bytes = [](const auto& a, const auto& b) {
    return a.second.incoming.bytes() < b.second.incoming.bytes();
  };
  return std::max_element(begin(), end(), has_fewer_bytes)->second;
}

void Roster::set_away(Workers::node_type worker, const std::string& reason, TimePoint now) {
  worker.mapped().presence.leave(reason, now);
  away_.insert(std::move(worker));
}

bool Roster::forget_away(WorkerId id) {
  const bool was_away = away_.erase(id) > 0;
  lost_ += was_away;
  return was_away;
}

void Roster::postpone(Duration pause, TimePoint now) {
  for (auto* workers : {&connected_, &away_})
    for (auto& [id, worker] : *workers) worker.presence.postpone(pause, now);
  for (auto& [id, worker] : connected_)
    for (auto& [sender, until] : worker.place.accusable_until) until += pause;
}

void Roster::check() const {
  for (const auto& [conn, id] : by_control_)
    ECHO_CHECK(connected_.at(id).control == conn, "worker {} has another connection", id);
  std::size_t incomplete = 0;
  for (const auto& [id, worker] : connected_) {
    incomplete += worker.incoming.bytes();
    ECHO_CHECK(!away_.contains(id), "worker {} is connected and away", id);
    ECHO_CHECK(worker.presence.state() != Presence::State::kAway, "worker {} is connected, but counts as away", id);
    ECHO_CHECK(!worker.presence.is_silent() || !worker.place.assigned, "worker {} is silent and has a place", id);
  }
  ECHO_CHECK(incomplete == incomplete_bytes_, "{} bytes of messages instead of {}", incomplete_bytes_, incomplete);
  for (const auto& [id, worker] : away_)
    ECHO_CHECK(worker.presence.state() == Presence::State::kAway && !worker.place.assigned, "worker {} is not away",
               id);
}

}  // namespace echoline::overlay
