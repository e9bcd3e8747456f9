// The rented fleet, as the service and the training loop use it.
#include "learner/run_fleet.hpp"

#include <thread>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "learner/launch.hpp"
#include "learner/market.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::learner {

Status RunFleet::start(Roster& roster, Attendance& attendance, overlay::LearnerNode& node) {
  const RunConfig& config = run_.config;
  RunRecord& record = journal_.record();
  if (config.fleet.joined_by_hand()) {
    std::string join;
    for (const overlay::Endpoint& endpoint : node.remote_endpoints())
      join += (join.empty() ? "" : " or ") + overlay::to_text(endpoint);
    log::info(
        "no provider: start workers with `echoline worker --join {} --name NAME`, each with a token from "
        "`echoline token {} --instance NAME`",
        join, record.folder().string());
    return ok();
  }
  const auto remote_endpoints = node.remote_endpoints();
  learner_address_ = overlay::to_text(config.fleet.is_local() || remote_endpoints.empty() ? node.endpoint()
                                                                                          : remote_endpoints.front());
  provisioner::FleetOptions fleet;
  fleet.run = config.run.name;
  fleet.plan = plan_;
  fleet.other_usd = [this] { return journal_.run_clock().learner_usd().value_or(0); };
  ECHO_ASSIGN(const model::ModelConfig model, run_model_config(config));
  fleet.market = [this, source = std::make_shared<MarketSource>(config, model, plan_.request, plan_.market)](
                     const std::atomic<bool>& stop) {
    return source->read_changed_offers(run_.clock.unix_seconds(), stop);
  };
  fleet.clock = run_.options.clock;
  fleet.ledger_file = record.folder() / "ledger.sqlite";
  fleet.providers = provider_options(config);
  // The worker finishes its leases and gets no more.
  fleet.drain = [&attendance](WorkerId id, const std::string&) { attendance.on_retired(id); };
  fleet.machine_ended = [&node](WorkerId id, const std::string& why) { node.give_up(id, why); };
  fleet.launch = [this, &roster, &node](const provisioner::Offer& offer) {
    roster.add_rented_offer(offer);
    return worker_launch_spec(offer, run_.config, node, {.program = run_.options.program, .folder = worker_folders()});
  };
  fleet.record = [&record](std::string_view event, const std::string& offer, const std::string& detail) {
    record.append_event(event, {{"offer", offer}, {"detail", detail}});
  };
  ECHO_TRY(make_folders(fleet.providers.log_folder));
  ECHO_ASSIGN(fleet_, provisioner::FleetDriver::start(std::move(fleet)));
  // Workers of an earlier learner process may have reconnected already; add_listener() reports them as well.
  attendance.add_listener([driver = fleet_.get()](const PresenceChange& change) {
    if (auto event = fleet_event(change)) driver->notify(*std::move(event));
  });
  started_ = fleet_.get();
  return ok();
}

void RunFleet::stop() {
  if (fleet_) fleet_->stop();
}

provisioner::FleetSummary RunFleet::summary() const {
  const provisioner::FleetDriver* fleet = driver();
  return fleet ? fleet->summary() : provisioner::FleetSummary{};
}

Status RunFleet::check_budget() const {
  const provisioner::FleetSummary fleet = summary();
  if (!fleet.numbers.money_spent) return ok();
  return fail(
      Code::kExhausted, "fleet",
      "${:.2f} of fleet.usd_max is spent, so all machines are released. The run stopped at step {}; to continue, "
      "use --resume with a larger fleet.usd_max",
      fleet.numbers.usd, journal_.step());
}

Status RunFleet::wait_for_workers(const Attendance& attendance,
                                  const std::function<void(const std::string& phase)>& tick) const {
  constexpr int kMachinesInTurn = 3;  // a machine that does not join in time is replaced by another
  constexpr Duration kPoll = std::chrono::milliseconds(100);
  const TimePoint began_at = run_.clock.now();
  const Duration patience = run_.config.fleet.join_timeout;  // for the others, once a worker has joined
  // The time that one machine has to start. It is longer for a provider that reports the phases of a start.
  const provisioner::ProviderKind* kind = provisioner::provider_kind(run_.config.fleet.provider);
  const Duration start_limit = run_.config.fleet.start_limit(kind != nullptr && kind->reports_phases);
  while (!run_.stop) {
    ECHO_TRY(check_budget());
    const std::size_t joined = attendance.alive_count();
    if (const provisioner::FleetSummary now = summary(); joined == 0 && now.account_needs_user)
      return fail(Code::kUnavailable, "start fleet", "{}", now.account_trouble);
    const std::size_t missing_by_hand = joined > 0 ? 0 : 1;  // without a fleet, one worker is needed
    const std::size_t missing = fleet_ ? still_joining() : missing_by_hand;
    const provisioner::FleetStatus fleet = summary().numbers;
    std::string phases;
    if (const auto not_booting = fleet.queued + fleet.pulling; not_booting > 0)  // they count as joining as well
      phases = fmt::format(" ({} queued, {} pulling, {} booting)", fleet.queued, fleet.pulling,
                           fleet.joining - std::min(fleet.joining, not_booting));
    tick(fmt::format("{} workers joined, waiting for {}{}", joined, missing, phases));
    // After that many machines, the reason is hardly a machine.
    if (joined == 0 && fleet.not_joined >= std::max<std::uint64_t>(kMachinesInTurn, summary().planned))
      return fail(
          Code::kUnavailable, "start fleet",
          "the containers of {} machines ran, and no worker has joined. Can other machines reach this learner at "
          "{} (network.bind, network.port, a firewall)? Does fleet.image or fleet.bundle hold this version of "
          "echoline?{}",
          fleet.not_joined, learner_address_, missing_workers_hint());
    if (missing == 0 && joined > 0) return ok();
    const Duration waited = run_.clock.now() - began_at;
    if (joined > 0 && waited >= patience) return ok();
    const int machines_in_turn = missing > 0 && fleet_ ? kMachinesInTurn : 1;
    if (joined == 0 && waited >= machines_in_turn * start_limit)
      return fail(Code::kUnavailable, "start fleet", "no worker joined within {}{}", to_text(waited),
                  missing_workers_hint());
    std::this_thread::sleep_for(kPoll);
  }
  return ok();
}

std::string RunFleet::missing_workers_hint() const {
  const provisioner::FleetSummary fleet = summary();
  const std::string trouble = fleet.account_trouble.empty() ? fleet.trouble : fleet.account_trouble;
  const std::string folder = journal_.record().folder().string();
  return (trouble.empty() ? "" : "; the last problem was: " + trouble) +
         (run_.config.fleet.is_local() ? fmt::format("; logs of workers are in {}/logs", folder)
                                       : fmt::format("; `echoline ledger show {}` has every decision", folder));
}

}  // namespace echoline::learner
