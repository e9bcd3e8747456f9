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

constexpr Duration kPoll = std::chrono::milliseconds(100);  // how often a stop request is noticed
constexpr Duration kSlice = std::chrono::milliseconds(10);  // engine time between two looks at the inbox
constexpr Duration kHandOverMax = std::chrono::seconds(10);
constexpr std::uint32_t kGroupsPerRequestMax = 64;
constexpr std::size_t kAtTaskMax = 4096;  // rollouts that wait for their task, beside those in the engine

// The run that a worker has joined.
struct Run {
  Run(Task described, WorkerId id, std::function<void()> wake)
      : task(std::move(described)), groups(task, id, std::move(wake)) {}
  Task task;
  std::unique_ptr<Engine> engine;  // null while it is being made
  Groups groups;
};

class Agent {
 public:
  Agent(const AgentOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), work_(options.rollouts_per_s_max) {}

  Result<AgentReport> run() {
    ECHO_ASSIGN(node_, overlay::WorkerNode::start(options_.node, inbox_.node_events()));
    const Status result = work();
    if (!result && !ending_.has_ended()) abandon();  // other workers get its groups
    if (stop_ && !ending_.has_ended()) hand_over();
    inbox_.close();
    node_->stop();
    if (!result) return result.error();
    const Policies::Counts& installs = policies_.counts();
    return AgentReport{rollouts_,          refused_,
                       installs.installed, installs.waits,
                       installs.times,     stop_ && ending_.reason().empty() ? "asked to stop" : ending_.reason(),
                       ending_.in_order()};
  }

 private:
  // On a stop request: the learner first gives this worker's children another parent.
  void hand_over() {
    node_->drain();
    const TimePoint deadline = clock_.now() + kHandOverMax;
    while (clock_.now() < deadline)
      if (auto event = inbox_.pop(kPoll); event && std::holds_alternative<event::Disconnected>(*event)) return;
  }

  Status work() {
    while (!ending_.has_ended() && !(stop_ && nothing_to_finish())) {
      ECHO_TRY(wait_for_event(next_wake()));
      check();
      if (ending_.has_ended() || !run_) continue;
      ECHO_TRY(install_policies());
      decode_arriving();
      begin_groups();
      for (Outcome& outcome : run_->engine->poll(kSlice)) run_->groups.take(std::move(outcome));
      advance_groups();
      ECHO_TRY(run_->engine->state());
      hand_in();
      tell_progress();
      if (!stop_) request_work();
    }
    return ok();
  }

  void check() const {
    asking_.check();
    work_.check();
    policies_.check();
    vitals_.check();
    ending_.check();
  }

  // On a stop request: nearly finished groups are handed in, unless the learner no longer wants them. The learner is
  // told at once and gives this worker no further leases.
  bool nothing_to_finish() {
    const TimePoint now = clock_.now();
    if (ending_.begin_finishing(now) && asking_.is_joined()) {
      schema::WorkerMessage message;
      message.mutable_leaving();
      say(message);
    }
    return !run_ || under_way() == 0 || !asking_.is_joined() || ending_.is_late(now);
  }

  TimePoint next_wake() const {
    const TimePoint now = clock_.now();
    if (run_ && (run_->engine->inside() > 0 || work_.has_leases())) return now;
    const TimePoint wake = std::min(now + kPoll, work_.next_due());
    if (asking_.not_before() > now) return std::max(now, std::min(wake, asking_.not_before()));
    return !stop_ && has_room() ? now : std::max(now, wake);
  }

  // Takes one event, waiting until `deadline`, and all further events that are already queued.
  Status wait_for_event(TimePoint deadline) {
    const TimePoint now = clock_.now();
    if (auto event = inbox_.pop(deadline > now ? deadline - now : Duration(0))) ECHO_TRY(handle(std::move(*event)));
    return drain();
  }

  Status drain() {
    while (auto event = inbox_.pop(Duration(0))) ECHO_TRY(handle(std::move(*event)));
    return inbox_.overflow();
  }

  Status handle(Event event) {
    if (auto* joined = std::get_if<event::Joined>(&event)) {
      id_ = joined->id;
      log::info("joined as worker {} ({})", id_, options_.node.name);
      asking_.joined();
    } else if (auto* arrived = std::get_if<event::Arrived>(&event)) {
      policies_.add(std::move(arrived->publication), arrived->at);
    } else if (auto* message = std::get_if<event::Message>(&event)) {
      return handle_message(message->bytes);
    } else if (auto* away = std::get_if<event::Away>(&event)) {
      // The learner takes its leases back, and receives nothing until this worker has joined again.
      log::warn("the learner is out of reach: {}", away->reason);
      asking_.away();
      abandon();
      work_.clear();
    } else if (auto* gone = std::get_if<event::Disconnected>(&event)) {
      ending_.on_disconnected(gone->reason, gone->in_order);
      if (!run_) return fail(Code::kUnavailable, "join", "{}", gone->reason);
    }
    return ok();
  }

  Status handle_message(const std::string& bytes) {
    ECHO_ASSIGN(schema::LearnerMessage message, data_plane::parse_learner_message(bytes));
    switch (message.body_case()) {
      case schema::LearnerMessage::kRunSpec: {
        asking_.told_the_run();
        if (run_) break;  // sent again after an absence
        ECHO_ASSIGN(auto spec, data_plane::unpack_run_spec(message.run_spec()));
        ECHO_ASSIGN(Task task, make_task(std::move(spec)));
        run_ = std::make_unique<Run>(std::move(task), id_, [this] { inbox_.wake(); });
        ECHO_ASSIGN(run_->engine, options_.engine(run_->task, {&stop_, [this] { tell_progress(); }, &inbox_.news()}));
        log::info("task '{}', model {}", run_->task.spec.adapter_name(), run_->task.model.summary());
        break;
      }
      case schema::LearnerMessage::kGrant:
        work_.granted(*message.mutable_grant());
        asking_.granted(clock_.now() + std::chrono::milliseconds(message.grant().retry_after_ms()));
        progress_.set_interval(std::chrono::milliseconds(message.grant().progress_every_ms()));
        break;
      case schema::LearnerMessage::kAck:
        if (message.ack().accepted()) {
          rollouts_ += run_ ? run_->task.spec.group_size() : 0;
        } else {
          refused_ += 1;
          log::warn("lease {} refused: {}", message.ack().lease(), message.ack().reason());
        }
        break;
      case schema::LearnerMessage::kWait:
        log::info("the learner: {}; waiting", message.wait().reason());
        asking_.told_to_wait();
        break;
      case schema::LearnerMessage::kStop:
        ending_.on_run_ended(message.stop().reason());
        break;
      case schema::LearnerMessage::BODY_NOT_SET:
        break;
    }
    return ok();
  }

  void decode_arriving() {
    std::uint64_t bytes = 0;
    for (const overlay::PublicationPart& part : inbox_.take_parts()) {
      run_->engine->arriving(part);
      bytes += part.bytes.size();
    }
    if (bytes > 0) node_->on_parts_consumed(bytes);
  }

  // The run decides what happens to unfinished responses when a new policy arrives.
  Status install_policies() {
    if (policies_.empty()) return ok();
    if (finishing() && (!run_->groups.empty() || work_.has_results())) return ok();
    if (run_->task.spec.on_new_policy() == schema::ON_NEW_POLICY_ABORT) abandon();
    while (!policies_.empty()) {
      const overlay::Publication publication = policies_.begin(clock_.now());
      if (const Status installed = run_->engine->install(publication)) {
        if (publication.activate) node_->installed(publication.version, publication.policy_digest);
        policies_.installed(clock_.now());
      } else {
        policies_.failed();
        if (!stop_) {
          log::warn("{}", installed.error().message());
          node_->install_failed(publication.version, installed.error().message());
        }
      }
      ECHO_TRY(run_->engine->state());
      ECHO_TRY(drain());
    }
    return ok();
  }

  bool finishing() const {
    return !policies_.empty() && run_->task.spec.on_new_policy() == schema::ON_NEW_POLICY_FINISH;
  }

  // Limit on rollouts requested or in progress. A machine held to a speed has its current group, and the work of the
  // time that a request for more takes.
  std::size_t rollouts_at_once() const {
    const std::size_t group = run_->task.spec.group_size();
    std::size_t most = std::max(run_->engine->capacity(), group);
    if (options_.rollouts_per_s_max)
      most = std::min(most,
                      group + std::max(group, static_cast<std::size_t>(*options_.rollouts_per_s_max * kAheadSeconds)));
    return most;
  }
  std::size_t under_way() const { return run_->groups.rollouts() + work_.rollouts(); }
  bool has_room() const {
    return run_ && run_->engine->version() && run_->engine->takes_work() && !finishing() &&
           for_engine() + run_->task.spec.group_size() <= rollouts_at_once();
  }
  // Rollouts that wait for their task do not occupy the engine.
  std::size_t for_engine() const { return under_way() - std::min(run_->groups.at_task(), kAtTaskMax); }

  void request_work() {
    const TimePoint now = clock_.now();
    if (!has_room() || now < asking_.not_before()) return;
    const Engine& engine = *run_->engine;
    const std::size_t groups = (rollouts_at_once() - for_engine()) / run_->task.spec.group_size();
    schema::WorkerMessage message;
    schema::WorkRequest& request = *message.mutable_request();
    request.set_version(engine.version()->value);
    request.set_policy_digest(engine.digest().data(), engine.digest().size());
    request.set_groups_max(static_cast<std::uint32_t>(std::min<std::size_t>(groups, kGroupsPerRequestMax)));
    say(message);
    asking_.asked(now);
  }

  void begin_groups() {
    if (finishing()) return;
    for (schema::Lease& lease : work_.take_leases()) {
      auto begun = run_->groups.begin(std::move(lease), clock_.now());
      if (auto* failed = std::get_if<schema::WorkFailed>(&begun))
        give_back(*failed);
      else
        submit(std::move(std::get<std::vector<Sequence>>(begun)));
    }
  }

  void advance_groups() {
    Groups::Advance advance = run_->groups.advance();
    for (Groups::Ended& ended : advance.ended) settle(std::move(ended));
    submit(std::move(advance.next));
  }

  void submit(std::vector<Sequence> sequences) {
    for (Sequence& sequence : sequences) run_->engine->submit(std::move(sequence));
  }

  // Returns the leases of all groups in progress; the learner gives them to other workers.
  void abandon() {
    if (!run_ || run_->groups.empty()) return;
    schema::WorkerMessage message;
    for (const std::uint64_t lease : run_->groups.leases()) message.mutable_returned()->add_leases(lease);
    for (const std::uint64_t id : run_->groups.drop()) run_->engine->abort(id);
    if (asking_.is_joined()) say(message);
  }

  void settle(Groups::Ended ended) {
    for (const std::uint64_t id : ended.abandoned) run_->engine->abort(id);
    if (const auto* failed = std::get_if<schema::WorkFailed>(&ended.what)) return give_back(*failed);
    work_.finished(ended.begun, std::move(std::get<schema::Submission>(ended.what)), clock_.now());
  }

  void hand_in() {
    auto finished = work_.take_due(clock_.now());
    if (!finished) return;
    vitals_.note(clock_.now(), true);
    for (; finished; finished = work_.take_due(clock_.now())) {
      vitals_.add_generated(finished->rollouts);
      const std::uint64_t lease = finished->submission.lease();
      schema::WorkerMessage message;
      *message.mutable_submission() = std::move(finished->submission);
      if (const Status sent = node_->send(message.SerializeAsString()); !sent) {
        schema::WorkFailed failed;
        failed.set_lease(lease);
        failed.set_failure(schema::WORK_FAILURE_SIZE);
        failed.set_detail(sent.error().message());
        give_back(failed);
      }
    }
    node_->set_heartbeat_payload(vitals_.report(policies_.counts(), clock_.now()).SerializeAsString());
  }

  void tell_progress() {
    const TimePoint now = clock_.now();
    vitals_.note(now, !run_->groups.empty() || work_.has_results());
    if (!progress_.is_due(now) || !asking_.is_joined()) return;
    progress_.on_reported(now);
    schema::WorkerMessage message;
    schema::WorkProgress& progress = *message.mutable_progress();
    for (const std::uint64_t lease : run_->groups.leases()) progress.add_leases(lease);
    for (const std::uint64_t lease : work_.result_leases()) progress.add_leases(lease);
    if (progress.leases().empty()) return;
    progress.set_progress(progress_.count(run_->engine->progress(), work_.has_results() || run_->groups.at_task() > 0));
    say(message);
  }

  void say(const schema::WorkerMessage& message) {
    if (const Status sent = node_->send(message.SerializeAsString()); !sent) log::error("{}", sent.error().message());
  }

  void give_back(const schema::WorkFailed& failed) {
    schema::WorkerMessage message;
    *message.mutable_failed() = failed;
    say(message);
  }

  const AgentOptions& options_;
  const std::atomic<bool>& stop_;
  SystemClock clock_;
  Inbox inbox_;
  std::unique_ptr<overlay::WorkerNode> node_;
  WorkerId id_;
  std::unique_ptr<Run> run_;  // null until the learner has described the run
  Policies policies_;
  Work work_;
  Asking asking_;
  Progress progress_;
  Vitals vitals_;
  Ending ending_;
  std::uint64_t rollouts_ = 0, refused_ = 0;  // for the report
};

}  // namespace

Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop) {
  Agent agent(options, stop);
  return agent.run();
}

}  // namespace echoline::worker
