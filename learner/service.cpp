// The learner process: builds the parts of a run, connects them and ends them. `echoline learner` calls it.
#include "learner/service.hpp"

#include <thread>
#include <tuple>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/external/node_calls.hpp"
#include "learner/planning.hpp"
#include "learner/preflight.hpp"
#include "learner/report.hpp"
#include "learner/resume.hpp"
#include "learner/run_overlay.hpp"
#include "learner/tinker_run.hpp"
#include "learner/training_loop.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr Duration kPoll = std::chrono::milliseconds(50);  // how often the waits at the end of a run check
constexpr Duration kStoreWait = std::chrono::minutes(30);  // for the last versions of a completed run to be stored

// Assembles the parts of a run and connects their events. The order of the members is the order of construction; they
// end in reverse.
class Service {
 public:
  Service(const RunConfig& config, const ServiceOptions& options, const std::atomic<bool>& stop)
      : run_{.config = config,
             .options = options,
             .stop = stop,
             .clock = options.clock != nullptr ? *options.clock : system_clock_},
        publisher_(
            delta::EncodeOptions{.threads = static_cast<unsigned>(config.learner.threads)},
            // The desk must know a version early, because workers may submit its tokens before all of it is sent.
            {.begins = [this](Version version) { desk_->begin_publishing(version); },
             .published = [this](const PublishReport& report) { on_published(report); },
             .note = [this](const delta::StateView& policy) { return note_for_servers(policy); }}) {}

  ~Service() { shut_down(); }

  Result<ServiceOutcome> run() {
    const bool resume = run_.options.resume;
    ECHO_TRY(check_and_plan());
    ECHO_ASSIGN(const SourceMaker make_source, source_maker(run_.config, run_.options.built_in));
    if (run_.options.on_plan) run_.options.on_plan(plan_.plan);
    ECHO_TRY(open_journal());
    if (resume)
      ECHO_TRY(listen_early());
    else
      ECHO_TRY(store_settings());
    ECHO_ASSIGN(RunTask task, RunTask::read(run_.config));
    task_.emplace(std::move(task));
    ECHO_ASSIGN(policy_,
                make_source({.config = run_.config,
                             .task = *task_,
                             .record = journal_->record(),
                             .report_phase = [this](const std::string& text) { write_status(phase_text(text)); },
                             .while_waiting = [this] { return fleet_->check_budget(); },
                             .stop = run_.stop,
                             .probe = run_.options.built_in.probe,
                             .node_calls = &node_calls_},
                            resume));
    // listen_early() relied on the newest checkpoint. If that was damaged, an older one was loaded.
    if (node_ && journal_->step() != policy_->steps()) {
      log::warn("the checkpoint goes back to step {} instead of {}: workers have to join again", policy_->steps(),
                journal_->step());
      open_node_ = nullptr;
      node_->stop();
      node_.reset();
      workers_.emplace(run_, plan_.plan, *journal_);  // again without any worker
    }
    journal_->set_step(policy_->steps());
    if (!node_) ECHO_TRY(start_overlay());  // before any money is spent, because a port in use ends the run
    if (!resume) ECHO_TRY(policy_->begin());
    if (run_.stop) return finish("interrupted");
    ECHO_TRY(start_desk());
    if (resume) ECHO_TRY(store_settings());  // only now, because a refused resume must leave the earlier settings
    ECHO_TRY(open_outbox());
    ECHO_TRY(workers_->describe_run(*task_, *node_));
    if (!run_.config.fleet.joined_by_hand()) write_status("renting the fleet");
    ECHO_TRY(fleet_->start(workers_->roster(), workers_->attendance(), *node_));
    const Result<bool> completed = tinker_ ? serve_tinker_client() : train();
    if (!completed && fleet_->summary().numbers.money_spent) {
      log::warn("{}", completed.error().message());
      return finish("out of budget");
    }
    if (!completed) return completed.error();
    if (!*completed) return finish("interrupted");  // the loop ended because of `stop`
    wait_for_final_acks();
    return finish("completed");
  }

 private:
  // Trains the run's steps on groups from the workers. False if the run was stopped first.
  Result<bool> train() {
    const auto write_phase = [this](const std::string& phase) { write_status(phase); };
    ECHO_TRY(fleet_->wait_for_workers(workers_->attendance(), write_phase));
    if (run_.stop) return false;
    TrainingLoop loop(run_, {.journal = *journal_,
                             .policy_source = *policy_,
                             .workers = *workers_,
                             .fleet = *fleet_,
                             .rollout_desk = *desk_,
                             .publisher = publisher_,
                             .node = *node_,
                             .write_status = write_phase});
    return loop.run();
  }

  // Lets a Tinker client train. It may connect before any worker does.
  Result<bool> serve_tinker_client() {
    ECHO_TRY(tinker_->listen(journal_->record(), [this] { return workers_->attendance().alive_count(); }));
    return tinker_->serve({.journal = *journal_,
                           .policy_source = *policy_,
                           .fleet = *fleet_,
                           .publisher = publisher_,
                           .write_status = [this](const std::string& phase) { write_status(phase); }});
  }

  Status check_and_plan() {
    // A resumed run keeps its plan, so the market is not searched again.
    std::filesystem::path plan_file = run_.options.plan;
    if (plan_file.empty() && run_.options.resume) plan_file = run_.config.run_folder() / "plan.json";
    Preflight checked =
        preflight(run_.config, {.built_in = run_.options.built_in, .plan = plan_file, .resume = run_.options.resume});
    for (const Check& check : checked.checks)
      if (check.verdict == Verdict::kWarning) log::warn("{}: {}", check.name, check.detail);
    ECHO_TRY(checked.status());
    plan_ = std::move(*checked.plan);
    return ok();
  }

  Status open_journal() {
    // Without a database the run ends, so the journal need not wait for the disk any longer.
    ECHO_ASSIGN(journal_,
                RunJournal::open(run_, {.is_pointless = [this] { return desk_ && desk_->has_given_up_database(); },
                                        .keep_alive = [this](const std::string& reason) -> Status {
                                          ECHO_TRY(fleet_->check_budget());
                                          write_status(reason);
                                          return ok();
                                        }}));
    workers_.emplace(run_, plan_.plan, *journal_);
    fleet_.emplace(run_, plan_.plan, *journal_);
    const std::filesystem::path& moved_to = journal_->record().moved_to();
    if (!moved_to.empty()) log::info("the earlier run was moved to {}", moved_to.string());
    return ok();
  }

  // Stores the settings of the run from now on. A resume records those that have changed.
  Status store_settings() {
    RunRecord& record = journal_->record();
    if (run_.options.resume) ECHO_TRY(record_changed_settings(record, run_.config, journal_->step()));
    ECHO_TRY(write_file_atomic(record.folder() / "config.yaml", run_.config.resolved_yaml));
    return write_file_atomic(record.folder() / "plan.json", json_text(plan_.plan.to_json(), /*indent=*/2) + "\n");
  }

  // A resumed run is "resuming" until its desk is open.
  std::string phase_text(const std::string& text) const {
    return run_.options.resume && !open_desk_ ? "resuming: " + text : text;
  }

  // Workers that outlived an earlier process look for this one for a limited time. So it listens before it loads the
  // model.
  Status listen_early() {
    const auto latest = find_policy(journal_->record().folder() / "checkpoints");
    if (!latest) return ok();  // loading reports the error
    journal_->set_step(static_cast<std::uint64_t>(latest->step));
    write_status("resuming");
    return start_overlay();
  }

  Status start_overlay() {
    RunRecord& record = journal_->record();
    const auto resumed_at = run_.options.resume ? std::optional(Version{journal_->step()}) : std::nullopt;
    ECHO_ASSIGN(auto options, overlay_options(run_.config, plan_.plan, record.folder(), resumed_at));
    overlay::LearnerEvents events;
    events.check_heartbeat = [](std::string_view bytes) -> Status {
      ECHO_TRY(data_plane::parse_vitals(bytes));
      return ok();
    };
    events.region_of = [this](const overlay::MemberInfo& member) {
      return workers_->roster().region_of(printable(member.name), member.place);
    };
    events.links_of = [this](const overlay::MemberInfo& member) {
      return workers_->roster().expected_links(printable(member.name));
    };
    events.heartbeat = [this](const overlay::HeartbeatReceived& beat) { on_heartbeat(beat); };
    events.joined = [this](const overlay::MemberInfo& member) { workers_->on_joined(member); };
    events.away = [this](WorkerId id, const std::string& reason) { workers_->on_away(id, reason); };
    events.lost = [this](WorkerId id, const std::string& reason) {
      if (workers_->roster().is_node(id)) node_calls_.on_lost(id);
      workers_->on_lost(id, reason);
    };
    events.trouble = [this](WorkerId id, const std::string& what) { workers_->on_trouble(id, what); };
    events.installed = [this](WorkerId id, Version version, const overlay::Digest& digest) {
      workers_->roster().record_acknowledgement(id, version, digest);
    };
    events.message = [this](WorkerId id, std::string bytes) {
      if (workers_->roster().is_node(id)) return node_calls_.on_message(id, bytes);
      if (RolloutDesk* desk = open_desk_) desk->receive(id, std::move(bytes));
    };
    events.broadcast_done = [this](const overlay::BroadcastReport& report) { on_broadcast_done(report); };
    events.need_catch_up = [this](Version, std::optional<Version> from) { publisher_.request_catch_up(from); };
    events.chose_topology = [&record](const std::string& text) { record.append_event("topology", {{"what", text}}); };
    events.slow_hop = [&record](const overlay::SlowHop& hop) { record.append_event("slow_hop", {{"hop", hop.text}}); };
    ECHO_ASSIGN(node_, overlay::LearnerNode::start(std::move(options), std::move(events)));
    open_node_ = node_.get();
    publisher_.attach(node_.get());
    if (run_.config.learner.trainer != TrainerKind::kExternal)
      node_calls_.refuse("the run's `learner.trainer` is not `external`, so it has no ranks and no nodes");
    workers_->greet_workers(*node_);
    nlohmann::json listening{{"at", overlay::to_text(node_->endpoint())}};
    if (!run_.config.network.relay.empty()) listening["relay"] = run_.config.network.relay;
    record.append_event("listening", std::move(listening));
    return ok();
  }

  // Where every version is stored besides, if the run has a store.
  Status open_outbox() {
    const store::StoreSettings& settings = run_.config.store;
    if (!settings.is_used()) return ok();
    RunRecord& record = journal_->record();
    const std::string& run = run_.config.run.name;
    ECHO_ASSIGN(const auto authority, overlay::trust::Authority::open(record.folder() / "overlay", run));
    ECHO_ASSIGN(outbox_, store::Outbox::open(authority.key(), {.settings = settings,
                                                               .folder = record.folder() / "outbox",
                                                               .run_id = run,
                                                               .resumed_at = Version{journal_->step()},
                                                               .model_files = task_->files.content,
                                                               .stored = [&record](const store::StoredVersion& stored) {
                                                                 record.append_metric(
                                                                     "stored", {{"version", stored.version.value},
                                                                                {"snapshot", stored.snapshot},
                                                                                {"patch_bytes", stored.patch_bytes},
                                                                                {"requests", stored.requests},
                                                                                {"seconds", stored.seconds}});
                                                               }}));
    publisher_.attach(outbox_.get());
    return ok();
  }

  Status start_desk() {
    RunRecord& record = journal_->record();
    DeskOptions desk_options;
    desk_options.file = record.folder() / "replay.sqlite";
    desk_options.clock = run_.options.clock;
    desk_options.pacing = run_.config.pacing();
    desk_options.lease = run_.config.lease_length();
    if (run_.config.learner.trainer == TrainerKind::kTinker) {
      tinker_.emplace(run_, *task_);
      desk_options.samples = &tinker_->samples();
    }
    DeskEvents events;
    events.send = [this](WorkerId worker, std::string bytes) {
      if (const Status sent = node_->send(worker, std::move(bytes)); !sent) log::warn("{}", sent.error().message());
    };
    events.accepted = [this](WorkerId worker, std::uint64_t rollouts, double lease_seconds) {
      workers_->roster().record_accepted(worker, rollouts, lease_seconds);
    };
    events.turned_away = [this](WorkerId worker) { workers_->roster().record_turned_away(worker); };
    events.without_work = [this](WorkerId worker, double seconds) {
      workers_->roster().record_without_work(worker, seconds);
    };
    events.misbehaved = [this, &record](WorkerId worker, const std::string& reason) {
      node_->expel(worker, reason);
      record.append_event("expelled", {{"worker", worker.value}, {"reason", printable(reason)}});
    };
    events.leaving = [this](WorkerId worker) { return workers_->attendance().on_leaving(worker); };
    events.drained = [this](WorkerId worker) { workers_->attendance().on_drained(worker); };
    events.database_stalled = [this, &record](const Error* error) {
      record.set_disk_alarm("replay buffer", journal_->step(), error);
    };
    events.set_aside = [&record](const GroupSetAside& group) {
      record.append_event("group_set_aside", {{"group", group.group.value},
                                              {"problem", group.problem},
                                              {"reason", group.reason},
                                              {"detail", group.detail}});
    };
    events.policy_unusable = [&record](const PolicyUnusable& policy) {
      json workers = json::array();
      for (const WorkerId worker : policy.workers) workers.push_back(worker.value);
      record.append_event(
          "policy_unusable",
          {{"version", policy.version.value}, {"workers", std::move(workers)}, {"detail", policy.detail}});
    };
    const std::uint64_t step = journal_->step();
    ECHO_ASSIGN(desk_,
                RolloutDesk::open(desk_options, task_->make_submission_checker(run_.config), step, std::move(events)));
    // The earlier process may have trained on groups without being able to mark them in the database.
    if (run_.options.resume)
      mark_consumed(record.folder(), step, [this](std::uint64_t consumed, const replay_buffer::Batch& batch) {
        return desk_->consume(consumed, batch);
      });
    workers_->attendance().add_listener([this](const PresenceChange& change) { desk_->on_presence_change(change); });
    open_desk_ = desk_.get();
    return ok();
  }

  void wait_for_final_acks() {
    const TimePoint deadline = run_.clock.now() + provisioner::rules::kFinalInstallWait;
    while (!run_.stop && run_.clock.now() < deadline) {
      const auto [newest_version, digest] = journal_->status().newest();
      if (workers_->roster().all_present_have(newest_version)) return;
      write_status("waiting for the last policy to arrive everywhere");
      std::this_thread::sleep_for(kPoll);
    }
  }

  void wait_for_store() {
    if (!outbox_) return;
    const TimePoint deadline = run_.clock.now() + kStoreWait;
    while (!run_.stop && run_.clock.now() < deadline && !outbox_->wait_until_stored(kPoll))
      write_status(fmt::format("storing the last {} versions", outbox_->waiting()));
  }

  // Returns the fleet, evaluates the policy of a completed run, writes the report and ends all parts. `how`: the reason
  // for the end, as in the report.
  Result<ServiceOutcome> finish(const std::string& how) {
    write_status("finishing");
    RunJournal& journal = *journal_;
    ReportInput input;
    if (desk_) {
      if (const auto counts = desk_->counts()) {
        for (const auto& [reason, trajectories] : counts->buffer.rejected)
          if (trajectories > 0) input.rejected[reason] = trajectories;
        for (const auto& [reason, submissions] : counts->refused) input.rejected["refused: " + reason] = submissions;
        input.groups_set_aside = counts->leases.set_aside;
        input.limited_steps = counts->leases.limited_steps;
        input.regrading = counts->regrading.counts;
        input.scoring = counts->scoring;
      }
      desk_->on_run_ended();
    }
    if (node_) {
      workers_->refresh(*node_);
      const overlay::LearnerStats stats = node_->stats();
      input.bytes_sent = stats.bytes_sent.count;
      input.topology = stats.topology.to_text();
    }
    workers_->attendance().close();  // workers that leave because the fleet is returned do not count as lost
    input.workers = workers_->roster().entries();
    input.nodes = workers_->roster().nodes();
    std::tie(input.version, input.digest) = journal.status().newest();
    fleet_->stop();  // before the last evaluation, which needs no machine
    const bool completed = how == "completed";
    if (completed) ECHO_TRY(policy_->evaluate("after"));
    if (completed) wait_for_store();
    std::error_code ignored;
    std::filesystem::remove_all(fleet_->worker_folders(), ignored);  // their workers have ended
    ECHO_TRY(journal.persist("usage", [&] { return journal.run_clock().save(); }));
    input.config = &run_.config;
    input.plan = &plan_.plan;
    ECHO_ASSIGN(input.figures, read_run_figures(journal.record().folder() / "metrics.jsonl"));
    input.fleet = fleet_->summary();
    input.wall_seconds = journal.run_clock().wall_seconds();
    input.learner_usd = journal.run_clock().learner_usd();
    input.steps_done = journal.step();
    input.memory = process_memory();
    input.end_reason = how;
    ServiceOutcome outcome;
    outcome.report = make_report(input);
    outcome.completed = completed;
    outcome.unreturned = input.fleet.unreturned;
    ECHO_TRY(journal.persist("report", [&] { return journal.record().write_report(outcome.report); }));
    journal.record().append_event("ended", {{"how", how}, {"step", journal.step()}});
    shut_down();
    ECHO_TRY(journal.persist("metrics and events", [&] { return journal.record().write_pending_rows(); }));
    journal.status().make_write_due();
    write_status(how);
    return outcome;
  }

  // Ends all parts. The destructor calls it, so no part is left running after an error.
  void shut_down() {
    if (tinker_) tinker_->stop("the learner has ended");
    if (desk_) desk_->on_run_ended();
    if (fleet_) fleet_->stop();
    node_calls_.close();
    publisher_.stop();
    if (outbox_) outbox_->stop();
    if (node_) node_->stop();
    if (desk_) desk_->stop();
  }

  // Makes the note that workers get with a policy: log-probabilities that the policy gives to fixed tokens. A worker
  // whose engine is a separate server compares them with the server's, and so checks that it has the policy's weights.
  // Called on a thread of the publisher.
  std::string note_for_servers(const delta::StateView& policy) const {
    const PolicyProbe& probe = run_.options.built_in.probe;
    const bool may_have_servers = run_.config.worker.engine != "builtin" || run_.config.fleet.joined_by_hand();
    if (!may_have_servers || !probe || !task_->files.config.check_computable()) return {};
    const auto logprobs = probe(policy, task_->files.config, run_.config.rollout.temperature,
                                static_cast<int>(run_.config.learner.threads));
    if (!logprobs) {
      log::warn("workers cannot compare their servers with the policy: {}", logprobs.error().message());
      return {};
    }
    schema::PolicyNote note;
    note.mutable_probe_logprobs()->Assign(logprobs->begin(), logprobs->end());
    return note.SerializeAsString();
  }

  // Called on the publisher's thread.
  void on_published(const PublishReport& report) {
    journal_->status().set_published(report.version, report.digest, report.stats.patch_bytes);
    desk_->finish_publishing(report.version, report.digest);
    journal_->record().append_metric("publication", {{"version", report.version.value},
                                                     {"snapshot", report.snapshot},
                                                     {"state_bytes", report.stats.state_bytes},
                                                     {"patch_bytes", report.stats.patch_bytes},
                                                     {"density", report.stats.density()},
                                                     {"encode_seconds", report.encode_seconds},
                                                     {"digest", overlay::to_hex(report.digest)}});
  }

  // Called on the overlay's thread, so that the fleet sees progress during a long learner step.
  void on_heartbeat(const overlay::HeartbeatReceived& beat) {
    const auto vitals = data_plane::parse_vitals(beat.application);
    if (!vitals || workers_->roster().is_node(beat.worker)) return;  // check_heartbeat refused it
    const WorkerMeter::Progress progress = workers_->roster().take_heartbeat(beat.worker, *vitals, run_.clock.now());
    // While the database cannot store, no worker gets work, so the fleet must not count that time as slowness.
    const RolloutDesk* desk = open_desk_;
    const bool turned_away = progress.turned_away || (desk && desk->is_database_stalled());
    if (provisioner::FleetDriver* fleet = fleet_->driver())
      fleet->on_heartbeat({.worker = beat.worker,
                           .rollouts = progress.rollouts,
                           .busy_s = progress.busy_s,
                           .turned_away = turned_away,
                           .without_work_s = progress.without_work_s},
                          beat.bytes_in, beat.bytes_forwarded, beat.bytes_delivered);
  }

  // Called on the overlay's thread.
  void on_broadcast_done(const overlay::BroadcastReport& report) {
    // A snapshot is larger than usual payloads, so the fleet gets only the broadcast times (t_b) of deltas, which have
    // a base version.
    if (provisioner::FleetDriver* fleet = fleet_->driver(); fleet && report.base)
      fleet->on_broadcast_measured(report.t_b, report.payload, workers_->roster().install_time());
    const auto links = workers_->roster().links_of(report.topology.workers());
    journal_->status().set_broadcast_time(report.t_b);
    journal_->record().append_metric("broadcast",
                                     broadcast_row(run_.config, report, links, workers_->roster().nodes_up()));
  }

  void write_status(const std::string& phase) {
    RunStatus& status = journal_->status();
    status.set_phase(phase);
    if (!status.is_write_due()) return;
    if (node_) workers_->refresh(*node_);
    status.write(journal_->step(), policy_.get(), fleet_->summary(), workers_->roster());
  }

  const SystemClock system_clock_;
  const RunHost run_;
  RunPlan plan_;
  std::unique_ptr<RunJournal> journal_;
  std::optional<RunTask> task_;
  NodeCalls node_calls_{[this](WorkerId node, std::string message) {
    overlay::LearnerNode* const sender = open_node_;
    if (!sender) return;
    if (const Status sent = sender->send(node, std::move(message)); !sent) log::warn("{}", sent.error().message());
  }};
  std::unique_ptr<PolicySource> policy_;
  std::optional<RunWorkers> workers_;
  std::optional<RunFleet> fleet_;
  std::optional<TinkerRun> tinker_;  // a run that a Tinker client trains
  std::unique_ptr<RolloutDesk> desk_;
  std::atomic<RolloutDesk*> open_desk_ = nullptr;  // desk_ once it is open, for other threads than the main one
  std::unique_ptr<store::Outbox> outbox_;          // of a run with a store
  Publisher publisher_;
  std::unique_ptr<overlay::LearnerNode> node_;
  std::atomic<overlay::LearnerNode*> open_node_ = nullptr;  // node_ for other threads than the main one
};

}  // namespace

Result<ServiceOutcome> run_learner(const RunConfig& config, const ServiceOptions& options,
                                   const std::atomic<bool>& stop) {
  Service service(config, options, stop);
  return service.run();
}

}  // namespace echoline::learner
