// Passes the events of a worker's overlay node to the agent's thread.
#include "worker/inbox.hpp"

namespace echoline::worker {

overlay::WorkerEvents Inbox::node_events() {
  overlay::WorkerEvents events;
  events.joined = [this](WorkerId id, const std::string&) { post(event::Joined{id}); };
  events.publication = [this](const overlay::Publication& publication) {
    policy_waits_ = true;  // before the event, because the agent may pop it at once and clear the flag
    post(event::PolicyArrived{publication, clock_.now()});
  };
  events.part = [this](const overlay::PublicationPart& part) {
    const std::lock_guard lock(mutex_);
    parts_.push_back(part);
    if (parts_.size() == 1) post(event::PartsArrived{});  // for later parts, the event already waits
  };
  events.message = [this](std::string bytes) { post(event::Message{std::move(bytes)}); };
  events.away = [this](const std::string& reason) { post(event::Away{reason}); };
  events.disconnected = [this](const std::string& reason, bool cleanly) { post(event::Disconnected{reason, cleanly}); };
  return events;
}

std::optional<Event> Inbox::pop(Duration wait) {
  auto event = events_.pop(wait);
  // Cleared also if a second policy is queued, because the agent empties the inbox before it generates again.
  if (event && std::holds_alternative<event::PolicyArrived>(*event)) policy_waits_ = false;
  return event;
}

std::vector<overlay::PublicationPart> Inbox::take_parts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(parts_, {});
}

Status Inbox::check_overflow() const {
  if (overflowed_)
    return fail(Code::kExhausted, "worker",
                "{} messages and policies from the learner wait unread: the engine has not returned for minutes",
                kEventsMax);
  return ok();
}

}  // namespace echoline::worker
