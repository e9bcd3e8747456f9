// Takes the overlay's reports on workers, for the service.
#include "learner/run_workers.hpp"

#include <nlohmann/json.hpp>

#include "base/log.hpp"
#include "base/text.hpp"
#include "data_plane/run_spec.hpp"
#include "overlay/trainer_node.hpp"

namespace echoline::learner {
namespace {

using Message = std::shared_ptr<const std::string>;

void send(overlay::LearnerNode& node, WorkerId worker, Message message) {
  if (const Status sent = node.send(worker, std::move(message)); !sent) log::error("{}", sent.error().message());
}

Message bytes_of(const schema::LearnerMessage& message) {
  return std::make_shared<const std::string>(message.SerializeAsString());
}

}  // namespace

RunWorkers::RunWorkers(const RunHost& run, const provisioner::Plan& plan, RunJournal& journal)
    : run_(run), journal_(journal), roster_(run.config, plan) {
  attendance_.add_listener([this](const PresenceChange& change) {
    roster_.on_presence_change(change, run_.clock.now());
    record_change(change);
  });
}

void RunWorkers::on_joined(const overlay::MemberInfo& member) {
  const std::string name = printable(member.name);
  if (overlay::is_trainer_node(member.name)) {
    roster_.on_node_joined(member);
    log::info("node {} ({}) of the trainer has joined", member.id, name);
    return journal_.record().append_event("node_joined", {{"node", member.id.value}, {"name", name}});
  }
  attendance_.on_joined(member.id, name, roster_.region_of(name, member.place));
}

void RunWorkers::on_away(WorkerId worker, const std::string& reason) {
  if (!record_node_gone(worker, Presence::kAway, reason)) attendance_.on_away(worker, printable(reason));
}

void RunWorkers::on_lost(WorkerId worker, const std::string& reason) {
  if (!record_node_gone(worker, Presence::kLost, reason)) attendance_.on_lost(worker, printable(reason));
}

bool RunWorkers::record_node_gone(WorkerId id, Presence presence, const std::string& reason) {
  if (!roster_.on_node_gone(id, presence)) return false;
  if (attendance_.is_closed()) return true;  // the run ends its members
  log::warn("node {} of the trainer is {}: {}", id, presence == Presence::kAway ? "away" : "lost", printable(reason));
  journal_.record().append_event(presence == Presence::kAway ? "node_away" : "node_left",
                                 {{"node", id.value}, {"reason", printable(reason)}});
  return true;
}

void RunWorkers::on_trouble(WorkerId worker, const std::string& what) {
  log::warn("worker {}: {}", worker, printable(what));
  roster_.count_trouble(worker);
  journal_.record().append_event("trouble", {{"worker", worker.value}, {"what", printable(what)}});
}

void RunWorkers::record_change(const PresenceChange& change) {
  using Kind = PresenceChange::Kind;
  const WorkerId id = change.worker;
  if (change.kind == Kind::kLeaving) log::info("worker {} was told to end, and finishes what it has", id);
  if (change.kind == Kind::kBack) log::info("worker {} ({}) is back", id, change.offer);
  if (change.kind == Kind::kAway)
    log::warn("worker {} is away: {}; its place is kept for {}", id, change.reason,
              to_text(run_.config.fleet.away_max));
  if (change.kind == Kind::kAway || change.kind == Kind::kLost)
    journal_.record().append_event(change.kind == Kind::kAway ? "away" : "left",
                                   {{"worker", id.value}, {"reason", change.reason}});
  if (!change.has_joined()) return;
  nlohmann::json event{{"worker", id.value}, {"offer", change.offer}};
  const auto& regions = run_.config.paths.regions.regions;
  if (!regions.empty()) event["region"] = regions[change.region].name;
  journal_.record().append_event(change.kind == Kind::kBack ? "back" : "joined", std::move(event));
}

void RunWorkers::greet_workers(overlay::LearnerNode& node) {
  schema::LearnerMessage message;
  message.mutable_wait()->set_reason(run_.options.resume ? "it is resuming" : "it is starting");
  attendance_.add_listener([this, &node, wait = bytes_of(message)](const PresenceChange& change) {
    if (change.has_joined() && !is_run_described_) send(node, change.worker, wait);
  });
}

Status RunWorkers::describe_run(const RunTask& task, overlay::LearnerNode& node) {
  schema::RunSpec spec;
  spec.set_run(run_.config.run.name);
  task.describe(run_.config, spec);
  run_.config.rollout.write_to(spec);
  schema::LearnerMessage message;
  ECHO_ASSIGN(*message.mutable_run_spec(), data_plane::pack_run_spec(spec));
  is_run_described_ = true;  // before the listener is added, so that no later worker is sent both messages
  attendance_.add_listener([&node, description = bytes_of(message)](const PresenceChange& change) {
    if (change.has_joined()) send(node, change.worker, description);
  });
  return ok();
}

void RunWorkers::refresh(const overlay::LearnerNode& node) {
  if (attendance_.is_closed()) return;
  if (const auto drawing = roster_.refresh(node.stats())) journal_.record().write_topology(*drawing);
}

}  // namespace echoline::learner
