#include "learner/service.hpp"

#include <algorithm>
#include <map>
#include <thread>
#include <tuple>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "chains/broadcast_model.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/attendance.hpp"
#include "learner/batch.hpp"
#include "learner/by_task.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/disk_patience.hpp"
#include "learner/launch.hpp"
#include "learner/market.hpp"
#include "learner/planning.hpp"
#include "learner/policy_source.hpp"
#include "learner/preflight.hpp"
#include "learner/publisher.hpp"
#include "learner/report.hpp"
#include "learner/resume.hpp"
#include "learner/rollout_desk.hpp"
#include "learner/roster.hpp"
#include "learner/run_clock.hpp"
#include "learner/run_record.hpp"
#include "learner/run_status.hpp"
#include "learner/run_task.hpp"
#include "overlay/sizes.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/node.hpp"
#include "provisioner/fleet_driver.hpp"
#include "provisioner/offer_links.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::learner {
namespace {

using nlohmann::json;

constexpr Duration kLockPatience = std::chrono::seconds(20);  // with a run that its last process is about to leave
constexpr Duration kPoll = std::chrono::milliseconds(200);
constexpr Duration kFinalAckWait = std::chrono::seconds(30);
constexpr Duration kDiskRetry = std::chrono::seconds(1);

class Service {
 public:
  Service(const RunConfig& config, const ServiceOptions& options, const std::atomic<bool>& stop)
      : config_(config), options_(options), stop_(stop) {}

  ~Service() { shut_down(); }

  Result<ServiceOutcome> run() {
    // A run that goes on has a plan already: the market of today is not asked what should have been rented.
    std::filesystem::path plan = options_.plan;
    if (plan.empty() && options_.resume) plan = config_.run_folder() / "plan.json";
    Preflight checked = preflight(config_, {options_.built_in, plan, options_.resume});
    for (const Check& check : checked.checks)
      if (check.verdict == Verdict::kWarning) log::warn("{}: {}", check.name, check.detail);
    ECHO_TRY(checked.status());
    plan_ = std::move(*checked.plan);
    ECHO_ASSIGN(const SourceMaker make_source, source_maker(config_, options_.built_in));
    start_attendance();
    if (options_.planned) options_.planned(plan_.plan);
    ECHO_ASSIGN(record_,
                RunRecord::open(config_.run_folder(), options_.resume, options_.resume ? kLockPatience : Duration{}));
    ECHO_ASSIGN(run_clock_, RunClock::open(record_->folder(), config_.learner.usd_per_hour, options_.resume, clock_));
    status_.emplace(config_, *record_, *run_clock_, clock_);
    if (!record_->moved_to().empty()) {
      log::info("the earlier run was moved to {}", record_->moved_to().string());
      ECHO_TRY(release_earlier(config_, record_->moved_to()));
    }
    if (options_.resume)
      ECHO_TRY(listen_early());
    else
      ECHO_TRY(keep_settings());
    ECHO_ASSIGN(RunTask task, RunTask::read(config_));
    task_.emplace(std::move(task));
    ECHO_ASSIGN(policy_,
                make_source({config_, *task_, *record_, [this](const std::string& text) { source_phase(text); },
                             [this] { return fleet_money(); }, stop_, options_.built_in.probe},
                            options_.resume));
    if (node_ && step_ != policy_->steps()) {
      log::warn("the checkpoint goes back to step {} instead of {}: workers have to join anew", policy_->steps(),
                step_);
      node_->stop();
      node_.reset();
      start_attendance();
    }
    step_ = policy_->steps();
    if (!node_) ECHO_TRY(start_overlay());  // before any money is spent: a port in use ends the run here
    if (!options_.resume) ECHO_TRY(policy_->begin());
    if (stop_) return finish("interrupted");
    ECHO_TRY(start_desk());
    if (options_.resume)
      ECHO_TRY(keep_settings());  // nothing has refused the run: what it was started with before may go
    ECHO_TRY(describe_run());
    ECHO_TRY(start_fleet());
    ECHO_TRY(wait_for_fleet());
    if (stop_) return finish("interrupted");
    ECHO_ASSIGN(bool going_on, publish(Version{step_}));
    while (going_on && step_ < config_.run.steps && !stop_) {
      ECHO_ASSIGN(going_on, train_one_step());
    }
    ECHO_TRY(checkpoint());
    if (going_on) {
      ECHO_ASSIGN(going_on, wait_until_published());
    }
    if (!going_on || step_ < config_.run.steps) return finish("interrupted");
    wait_for_final_acks();
    ECHO_TRY(policy_->evaluate("after"));
    return finish("completed");
  }

 private:
  // What the run is from now on. A resume notes what is other than before.
  Status keep_settings() {
    if (options_.resume) ECHO_TRY(note_changed_settings(*record_, config_, step_));
    ECHO_TRY(write_file_atomic(record_->folder() / "config.yaml", config_.resolved_yaml));
    return write_file_atomic(record_->folder() / "plan.json", json_text(plan_.plan.to_json(), 2) + "\n");
  }

  // Does `work` again until the disk takes what it writes; the run stands still meanwhile. An error: of something else,
  // of a disk that fails for longer than DiskPatience has, of the money, or after a request to stop.
  Status persist(std::string_view part, const std::function<Status()>& work) {
    DiskPatience patience;
    for (;;) {
      const Status done = work();
      const bool wait = !done && patience.after(done.error(), clock_.now()) == DiskPatience::Verdict::kWait &&
                        !(desk_ && desk_->given_up());
      if (!wait) record_->disk(part, step_, nullptr);
      if (done) return done;
      if (!wait || stop_) return done;
      record_->disk(part, step_, &done.error());
      ECHO_TRY(fleet_money());
      write_status("waiting for the disk: " + done.error().message());
      const TimePoint again = clock_.now() + kDiskRetry;
      while (!stop_ && clock_.now() < again) std::this_thread::sleep_for(kPoll / 4);
      stood_still_ += kDiskRetry;
    }
  }

  // Why the run ends, once what it has come to is kept.
  Error ends(Error why) {
    const Status kept = persist("checkpoints", [this] { return policy_->checkpoint(); });
    why.detail +=
        kept ? fmt::format("; a checkpoint of step {} is written: go on with --resume", step_)
             : fmt::format("; no checkpoint of step {} could be written ({}): --resume goes on from the one before",
                           step_, kept.error().message());
    return why;
  }

  // A step was trained on groups that the replay buffer cannot mark as consumed: a resume does it.
  Error ends_unmarked(const replay_buffer::Batch& batch, Error why) {
    if (!note_unmarked(record_->folder(), step_, batch.ids())) {
      why.detail += "; --resume goes on from the newest checkpoint";
      return why;
    }
    ++step_;
    return ends(std::move(why));
  }

  void source_phase(const std::string& text) {
    write_status(options_.resume && !desk_ready_ ? "resuming: " + text : text);
  }

  // Workers that outlived an earlier process look for this one, for a while: it is there before the model is loaded.
  Status listen_early() {
    const auto latest = find_policy(record_->folder() / "checkpoints");
    if (!latest) return ok();  // loading says what is wrong
    step_ = static_cast<std::uint64_t>(latest->step);
    write_status("resuming");
    return start_overlay();
  }

  // Sends the run's description to every worker that is present or joins: from now on there is work.
  Status describe_run() {
    schema::RunSpec spec;
    spec.set_run(config_.run.name);
    task_->describe(config_, spec);
    config_.rollout.describe(spec);
    schema::LearnerMessage message;
    ECHO_ASSIGN(*message.mutable_run_spec(), data_plane::pack_run_spec(spec));
    has_work_ = true;
    attendance_->add(
        [this, bytes = std::make_shared<const std::string>(message.SerializeAsString())](const PresenceChange& change) {
          if (change.has_joined()) send(change.worker, bytes);
        });
    return ok();
  }

  std::shared_ptr<const std::string> wait_message() const {
    schema::LearnerMessage message;
    message.mutable_wait()->set_reason(options_.resume ? "it is resuming" : "it is starting");
    return std::make_shared<const std::string>(message.SerializeAsString());
  }

  void send(WorkerId id, std::shared_ptr<const std::string> message) {
    if (const Status sent = node_->send(id, std::move(message)); !sent) log::error("{}", sent.error().message());
  }

  // Without any worker.
  void start_attendance() {
    roster_.emplace(config_, plan_.plan);
    attendance_.emplace();
    attendance_->add([this](const PresenceChange& change) {
      roster_->follow(change, clock_.now());
      record_presence(change);
    });
  }

  Status start_overlay() {
    overlay::LearnerOptions o;
    o.network = config_.network;
    o.up_expected = learner_up(config_);
    const auto up_of = [this](const provisioner::PlanRow* row) {
      return provisioner::links_of(row->offer, config_.fleet, config_.paths).up;
    };
    if (config_.paths.worker_rate)
      o.chain_rate = *config_.paths.worker_rate;
    else if (const auto chosen = plan_.plan.chosen(); !chosen.empty())  // of the slowest, as the plan has it
      o.chain_rate = up_of(*std::ranges::min_element(chosen, {}, up_of));
    // Without a plan nobody knows what the fleet will be.
    const chains::Topology& planned = plan_.plan.topology;
    if (config_.network.topology != chains::TopologyPolicy::kAuto)
      o.policy = config_.network.topology;
    else if (planned.size() > 0)
      o.policy = planned.policy;
    o.chooses_policy = config_.network.topology == chains::TopologyPolicy::kAuto;
    o.heartbeat = std::min<Duration>(o.heartbeat, o.network.heartbeat_timeout / 4);
    o.away_max = config_.fleet.away_max;
    ECHO_ASSIGN(const model::ModelConfig model, run_model_config(config_));
    o.policy_bytes = {2 * model.parameters()};  // bf16
    o.regions = config_.paths.regions.ways;
    o.run_id = config_.run.name;
    o.folder = record_->folder() / "overlay";
    o.bundle = config_.fleet.bundle.value_or(std::filesystem::path{});
    if (options_.resume) o.resumed_at = Version{step_};
    o.message_max = worker_message_max(model.positions_max, config_.rollout.response_tokens_max,
                                       config_.rollout.group_size, config_.rollout.metadata_max);
    overlay::LearnerEvents events;
    events.check_heartbeat = [](std::string_view bytes) -> Status {
      ECHO_TRY(data_plane::parse_vitals(bytes));
      return ok();
    };
    events.region_of = [this](const overlay::MemberInfo& member) {
      return roster_->region_of(printable(member.name), member.place);
    };
    // What machines call themselves and say is shown from here on: in the log, in files, on terminals.
    events.heartbeat = [this](const overlay::HeardFrom& beat) { heartbeat(beat); };
    events.joined = [this](const overlay::MemberInfo& member) {
      const std::string name = printable(member.name);
      attendance_->joined(member.id, name, roster_->region_of(name, member.place));
    };
    events.away = [this](WorkerId id, const std::string& reason) { attendance_->away(id, printable(reason)); };
    events.lost = [this](WorkerId id, const std::string& reason) { attendance_->lost(id, printable(reason)); };
    events.trouble = [this](WorkerId id, const std::string& said) {
      const std::string what = printable(said);
      log::warn("worker {}: {}", id, what);
      roster_->had_trouble(id);
      record_->event("trouble", {{"worker", id.value}, {"what", what}});
    };
    events.acked = [this](WorkerId id, Version version, const overlay::Digest& digest) {
      roster_->acknowledged(id, version, digest);
    };
    events.message = [this](WorkerId id, std::string bytes) {
      if (desk_ready_) desk_->receive(id, std::move(bytes));
    };
    events.broadcast_done = [this](const overlay::BroadcastReport& report) { broadcast_done(report); };
    events.need_catch_up = [this](Version, std::optional<Version> from) { publisher_.request_catch_up(from); };
    events.chose_topology = [this](const std::string& text) { record_->event("topology", {{"what", text}}); };
    events.slow_hop = [this](const overlay::SlowHop& hop) { record_->event("slow_hop", {{"hop", hop.text}}); };
    ECHO_ASSIGN(node_, overlay::LearnerNode::start(std::move(o), std::move(events)));
    publisher_.attach(node_.get());
    // Workers that joined before start() has returned are among those that add() names.
    attendance_->add([this, wait = wait_message()](const PresenceChange& change) {
      if (change.has_joined() && !has_work_) send(change.worker, wait);
    });
    record_->event("listening", {{"at", overlay::to_text(node_->endpoint())}});
    return ok();
  }

  Status start_desk() {
    DeskOptions desk;
    desk.file = record_->folder() / "replay.sqlite";
    desk.clock = options_.clock;
    desk.pacing = config_.pacing();
    desk.lease = config_.lease_length();
    DeskEvents events;
    events.send = [this](WorkerId worker, std::string bytes) {
      if (const Status sent = node_->send(worker, std::move(bytes)); !sent) log::warn("{}", sent.error().message());
    };
    events.accepted = [this](WorkerId worker, std::uint64_t rollouts, double held_s) {
      roster_->accepted(worker, rollouts, held_s);
    };
    events.turned_away = [this](WorkerId worker) { roster_->turned_away(worker); };
    events.misbehaved = [this](WorkerId worker, const std::string& reason) {
      node_->expel(worker, reason);
      record_->event("expelled", {{"worker", worker.value}, {"reason", printable(reason)}});
    };
    events.leaving = [this](WorkerId worker) { return attendance_->leaving(worker); };
    events.drained = [this](WorkerId worker) { attendance_->drained(worker); };
    events.held_up = [this](const Error* error) { record_->disk("replay buffer", desk_step_, error); };
    events.set_aside = [this](const GroupSetAside& group) {
      record_->event("group_set_aside", {{"group", group.group.value},
                                         {"problem", group.problem},
                                         {"reason", group.reason},
                                         {"detail", group.detail}});
    };
    events.policy_unusable = [this](const PolicyUnusable& policy) {
      json workers = json::array();
      for (const WorkerId worker : policy.workers) workers.push_back(worker.value);
      record_->event("policy_unusable",
                     {{"version", policy.version.value}, {"workers", std::move(workers)}, {"detail", policy.detail}});
    };
    ECHO_ASSIGN(desk_, RolloutDesk::open(desk, task_->door(config_), step_, std::move(events)));
    if (options_.resume)
      mark_consumed(record_->folder(), step_, [this](std::uint64_t step, const replay_buffer::Batch& batch) {
        return desk_->consume(step, batch);
      });
    desk_step_ = step_;
    attendance_->add([this](const PresenceChange& change) { desk_->follow(change); });
    desk_ready_ = true;
    return ok();
  }

  Status start_fleet() {
    if (config_.fleet.joined_by_hand()) {
      std::string join;
      for (const overlay::Endpoint& endpoint : overlay::reached_from_elsewhere(node_->endpoint()))
        join += (join.empty() ? "" : " or ") + overlay::to_text(endpoint);
      log::info(
          "no provider: start workers with `echoline worker --join {} --name NAME`, each with a token from "
          "`echoline token {} --instance NAME`",
          join, record_->folder().string());
      return ok();
    }
    write_status("renting the fleet");
    provisioner::FleetOptions fleet;
    fleet.run = config_.run.name;
    fleet.plan = plan_.plan;
    fleet.other_usd = [this] { return run_clock_->learner_usd().value_or(0); };
    ECHO_ASSIGN(const model::ModelConfig model, run_model_config(config_));
    fleet.market = [this,
                    source = std::make_shared<MarketSource>(config_, model, plan_.plan.request, plan_.plan.market)](
                       const std::atomic<bool>& stop) { return source->look(clock_.unix_seconds(), stop); };
    fleet.clock = options_.clock;
    fleet.ledger_file = record_->folder() / "ledger.sqlite";
    fleet.providers = provider_options(config_);
    fleet.drain = [this](WorkerId id, const std::string&) { attendance_->retired(id); };
    fleet.machine_ended = [this](WorkerId id, const std::string& why) { node_->give_up(id, why); };
    fleet.launch = [this](const provisioner::Offer& offer) {
      roster_->rented(offer);
      return worker_on(offer, config_, *node_, {options_.program, worker_folders()});
    };
    fleet.record = [this](std::string_view event, const std::string& offer, const std::string& detail) {
      record_->event(event, {{"offer", offer}, {"detail", detail}});
    };
    ECHO_TRY(make_folders(fleet.providers.log_folder));
    ECHO_ASSIGN(fleet_, provisioner::FleetDriver::start(std::move(fleet)));
    // Workers that outlived an earlier process may have been back before the fleet was there.
    attendance_->add([this](const PresenceChange& change) {
      if (auto event = fleet_event(change)) fleet_->notify(*std::move(event));
    });
    fleet_ready_ = true;
    return ok();
  }

  // Until every rented worker has joined, or the join timeout is over and some have; machines that never join are
  // replaced meanwhile, a few times. A learner without provider waits for one worker.
  Status wait_for_fleet() {
    constexpr int kMachinesTried = 3;
    const TimePoint begin = clock_.now();
    const Duration patience = config_.fleet.join_timeout;
    while (!stop_) {
      ECHO_TRY(fleet_money());
      const std::size_t joined = attendance_->alive();
      const std::size_t missing = fleet_ ? still_joining() : (joined > 0 ? 0 : 1);
      write_status(fmt::format("{} workers joined, waiting for {}", joined, missing));
      if (missing == 0 && joined > 0) return ok();
      const Duration waited = clock_.now() - begin;
      if (joined > 0 && waited >= patience) return ok();
      if (waited >= (missing > 0 && fleet_ ? kMachinesTried : 1) * patience)
        return fail(Code::kUnavailable, "start fleet", "no worker joined within {}{}; {}", to_text(waited),
                    latest_trouble(), where_to_look());
      std::this_thread::sleep_for(kPoll / 2);
    }
    return ok();
  }

  std::string latest_trouble() const {
    const std::string trouble = fleet_ ? fleet_->summary().trouble : "";
    return trouble.empty() ? "" : ", and the latest that went wrong was: " + trouble;
  }
  std::string where_to_look() const {
    const std::string folder = record_->folder().string();
    if (config_.fleet.local()) return fmt::format("logs of workers are in {}/logs", folder);
    return fmt::format("`echoline ledger show {}` has every decision", folder);
  }

  std::size_t still_joining() const { return fleet_ ? fleet_->summary().numbers.joining : 0; }

  // A run whose money is spent cannot go on.
  Status fleet_money() const {
    if (!fleet_ || !fleet_->summary().numbers.money_spent) return ok();
    return fail(
        Code::kExhausted, "fleet",
        "${:.2f} of fleet.usd_max are spent, and the fleet is given back: the run stands at step {}; go on with "
        "--resume and a larger fleet.usd_max",
        fleet_->summary().numbers.usd, step_);
  }

  // Hands the policy to the publisher, which encodes it while training goes on. Waits while the policy before is still
  // being encoded, because then there is no memory for a third. False when asked to stop before there was a policy.
  Result<bool> publish(Version version) {
    ECHO_ASSIGN(const bool published, wait_until_published());
    if (!published) return false;
    ECHO_ASSIGN(delta::SharedState policy, policy_->policy(version));
    if (!policy) return false;
    publisher_.publish(version, std::move(policy));
    return true;
  }

  // False when asked to stop before that.
  Result<bool> wait_until_published() {
    for (;;) {
      ECHO_ASSIGN(const bool published, publisher_.wait_until_published(kPoll));
      if (published) return true;
      if (stop_) return false;
      write_status("publishing");
    }
  }

  // A worker whose engine is a server can see by it whether the server has the policy's weights. Called on a thread of
  // the publisher.
  std::string note_for_servers(const delta::StateView& policy) const {
    const bool may_have_servers = config_.worker.engine != "builtin" || config_.fleet.joined_by_hand();
    if (!may_have_servers || !options_.built_in.probe) return {};
    const auto logprobs = options_.built_in.probe(policy, task_->files.config, config_.rollout.temperature,
                                                  static_cast<int>(config_.learner.threads));
    if (!logprobs) {
      log::warn("workers cannot compare their servers with the policy: {}", logprobs.error().message());
      return {};
    }
    schema::PolicyNote note;
    note.mutable_probe_logprobs()->Assign(logprobs->begin(), logprobs->end());
    return note.SerializeAsString();
  }

  // Called on the publisher's thread.
  void note_published(const PublishReport& report) {
    status_->published(report.version, report.digest, report.stats.patch_bytes);
    desk_->published(report.version, report.digest);
    record_->metric("publication", {{"version", report.version.value},
                                    {"snapshot", report.snapshot},
                                    {"state_bytes", report.stats.state_bytes},
                                    {"patch_bytes", report.stats.patch_bytes},
                                    {"density", report.stats.density()},
                                    {"encode_seconds", report.encode_seconds},
                                    {"digest", overlay::to_hex(report.digest)}});
  }

  // What rented workers on this machine keep: their identity and publications.
  std::filesystem::path worker_folders() const { return record_->folder() / "workers"; }

  // Without any worker or machine on its way. A fleet asks offers that failed anew after minutes, and workers come back
  // by themselves for that long.
  Duration alone_max() const { return std::max(config_.fleet.join_timeout, config_.fleet.away_max); }

  // False when asked to stop before a batch was there, was trained on, or its policy was made.
  Result<bool> train_one_step() {
    const TimePoint start = clock_.now();
    std::optional<replay_buffer::Batch> batch;
    TimePoint alone_since = kNever;
    if (fleet_) fleet_->learner_waits(true);
    while (!batch && !stop_) {
      auto waited = desk_->wait_batch(step_, kPoll);
      if (!waited) return ends(std::move(waited).error());
      batch = *std::move(waited);
      write_status("training");
      if (batch) break;
      if (Status money = fleet_money(); !money) {
        ECHO_TRY(checkpoint());
        return std::move(money).error();
      }
      if (attendance_->alive() > 0 || still_joining() > 0) {
        alone_since = kNever;
      } else if (alone_since == kNever) {
        alone_since = clock_.now();
        log::warn("no worker is left; waiting for one");
      } else if (clock_.now() - alone_since > alone_max()) {
        ECHO_TRY(checkpoint());
        return fail(Code::kUnavailable, "train",
                    "no worker for {}{}: the run stands at step {}, go on with --resume; {}", to_text(alone_max()),
                    latest_trouble(), step_, where_to_look());
      }
    }
    if (!batch) return false;
    if (fleet_) fleet_->learner_waits(false);
    const TimePoint waited = clock_.now();
    std::vector<schema::Trajectory> trajectories;
    json ages = json::object();
    std::map<std::uint64_t, std::uint64_t> histogram;
    for (replay_buffer::Group& group : batch->groups) {
      histogram[step_ > group.version.value ? step_ - group.version.value : 0] += group.trajectories.size();
      for (schema::Trajectory& t : group.trajectories) trajectories.push_back(std::move(t));
    }
    for (const auto& [age, count] : histogram) ages[std::to_string(age)] = count;
    ECHO_ASSIGN(const std::optional<TrainedStep> done, policy_->step(trajectories));
    if (!done) return false;
    if (Status consumed = persist("replay buffer", [&] { return desk_->consume(step_, *batch); }); !consumed)
      return ends_unmarked(*batch, std::move(consumed).error());
    for (const Credibility::Verdict& verdict : credibility_.judge(done->scrutiny, step_)) {
      log::warn("worker {}: {}", verdict.worker, verdict.what);
      node_->expel(verdict.worker, verdict.what);
      ECHO_TRY(persist("replay buffer", [&] { return desk_->disown(verdict.worker); }));
    }
    desk_step_ = ++step_;
    const TimePoint trained = clock_.now();
    bool going_on = true;
    if (step_ % config_.staleness.publish_every == 0 || step_ == config_.run.steps) {
      ECHO_ASSIGN(going_on, publish(Version{step_}));
    }
    const TimePoint handed_over = clock_.now();
    if (going_on && step_ % config_.learner.checkpoint_every == 0) ECHO_TRY(checkpoint());
    if (going_on) ECHO_TRY(policy_->step_done());
    const TimePoint end = clock_.now();
    json row = batch_figures(trajectories);
    if (!config_.task.several.empty()) {
      ByTask by_task;
      for (const schema::Trajectory& t : trajectories) by_task.note(t.problem_id(), t.correct(), t.reward());
      row["by_task"] = by_task.figures("responses");
    }
    row.update(done->figures);  // the trainer knows better what it trained on
    status_->trained(row.at("reward_mean"), waited - start, end - start);
    if (fleet_) fleet_->step_measured(end - waited - std::exchange(stood_still_, {}));
    row.update({{"step", step_},
                {"staleness", ages},
                {"wait_seconds", seconds(waited - start)},
                {"train_seconds", seconds(trained - waited)},
                {"publish_seconds", seconds(handed_over - trained)},
                {"step_seconds", seconds(end - start)}});
    record_->metric("step", std::move(row));
    ECHO_TRY(persist("metrics and events", [this] { return record_->written(); }));
    write_status("training");
    return going_on;
  }

  Status checkpoint() {
    ECHO_TRY(persist("checkpoints", [this] { return policy_->checkpoint(); }));
    const std::uint64_t kept = steps_kept(config_);
    if (desk_ && step_ > kept) ECHO_TRY(persist("replay buffer", [&] { return desk_->prune(step_ - kept); }));
    return ok();
  }

  void wait_for_final_acks() {
    const TimePoint deadline = clock_.now() + kFinalAckWait;
    while (!stop_ && clock_.now() < deadline) {
      if (roster_->all_present_have(status_->newest().first)) return;
      write_status("waiting for the last policy to arrive everywhere");
      std::this_thread::sleep_for(kPoll / 4);
    }
  }

  Result<ServiceOutcome> finish(const std::string& ended) {
    write_status("finishing");
    json rejected = json::object();
    ReportInput input;
    if (desk_) {
      if (const auto counts = desk_->counts()) {
        for (const auto& [reason, n] : counts->buffer.rejected)
          if (n > 0) rejected[reason] = n;
        for (const auto& [reason, n] : counts->refused) rejected["refused: " + reason] = n;
        input.groups_set_aside = counts->leases.set_aside;
        input.bound = counts->leases.bound;
        input.regrading = counts->regrading.counts;
        input.scoring = counts->scoring;
      }
    }
    refresh_workers();
    overlay::LearnerStats stats;
    if (node_) stats = node_->stats();
    attendance_->close();  // returning the fleet makes every worker leave
    input.workers = roster_->entries();
    std::tie(input.version, input.digest) = status_->newest();
    if (desk_) desk_->wants_no_more();
    if (fleet_) fleet_->stop();
    std::error_code error;
    std::filesystem::remove_all(worker_folders(), error);  // their machines are returned
    ECHO_TRY(persist("usage", [this] { return run_clock_->save(); }));
    input.config = &config_;
    input.plan = &plan_.plan;
    ECHO_ASSIGN(input.figures, read_run_figures(record_->folder() / "metrics.jsonl"));
    if (fleet_) input.fleet = fleet_->summary();
    input.wall_seconds = run_clock_->wall_seconds();
    input.learner_usd = run_clock_->learner_usd();
    input.bytes_sent = stats.bytes_sent.count;
    input.steps_done = step_;
    input.memory = process_memory();
    input.topology = stats.topology.to_text();
    input.ended = ended;
    input.rejected = rejected;
    ServiceOutcome outcome;
    outcome.report = make_report(input);
    outcome.completed = ended == "completed";
    ECHO_TRY(persist("report", [&] { return record_->report(outcome.report); }));
    record_->event("ended", {{"how", ended}, {"step", step_}});
    shut_down();
    ECHO_TRY(persist("metrics and events", [this] { return record_->written(); }));
    status_->end();
    write_status(ended);
    return outcome;
  }

  // Also the way out of every error: nothing is left running, whatever happened.
  void shut_down() {
    if (desk_) desk_->wants_no_more();
    if (fleet_) fleet_->stop();
    publisher_.stop();
    if (node_) node_->stop();
    if (desk_) desk_->stop();
  }

  // --- Called on the overlay's thread ---

  void record_presence(const PresenceChange& change) {
    const WorkerId id = change.worker;
    switch (change.kind) {
      case PresenceChange::Kind::kJoined:
      case PresenceChange::Kind::kBack: {
        const bool back = change.kind == PresenceChange::Kind::kBack;
        json event{{"worker", id.value}, {"offer", change.offer}};
        const auto& regions = config_.paths.regions.regions;
        if (!regions.empty()) event["region"] = regions[change.region].name;
        record_->event(back ? "back" : "joined", std::move(event));
        if (back) log::info("worker {} ({}) is back", id, change.offer);
        return;
      }
      case PresenceChange::Kind::kAway:  // its groups go to other workers
        log::warn("worker {} is away: {}; its place is kept for {}", id, change.reason,
                  to_text(config_.fleet.away_max));
        record_->event("away", {{"worker", id.value}, {"reason", change.reason}});
        return;
      case PresenceChange::Kind::kLost:
        record_->event("left", {{"worker", id.value}, {"reason", change.reason}});
        return;
      case PresenceChange::Kind::kLeaving:
        log::info("worker {} was told to end, and finishes what it has", id);
        return;
      case PresenceChange::Kind::kRetired:
      case PresenceChange::Kind::kDrained:
        return;  // the fleet records its decisions
    }
  }

  // From every heartbeat of every worker to the fleet, past no other thread: however long a step takes, who works is
  // seen.
  void heartbeat(const overlay::HeardFrom& beat) {
    const WorkerId id = beat.worker;
    const auto vitals = data_plane::parse_vitals(beat.application);
    if (!vitals) return;  // checked when it came
    const WorkerMeter::Progress progress = roster_->heard(id, *vitals, clock_.now());
    // While nothing can be stored there is no work for anybody.
    const bool turned_away = progress.turned_away || (desk_ready_ && desk_->held_up());
    if (fleet_ready_)
      fleet_->beat({id, progress.rollouts, progress.busy_s, turned_away}, beat.bytes_in, beat.bytes_forwarded,
                   beat.bytes_delivered);
  }

  void broadcast_done(const overlay::BroadcastReport& report) {
    if (fleet_ready_ && report.base)
      fleet_->broadcast_measured(report.t_b, report.payload);  // a snapshot is not what it usually carries
    const std::vector<chains::WorkerLink> links = roster_->links_of(report.topology.workers());
    const BitRate up = learner_up(config_);
    const chains::Regions& ways = config_.paths.regions.ways;
    // For as many as T_b counts: in a small fleet that may be fewer than q says.
    const double counted = std::clamp(
        static_cast<double>(report.acknowledged) / static_cast<double>(std::max<std::size_t>(1, report.workers)), 1e-9,
        config_.network.quorum);
    json row = {{"version", report.version.value},
                {"snapshot", !report.base.has_value()},
                {"payload_bytes", report.payload.count},
                {"t_b_seconds", seconds(report.t_b)},
                {"workers", report.workers},
                {"acknowledged", report.acknowledged},
                {"depth", report.depth},
                {"chunk_bytes", report.chunk.count},
                {"learner_bytes", report.learner_bytes_sent.count},
                {"lower_bound_seconds", seconds(chains::lower_bound(report.payload, up, links, counted, ways))}};
    const auto predicted = chains::broadcast_time(report.topology, overlay::on_the_wire(report.payload, report.chunk),
                                                  overlay::on_the_wire(report.chunk, report.chunk), up, links, ways);
    if (predicted) row["predicted_seconds"] = seconds(predicted->fraction(counted));
    const overlay::BroadcastParts& parts = report.parts;
    row["t_b_parts"] = {{"encode", seconds(parts.encode)},   {"seal", seconds(parts.seal)},
                        {"send", seconds(parts.send)},       {"verify", seconds(parts.verify)},
                        {"install", seconds(parts.install)}, {"acknowledge", seconds(parts.acknowledge)}};
    status_->broadcast_done(report.t_b);
    record_->metric("broadcast", std::move(row));
  }

  // --- What people and other processes see ---

  // Takes what people see from the overlay's view of the workers.
  void refresh_workers() {
    if (!node_ || attendance_->is_closed()) return;
    if (const auto drawing = roster_->refresh(node_->stats())) record_->topology(*drawing);
  }

  void write_status(const std::string& phase) {
    if (!status_ || !status_->due(phase)) return;
    refresh_workers();
    status_->write(step_, policy_.get(), fleet_ ? fleet_->summary() : provisioner::FleetSummary{}, *roster_);
  }

  const RunConfig& config_;
  const ServiceOptions& options_;
  const std::atomic<bool>& stop_;
  const SystemClock system_clock_;
  const Clock& clock_ = options_.clock != nullptr ? *options_.clock : system_clock_;

  RunPlan plan_;
  std::unique_ptr<RunRecord> record_;
  std::unique_ptr<RunClock> run_clock_;
  std::optional<RunTask> task_;
  std::unique_ptr<PolicySource> policy_;
  std::uint64_t step_ = 0;                    // steps done; the version that step produced
  std::atomic<std::uint64_t> desk_step_ = 0;  // the same, for the desk's thread
  Duration stood_still_{};                    // of the step under way, while the disk refused

  std::optional<Roster> roster_;  // this and attendance_: from when there is a plan
  std::optional<Attendance> attendance_;
  std::optional<RunStatus> status_;  // from when the run's folder is open
  Credibility credibility_;          // the main thread's

  std::atomic<bool> has_work_ = false;                          // workers get the run's description as they join
  std::atomic<bool> desk_ready_ = false, fleet_ready_ = false;  // desk_ and fleet_ may be used from callbacks

  // Destroyed in reverse: the node's thread ends before what its callbacks use.
  std::unique_ptr<provisioner::FleetDriver> fleet_;
  std::unique_ptr<RolloutDesk> desk_;
  Publisher publisher_{delta::EncodeOptions{.threads = static_cast<unsigned>(config_.learner.threads)},
                       {[this](Version version) {
                          desk_->publishing(version);
                        },  // its first tokens may be here before all of it has left
                        [this](const PublishReport& report) { note_published(report); },
                        [this](const delta::StateView& policy) { return note_for_servers(policy); }}};
  std::unique_ptr<overlay::LearnerNode> node_;
};

}  // namespace

Result<ServiceOutcome> run_learner(const RunConfig& config, const ServiceOptions& options,
                                   const std::atomic<bool>& stop) {
  Service service(config, options, stop);
  return service.run();
}

}  // namespace echoline::learner
