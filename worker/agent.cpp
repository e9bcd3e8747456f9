#include "worker/agent.hpp"

#include <algorithm>
#include <deque>
#include <variant>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/process_memory.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "overlay/uv/node.hpp"
#include "worker/asking.hpp"
#include "worker/groups.hpp"
#include "worker/pace.hpp"

namespace echoline::worker {
namespace {

constexpr std::size_t kMailboxMax = 4096;
constexpr Duration kPoll = std::chrono::milliseconds(100);  // how often a stop request is noticed
constexpr Duration kSlice = std::chrono::milliseconds(10);  // engine time between two looks at the mailbox
constexpr Duration kAskEvery = std::chrono::milliseconds(50);
constexpr Duration kMemoryEvery = std::chrono::seconds(1);  // interval of memory readings for heartbeats
constexpr Duration kHandOverMax = std::chrono::seconds(10);
constexpr Duration kFinishMax = std::chrono::seconds(8);  // time to finish leased work after a stop request
constexpr std::uint32_t kGroupsPerRequestMax = 64;
constexpr std::size_t kAtTaskMax = 4096;  // rollouts that wait for their task, beside those in the engine

struct Joined {
  WorkerId id;
};
struct Message {
  std::string bytes;
};
struct Away {
  std::string reason;
};
struct Disconnected {
  std::string reason;
  bool in_order = false;
};
struct Arrived {
  overlay::Publication publication;
  TimePoint at;
};
struct TaskAnswered {};
struct PartsArrived {};
using Event = std::variant<Joined, Arrived, Message, Away, Disconnected, TaskAnswered, PartsArrived>;

// Bytes of arriving publications, from the loop thread to the agent's. The node bounds them (overlay::kPartsUnreadMax).
class Parts {
 public:
  // Returns whether it was empty.
  bool push(const overlay::PublicationPart& part) {
    const std::lock_guard lock(mutex_);
    parts_.push_back(part);
    return parts_.size() == 1;
  }
  std::vector<overlay::PublicationPart> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(parts_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<overlay::PublicationPart> parts_;
};

class Agent {
 public:
  Agent(const AgentOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), mailbox_(kMailboxMax) {
    if (options.rollouts_per_s_max) pace_.emplace(*options.rollouts_per_s_max);
  }

  Result<AgentReport> run() {
    overlay::WorkerEvents events;
    events.joined = [this](WorkerId id, const std::string&) { post(Joined{id}); };
    events.publication = [this](const overlay::Publication& p) {
      news_ = true;  // before the event: the agent may take that at once
      post(Arrived{p, clock_.now()});
    };
    events.part = [this](const overlay::PublicationPart& part) {
      if (parts_.push(part)) post(PartsArrived{});
    };
    events.message = [this](std::string bytes) { post(Message{std::move(bytes)}); };
    events.away = [this](const std::string& reason) { post(Away{reason}); };
    events.disconnected = [this](const std::string& reason, bool in_order) { post(Disconnected{reason, in_order}); };
    ECHO_ASSIGN(node_, overlay::WorkerNode::start(options_.node, std::move(events)));
    const Status result = work();
    if (!result && !ended_) abandon();  // other workers get its groups
    if (stop_ && !ended_) hand_over();
    mailbox_.close();
    node_->stop();
    if (!result) return result.error();
    return report_;
  }

 private:
  // Called on the loop thread. A full mailbox means that generation has hung for minutes.
  void post(Event event) {
    if (!mailbox_.try_push(std::move(event))) overflowed_ = true;
  }

  // On a stop request: the learner first gives this worker's children another parent.
  void hand_over() {
    node_->drain();
    const TimePoint deadline = clock_.now() + kHandOverMax;
    while (!ended_ && clock_.now() < deadline)
      if (auto event = mailbox_.pop(kPoll); event && std::holds_alternative<Disconnected>(*event)) return;
  }

  Status work() {
    while (!ended_ && !(stop_ && nothing_to_finish())) {
      ECHO_TRY(wait_for_event(next_wake()));
      if (ended_ || !engine_) continue;
      ECHO_TRY(install_pending());
      decode_arriving();
      begin_groups();
      for (Outcome& outcome : engine_->poll(kSlice)) groups_->take(std::move(outcome));
      advance_groups();
      ECHO_TRY(engine_->state());
      hand_in();
      tell_progress();
      if (!stop_) request_work();
    }
    if (stop_ && report_.reason.empty()) report_.reason = "asked to stop";
    return ok();
  }

  // On a stop request: nearly finished groups are handed in, unless the learner no longer wants them. The learner is
  // told at once and gives this worker no further leases.
  bool nothing_to_finish() {
    const TimePoint now = clock_.now();
    if (finish_by_ == kNever) {
      finish_by_ = now + kFinishMax;
      schema::WorkerMessage message;
      message.mutable_leaving();
      if (asking_.is_joined()) say(message);
    }
    return !engine_ || under_way() == 0 || !asking_.is_joined() || now >= finish_by_;
  }

  TimePoint next_wake() const {
    const TimePoint now = clock_.now();
    if (engine_ && (engine_->inside() > 0 || !leases_.empty())) return now;
    TimePoint wake = now + kPoll;
    if (!held_.empty()) wake = std::min(wake, held_.front().due);
    if (asking_.not_before() > now)
      wake = std::min(wake, asking_.not_before());
    else if (!stop_ && has_room())
      wake = std::min(wake, ask_at_);
    return std::max(now, wake);
  }

  // Takes one event, waiting until `deadline`, and all further events that are already queued.
  Status wait_for_event(TimePoint deadline) {
    const TimePoint now = clock_.now();
    auto event = mailbox_.pop(deadline > now ? deadline - now : Duration(0));
    if (event) ECHO_TRY(handle(std::move(*event)));
    return drain();
  }

  Status drain() {
    while (auto event = mailbox_.pop(Duration(0))) ECHO_TRY(handle(std::move(*event)));
    if (overflowed_) return fail(Code::kExhausted, "worker", "more than {} events wait for generation", kMailboxMax);
    return ok();
  }

  Status handle(Event event) {
    if (auto* joined = std::get_if<Joined>(&event)) {
      id_ = joined->id;
      log::info("joined as worker {} ({})", id_, options_.node.name);
      asking_.joined();
    } else if (auto* arrived = std::get_if<Arrived>(&event)) {
      news_ = false;
      pending_.push_back(std::move(*arrived));
    } else if (auto* message = std::get_if<Message>(&event)) {
      return handle_message(message->bytes);
    } else if (auto* away = std::get_if<Away>(&event)) {
      // The learner takes its leases back, and receives nothing until this worker has joined again.
      log::warn("the learner is out of reach: {}", away->reason);
      asking_.away();
      abandon();
      held_.clear();
      leases_.clear();
    } else if (auto* gone = std::get_if<Disconnected>(&event)) {
      ended_ = true;
      report_.in_order = gone->in_order;
      if (report_.reason.empty()) report_.reason = gone->reason;
      if (!task_) return fail(Code::kUnavailable, "join", "{}", gone->reason);
    }
    return ok();
  }

  Status handle_message(const std::string& bytes) {
    ECHO_ASSIGN(schema::LearnerMessage message, data_plane::parse_learner_message(bytes));
    switch (message.body_case()) {
      case schema::LearnerMessage::kRunSpec: {
        asking_.told_the_run();
        if (task_) break;  // sent again after an absence
        ECHO_ASSIGN(auto spec, data_plane::unpack_run_spec(message.run_spec()));
        ECHO_ASSIGN(task_, make_task(std::move(spec)));
        groups_.emplace(*task_, id_, [this] { mailbox_.try_push(TaskAnswered{}); });
        ECHO_ASSIGN(engine_, options_.engine(*task_, {&stop_, [this] { tell_progress(); }, &news_}));
        log::info("task '{}', model of {} parameters", task_->spec.adapter_name(), task_->model.parameters());
        break;
      }
      case schema::LearnerMessage::kGrant:
        for (schema::Lease& lease : *message.mutable_grant()->mutable_leases()) leases_.push_back(std::move(lease));
        asking_.granted(clock_.now() + std::chrono::milliseconds(message.grant().retry_after_ms()));
        if (message.grant().progress_every_ms() > 0)
          progress_every_ = std::chrono::milliseconds(message.grant().progress_every_ms());
        break;
      case schema::LearnerMessage::kAck:
        if (message.ack().accepted()) {
          report_.rollouts += task_ ? task_->spec.group_size() : 0;
        } else {
          report_.refused += 1;
          log::warn("lease {} refused: {}", message.ack().lease(), message.ack().reason());
        }
        break;
      case schema::LearnerMessage::kWait:
        log::info("the learner: {}; waiting", message.wait().reason());
        asking_.told_to_wait();
        break;
      case schema::LearnerMessage::kStop:
        ended_ = true;
        report_.reason = message.stop().reason();
        break;
      case schema::LearnerMessage::BODY_NOT_SET:
        break;
    }
    return ok();
  }

  void decode_arriving() {
    const std::vector<overlay::PublicationPart> parts = parts_.take();
    std::uint64_t bytes = 0;
    for (const overlay::PublicationPart& part : parts) {
      engine_->arriving(part);
      bytes += part.bytes.size();
    }
    if (bytes > 0) node_->on_parts_consumed(bytes);
  }

  // The run decides what happens to unfinished responses when a new policy arrives.
  Status install_pending() {
    if (pending_.empty()) return ok();
    switch (task_->spec.on_new_policy()) {
      case schema::ON_NEW_POLICY_FINISH:
        if (!groups_->empty() || !held_.empty()) return ok();
        break;
      case schema::ON_NEW_POLICY_ABORT:
        abandon();
        break;
      default:
        break;
    }
    while (!pending_.empty()) {
      auto [publication, arrived] = std::move(pending_.front());
      pending_.pop_front();
      const TimePoint begun = clock_.now();
      if (!pending_.empty()) publication.activate = false;  // a newer one waits behind it
      const Status installed = engine_->install(publication);
      if (installed) {
        if (publication.activate) node_->installed(publication.version, publication.policy_digest);
        ++report_.versions;
        report_.install_waits += begun - arrived;
        report_.install_times += clock_.now() - begun;
      } else if (!stop_) {
        log::warn("{}", installed.error().message());
        node_->install_failed(publication.version, installed.error().message());
      }
      ECHO_TRY(engine_->state());
      ECHO_TRY(drain());
    }
    return ok();
  }

  bool finishing() const { return !pending_.empty() && task_->spec.on_new_policy() == schema::ON_NEW_POLICY_FINISH; }

  // Limit on rollouts requested or in progress. A machine held to a speed has its current group, and the work of the
  // time that a request for more takes.
  std::size_t rollouts_at_once() const {
    const std::size_t group = task_->spec.group_size();
    std::size_t most = std::max(engine_->capacity(), group);
    if (options_.rollouts_per_s_max)
      most = std::min(most,
                      group + std::max(group, static_cast<std::size_t>(*options_.rollouts_per_s_max * kAheadSeconds)));
    return most;
  }
  std::size_t under_way() const {
    std::size_t rollouts = groups_->rollouts();
    for (const schema::Lease& lease : leases_) rollouts += lease.rollouts();
    for (const Held& held : held_) rollouts += held.rollouts;
    return rollouts;
  }
  bool has_room() const {
    return engine_ && engine_->version() && engine_->takes_work() && !finishing() &&
           for_engine() + task_->spec.group_size() <= rollouts_at_once();
  }
  // Rollouts that wait for their task do not occupy the engine.
  std::size_t for_engine() const { return under_way() - std::min(groups_->at_task(), kAtTaskMax); }

  void request_work() {
    const TimePoint now = clock_.now();
    if (!has_room() || now < asking_.not_before() || now < ask_at_) return;
    const std::size_t groups = (rollouts_at_once() - for_engine()) / task_->spec.group_size();
    schema::WorkerMessage message;
    schema::WorkRequest& request = *message.mutable_request();
    request.set_version(engine_->version()->value);
    request.set_policy_digest(engine_->digest().data(), engine_->digest().size());
    request.set_groups_max(static_cast<std::uint32_t>(std::min<std::size_t>(groups, kGroupsPerRequestMax)));
    say(message);
    asking_.asked();
    ask_at_ = now + kAskEvery;
  }

  void begin_groups() {
    if (finishing()) return;
    for (schema::Lease& lease : leases_) {
      auto begun = groups_->begin(std::move(lease), clock_.now());
      if (auto* failed = std::get_if<schema::WorkFailed>(&begun)) {
        give_back(*failed);
        continue;
      }
      for (Sequence& sequence : std::get<std::vector<Sequence>>(begun)) engine_->submit(std::move(sequence));
    }
    leases_.clear();
  }

  void advance_groups() {
    Groups::Advance advance = groups_->advance();
    for (Groups::Ended& ended : advance.ended) settle(std::move(ended));
    for (Sequence& sequence : advance.next) engine_->submit(std::move(sequence));
  }

  // Returns the leases of all groups in progress; the learner gives them to other workers.
  void abandon() {
    if (!groups_ || groups_->empty()) return;
    schema::WorkerMessage message;
    for (const std::uint64_t lease : groups_->leases()) message.mutable_returned()->add_leases(lease);
    for (const std::uint64_t id : groups_->drop()) engine_->abort(id);
    if (asking_.is_joined()) say(message);
  }

  void settle(Groups::Ended ended) {
    for (const std::uint64_t id : ended.abandoned) engine_->abort(id);
    if (const auto* failed = std::get_if<schema::WorkFailed>(&ended.what)) return give_back(*failed);
    auto& submission = std::get<schema::Submission>(ended.what);
    const auto rollouts = static_cast<std::uint64_t>(submission.trajectories_size());
    const TimePoint now = clock_.now();
    held_.push_back({pace_ ? pace_->due(ended.begun, rollouts, now) : now, rollouts, std::move(submission)});
  }

  void hand_in() {
    if (held_.empty() || held_.front().due > clock_.now()) return;
    note_time();
    do {
      Held held = std::move(held_.front());
      held_.pop_front();
      generated_ += held.rollouts;
      const std::uint64_t lease = held.submission.lease();
      schema::WorkerMessage message;
      *message.mutable_submission() = std::move(held.submission);
      if (const Status sent = node_->send(message.SerializeAsString()); !sent) {
        schema::WorkFailed failed;
        failed.set_lease(lease);
        failed.set_failure(schema::WORK_FAILURE_SIZE);
        failed.set_detail(sent.error().message());
        give_back(failed);
      }
    } while (!held_.empty() && held_.front().due <= clock_.now());
    schema::Vitals vitals;
    vitals.set_rollouts(generated_);
    vitals.set_busy_s(busy_s_);
    vitals.set_policies(report_.versions);
    vitals.set_install_s(seconds(report_.install_waits + report_.install_times));
    if (const TimePoint now = clock_.now(); now >= memory_due_) {
      memory_ = process_memory();
      memory_due_ = now + kMemoryEvery;
    }
    vitals.set_resident_bytes(memory_.resident.count);
    vitals.set_heap_bytes(memory_.heap.value_or(Bytes{}).count);
    node_->set_heartbeat_payload(vitals.SerializeAsString());
  }

  // Time with work counts as time spent on rollouts.
  void note_time() {
    const TimePoint now = clock_.now();
    if (was_working_) busy_s_ += seconds(now - noted_at_);
    noted_at_ = now;
    was_working_ = !groups_->empty() || !held_.empty();
  }

  void tell_progress() {
    const TimePoint now = clock_.now();
    note_time();
    if (now < progress_due_ || !asking_.is_joined()) return;
    progress_due_ = now + progress_every_;
    schema::WorkerMessage message;
    schema::WorkProgress& progress = *message.mutable_progress();
    for (const std::uint64_t lease : groups_->leases()) progress.add_leases(lease);
    for (const Held& held : held_) progress.add_leases(held.submission.lease());
    if (progress.leases().empty()) return;
    if (!held_.empty() || groups_->at_task() > 0) ++waits_;
    progress.set_progress(engine_->progress() + waits_);
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
  BoundedQueue<Event> mailbox_;
  std::atomic<bool> overflowed_ = false;
  std::atomic<bool> news_ = false;  // the mailbox holds a publication
  Parts parts_;
  std::unique_ptr<overlay::WorkerNode> node_;
  WorkerId id_;
  std::optional<Task> task_;
  std::unique_ptr<Engine> engine_;
  std::optional<Groups> groups_;
  std::deque<Arrived> pending_;       // complete and in order
  std::deque<schema::Lease> leases_;  // granted, not begun
  struct Held {
    TimePoint due;
    std::uint64_t rollouts = 0;
    schema::Submission submission;
  };
  std::deque<Held> held_;     // finished, by due time
  std::optional<Pace> pace_;  // emulated speed, if any
  Asking asking_;
  TimePoint ask_at_{};            // earliest time of the next request
  TimePoint finish_by_ = kNever;  // deadline after a stop request
  Duration progress_every_ = std::chrono::seconds(3);
  TimePoint progress_due_{};
  std::uint64_t waits_ = 0;  // signs of progress sent while submissions or tasks waited
  TimePoint noted_at_{};
  bool was_working_ = false;  // at noted_at_
  double busy_s_ = 0;
  std::uint64_t generated_ = 0;
  ProcessMemory memory_;
  TimePoint memory_due_{};
  bool ended_ = false;
  AgentReport report_;
};

}  // namespace

Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop) {
  Agent agent(options, stop);
  return agent.run();
}

}  // namespace echoline::worker
