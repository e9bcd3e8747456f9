// The loop of a worker: takes events of its overlay node, installs policies, begins and advances groups of rollouts,
// and submits results. The parts that it coordinates are in the other files of this folder.
#include "worker/agent.hpp"

#include "base/clock.hpp"
#include "base/log.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "worker/asking.hpp"
#include "worker/ending.hpp"
#include "worker/groups.hpp"
#include "worker/inbox.hpp"
#include "worker/policies.hpp"
#include "worker/vitals.hpp"
#include "worker/work.hpp"

namespace echoline::worker {
namespace {

constexpr Duration kStopCheckInterval = std::chrono::milliseconds(100);
constexpr Duration kEngineSliceMax = std::chrono::milliseconds(10);  // engine time between two reads of the inbox
constexpr Duration kLeaveMax = std::chrono::seconds(10);  // most time to leave the overlay after a stop request
constexpr std::uint32_t kGroupsPerRequestMax = 64;        // the answer contains the problem of each group
// Rollouts that wait for the environment's answer do not count as work for the engine. The limit bounds the rollouts
// that a worker can hold.
constexpr std::size_t kRolloutsInEnvironmentMax = 4096;

// The run that a worker has joined.
struct Run {
  Run(Task described_task, WorkerId id, std::function<void()> wake)
      : task(std::move(described_task)), groups(task, id, std::move(wake)) {}  // `groups` refers to the member `task`
  Task task;
  std::unique_ptr<Engine> engine;  // null until options.make_engine has made it
  Groups groups;
};

class Agent {
 public:
  Agent(const AgentOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), work_(options.rollouts_per_s_max) {}

  Result<AgentReport> run() {
    ECHO_ASSIGN(node_, overlay::WorkerNode::start(options_.node, inbox_.node_events()));
    const Status result = run_loop();
    // After an error, returns the leases, so that other workers can get them at once.
    if (!result && !ending_.has_ended()) return_leases();
    if (stop_ && !ending_.has_ended()) leave_overlay();
    inbox_.close();
    node_->stop();
    if (!result) return result.error();
    const InstallationQueue::Counts& installs = installations_.counts();
    return AgentReport{.rollouts = rollouts_acknowledged_,
                       .refused = submissions_refused_,
                       .versions = installs.installed,
                       .install_waits = installs.total_wait,
                       .install_times = installs.total_install_time,
                       .reason = ending_.reason().empty() && stop_ ? "asked to stop" : ending_.reason(),
                       .ended_cleanly = ending_.ended_cleanly()};
  }

 private:
  // After a stop request. Waits until the learner has given other parents to this worker's children (the workers to
  // which it forwards policies), for at most kLeaveMax.
  void leave_overlay() {
    node_->drain();
    const TimePoint deadline = clock_.now() + kLeaveMax;
    while (clock_.now() < deadline)
      if (auto event = inbox_.pop(kStopCheckInterval); event && std::holds_alternative<event::Disconnected>(*event))
        return;
  }

  Status run_loop() {
    while (!ending_.has_ended() && !(stop_ && may_leave_after_stop())) {
      ECHO_TRY(wait_for_event(next_wake()));
      report_contact();
      check_invariants();
      if (ending_.has_ended() || !run_) continue;  // the loop ends, or there is no engine yet
      ECHO_TRY(install_policies());
      decode_arriving_parts();
      begin_groups();
      for (Outcome& outcome : run_->engine->poll(kEngineSliceMax)) run_->groups.on_outcome(std::move(outcome));
      advance_groups();
      ECHO_TRY(run_->engine->status());
      submit_due_results();
      report_progress();
      if (!stop_) request_work();
    }
    return ok();
  }

  void report_contact() const {
    if (options_.on_contact && learner_link_.is_joined()) options_.on_contact();
  }

  void check_invariants() const {
    learner_link_.check();
    work_.check();
    installations_.check();
    vitals_.check();
    ending_.check();
  }

  // For use after a stop request. The first call tells the learner that the worker leaves; the learner then grants no
  // further leases. Returns false while leased groups can still be finished in time.
  bool may_leave_after_stop() {
    const TimePoint now = clock_.now();
    if (ending_.begin_finishing(now) && learner_link_.is_joined()) {
      schema::WorkerMessage message;
      message.mutable_leaving();
      send_to_learner(message);
    }
    const bool has_work = run_ && rollouts_under_way() > 0;
    const bool can_submit = learner_link_.is_joined() && !ending_.finish_time_is_over(now);
    return !has_work || !can_submit;
  }

  // The time at which run_loop() has something to do without an event. Now, if the engine has work, leases wait, or a
  // request for work can be sent. Otherwise the first of: the check for a stop request, a due result, the earliest
  // request.
  TimePoint next_wake() const {
    const TimePoint now = clock_.now();
    if (run_ && (run_->engine->sequences_in_progress() > 0 || work_.has_leases())) return now;
    TimePoint wake = std::min(now + kStopCheckInterval, work_.next_due());
    if (learner_link_.earliest_request() > now)
      wake = std::min(wake, learner_link_.earliest_request());
    else if (!stop_ && can_take_group())
      wake = now;
    return std::max(now, wake);  // a result may have been due earlier
  }

  // Handles one event, for which it waits until `deadline`, and all further events that are already queued.
  Status wait_for_event(TimePoint deadline) {
    const TimePoint now = clock_.now();
    const Duration wait = deadline > now ? deadline - now : Duration(0);
    if (auto event = inbox_.pop(wait)) ECHO_TRY(handle(std::move(*event)));
    return handle_queued_events();
  }

  Status handle_queued_events() {
    while (auto event = inbox_.pop(Duration(0))) ECHO_TRY(handle(std::move(*event)));
    return inbox_.check_overflow();
  }

  Status handle(Event event) {
    if (auto* joined = std::get_if<event::Joined>(&event)) {
      id_ = joined->id;
      log::info("joined as worker {} ({})", id_, options_.node.name);
      learner_link_.on_joined();
    } else if (auto* arrived = std::get_if<event::PolicyArrived>(&event)) {
      installations_.add(std::move(arrived->publication), arrived->arrived_at);
    } else if (auto* message = std::get_if<event::Message>(&event)) {
      return handle_message(message->bytes);
    } else if (auto* away = std::get_if<event::Away>(&event)) {
      // The learner leases this worker's groups to other workers, and receives nothing until this worker has joined
      // again. So return_leases() only drops the groups.
      log::warn("the learner is out of reach: {}", away->reason);
      learner_link_.on_away();
      return_leases();
      work_.clear();
    } else if (auto* disconnected = std::get_if<event::Disconnected>(&event)) {
      ending_.on_disconnected(disconnected->reason, disconnected->cleanly);
      if (!run_) return fail(Code::kUnavailable, "join", "{}", disconnected->reason);  // lost before the run began
    }  // the other events only wake this thread
    return ok();
  }

  Status handle_message(const std::string& bytes) {
    ECHO_ASSIGN(schema::LearnerMessage message, data_plane::parse_learner_message(bytes));
    switch (message.body_case()) {
      case schema::LearnerMessage::kRunSpec: {
        learner_link_.on_run_described();
        if (run_) break;  // known already: the learner sends it again after an absence
        ECHO_ASSIGN(auto spec, data_plane::unpack_run_spec(message.run_spec()));
        ECHO_ASSIGN(Task task, make_task(std::move(spec)));
        run_ = std::make_unique<Run>(std::move(task), id_, [this] { inbox_.wake(); });
        const auto report_during_wait = [this] {  // keeps the leases during a long installation
          report_contact();
          report_progress();
        };
        const EngineHost host{.stop = &stop_, .on_wait = report_during_wait, .policy_waits = &inbox_.policy_waits()};
        ECHO_ASSIGN(run_->engine, options_.make_engine(run_->task, host));
        log::info("task '{}', model {}", run_->task.spec.adapter_name(), run_->task.model.summary());
        break;
      }
      case schema::LearnerMessage::kGrant:
        work_.add_leases(*message.mutable_grant());
        learner_link_.on_granted(clock_.now() + std::chrono::milliseconds(message.grant().retry_after_ms()));
        progress_.set_interval(std::chrono::milliseconds(message.grant().progress_every_ms()));
        break;
      case schema::LearnerMessage::kAck:
        if (message.ack().accepted()) {
          rollouts_acknowledged_ += run_ ? run_->task.spec.group_size() : 0;  // of one submission, which is one group
        } else {
          submissions_refused_ += 1;
          log::warn("lease {} refused: {}", message.ack().lease(), message.ack().reason());
        }
        break;
      case schema::LearnerMessage::kWait:
        log::info("the learner: {}; waiting", message.wait().reason());
        learner_link_.on_told_to_wait();
        break;
      case schema::LearnerMessage::kStop:
        ending_.on_run_ended(message.stop().reason());
        break;
      case schema::LearnerMessage::BODY_NOT_SET:  // a kind of message that a newer learner may send
        break;
    }
    return ok();
  }

  void decode_arriving_parts() {
    std::uint64_t bytes = 0;
    for (const overlay::PublicationPart& part : inbox_.take_parts()) {
      run_->engine->decode_part(part);
      bytes += part.bytes.size();
    }
    if (bytes > 0) node_->on_parts_consumed(bytes);  // the node bounds the bytes that wait here
  }

  // Installs all waiting policies. `on_new_policy` of the run decides about unfinished groups: they are finished first,
  // returned, or continued under the new policy.
  Status install_policies() {
    if (installations_.empty()) return ok();
    const bool has_unfinished = !run_->groups.empty() || work_.has_results();
    if (must_finish_groups_first() && has_unfinished) return ok();
    if (run_->task.spec.on_new_policy() == schema::ON_NEW_POLICY_ABORT) return_leases();
    while (!installations_.empty()) {
      const overlay::Publication publication = installations_.begin_installation(clock_.now());
      if (const Status installed = run_->engine->install(publication)) {
        // Without `activate`, a newer policy is installed next, and only that one is reported.
        if (publication.activate) node_->installed(publication.version, publication.policy_digest);
        installations_.on_installed(clock_.now());
      } else {
        installations_.on_failed();
        if (!stop_) {  // a stop request makes installations fail, too
          log::warn("{}", installed.error().message());
          node_->install_failed(publication.version, installed.error().message());
        }
      }
      ECHO_TRY(run_->engine->status());
      ECHO_TRY(handle_queued_events());
    }
    return ok();
  }

  // Whether a new policy must wait until the groups in progress are finished and submitted.
  bool must_finish_groups_first() const {
    return !installations_.empty() && run_->task.spec.on_new_policy() == schema::ON_NEW_POLICY_FINISH;
  }

  // Limit on rollouts leased or in progress. With a speed limit, these are the current group and the work for the next
  // kAheadSeconds. That is at least one more group, because the worker would idle until the answer to a request comes.
  std::size_t rollouts_max() const {
    const std::size_t group_size = run_->task.spec.group_size();
    const std::size_t engine_max = std::max(run_->engine->capacity(), group_size);  // room for one group in any case
    if (!options_.rollouts_per_s_max) return engine_max;
    const auto rollouts_ahead = static_cast<std::size_t>(*options_.rollouts_per_s_max * kAheadSeconds);
    return std::min(engine_max, group_size + std::max(group_size, rollouts_ahead));
  }
  // Rollouts of leases, of groups in progress and of results that are not submitted.
  std::size_t rollouts_under_way() const { return run_->groups.rollouts() + work_.rollouts(); }
  bool can_take_group() const {
    if (!run_ || must_finish_groups_first()) return false;
    const bool can_generate = run_->engine->version() && run_->engine->can_take_work();
    return can_generate && rollouts_for_engine() + run_->task.spec.group_size() <= rollouts_max();
  }
  // The rollouts under way, without those of them that wait for the environment: these do not occupy the engine.
  std::size_t rollouts_for_engine() const {
    return rollouts_under_way() - std::min(run_->groups.rollouts_in_environment(), kRolloutsInEnvironmentMax);
  }

  void request_work() {
    const TimePoint now = clock_.now();
    if (!can_take_group() || now < learner_link_.earliest_request()) return;
    const Engine& engine = *run_->engine;
    // At least one, because can_take_group() returned true.
    const std::size_t groups = (rollouts_max() - rollouts_for_engine()) / run_->task.spec.group_size();
    schema::WorkerMessage message;
    schema::WorkRequest& request = *message.mutable_request();
    request.set_version(engine.version()->value);
    request.set_policy_digest(engine.digest().data(), engine.digest().size());
    request.set_groups_max(static_cast<std::uint32_t>(std::min<std::size_t>(groups, kGroupsPerRequestMax)));
    send_to_learner(message);
    learner_link_.on_requested(now);
  }

  void begin_groups() {
    if (must_finish_groups_first()) return;  // the leases wait until the new policy is installed
    for (schema::Lease& lease : work_.take_leases()) {
      auto sequences_or_failure = run_->groups.begin(std::move(lease), clock_.now());
      if (auto* failed = std::get_if<schema::WorkFailed>(&sequences_or_failure))
        report_failure(*failed);
      else
        give_to_engine(std::move(std::get<std::vector<Sequence>>(sequences_or_failure)));
    }
  }

  void advance_groups() {
    Groups::Advance advance = run_->groups.advance();
    for (Groups::Ended& ended : advance.ended) on_group_ended(std::move(ended));
    give_to_engine(std::move(advance.next));
  }

  void give_to_engine(std::vector<Sequence> sequences) {
    for (Sequence& sequence : sequences) run_->engine->submit(std::move(sequence));
  }

  // Drops all groups in progress and returns their leases, which the learner then gives to other workers.
  void return_leases() {
    if (!run_ || run_->groups.empty()) return;  // no group is in progress
    schema::WorkerMessage message;
    for (const std::uint64_t lease_id : run_->groups.lease_ids()) message.mutable_returned()->add_leases(lease_id);
    for (const std::uint64_t id : run_->groups.drop_all()) run_->engine->abort(id);
    if (learner_link_.is_joined()) send_to_learner(message);
  }

  void on_group_ended(Groups::Ended ended) {
    for (const std::uint64_t id : ended.abandoned) run_->engine->abort(id);
    if (const auto* failed = std::get_if<schema::WorkFailed>(&ended.result)) return report_failure(*failed);
    work_.add_result(ended.begun, std::move(std::get<schema::Submission>(ended.result)), clock_.now());
  }

  void submit_due_results() {
    auto due_result = work_.take_due_result(clock_.now());
    if (!due_result) return;                               // nothing has changed in the report below
    vitals_.record_work(clock_.now(), /*has_work=*/true);  // the report below then includes the time until now
    for (; due_result; due_result = work_.take_due_result(clock_.now())) {
      vitals_.add_generated(due_result->rollouts);
      const std::uint64_t lease = due_result->submission.lease();
      schema::WorkerMessage message;
      *message.mutable_submission() = std::move(due_result->submission);
      // The node runs, so it can refuse a message only for its size.
      if (const Status sent = node_->send(message.SerializeAsString()); !sent) {
        schema::WorkFailed failed;
        failed.set_lease(lease);
        failed.set_failure(schema::WORK_FAILURE_SIZE);
        failed.set_detail(sent.error().message());
        report_failure(failed);
      }
    }
    node_->set_heartbeat_payload(vitals_.report(installations_.counts(), clock_.now()).SerializeAsString());
  }

  void report_progress() {
    const TimePoint now = clock_.now();
    vitals_.record_work(now, !run_->groups.empty() || work_.has_results());
    if (!progress_.is_due(now) || !learner_link_.is_joined()) return;
    progress_.on_reported(now);
    schema::WorkerMessage message;
    schema::WorkProgress& progress = *message.mutable_progress();
    for (const std::uint64_t lease_id : run_->groups.lease_ids()) progress.add_leases(lease_id);
    for (const std::uint64_t lease_id : work_.lease_ids_of_results()) progress.add_leases(lease_id);
    if (progress.leases().empty()) return;  // the learner extends leases by this message, and there are none
    progress.set_progress(progress_.next_count(run_->engine->progress(),
                                               work_.has_results() || run_->groups.rollouts_in_environment() > 0));
    send_to_learner(message);
  }

  void send_to_learner(const schema::WorkerMessage& message) {
    if (const Status status = node_->send(message.SerializeAsString()); !status)
      log::error("{}", status.error().message());
  }

  void report_failure(const schema::WorkFailed& failed) {
    schema::WorkerMessage message;
    *message.mutable_failed() = failed;
    send_to_learner(message);
  }

  const AgentOptions& options_;
  const std::atomic<bool>& stop_;
  SystemClock clock_;
  Inbox inbox_;
  std::unique_ptr<overlay::WorkerNode> node_;
  WorkerId id_;
  std::unique_ptr<Run> run_;  // null until the learner has described the run
  InstallationQueue installations_;
  WorkQueue work_;
  Asking learner_link_;  // whether this worker has joined, and when it may request work
  Progress progress_;
  Vitals vitals_;
  Ending ending_;
  std::uint64_t rollouts_acknowledged_ = 0, submissions_refused_ = 0;  // for AgentReport
};

}  // namespace

Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop) {
  Agent agent(options, stop);
  return agent.run();
}

}  // namespace echoline::worker
