#include "worker/agent.hpp"

#include <algorithm>
#include <deque>
#include <variant>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "model/runtime.hpp"
#include "overlay/uv/node.hpp"
#include "worker/asking.hpp"
#include "worker/installer.hpp"
#include "worker/production.hpp"
#include "worker/speed.hpp"

namespace echoline::worker {
namespace {

constexpr std::size_t kMailboxMax = 4096;
constexpr Duration kPoll = std::chrono::milliseconds(100);  // how often a stop request is noticed
constexpr double kBatchSeconds = 0.25;  // wanted length of a batch: policies are installed between batches
constexpr Duration kHandOverMax = std::chrono::seconds(10);
constexpr Duration kFinishMax = std::chrono::seconds(8);  // of what it has leases for, when it is asked to stop
constexpr std::uint32_t kGroupsPerBatchMax = 64;
constexpr double kRateMemory = 0.7;  // weight of the past in the measured rollouts/s

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
using Event = std::variant<Joined, overlay::Publication, Message, Away, Disconnected>;

class Agent {
 public:
  Agent(const AgentOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), mailbox_(kMailboxMax) {
    if (options.rollouts_per_s_max) speed_.emplace(*options.rollouts_per_s_max);
  }

  Result<AgentReport> run() {
    model::use_threads(options_.threads);
    model::keep_freed_memory();
    overlay::WorkerOptions node_options;
    node_options.learner = options_.learner;
    node_options.bind_host = options_.bind_host;
    node_options.name = options_.name;
    node_options.token = options_.token;
    node_options.port = options_.port;
    node_options.advertise = options_.advertise;
    node_options.folder = options_.folder;
    node_options.limits = options_.limits;
    node_options.join_timeout = options_.join_timeout;
    node_options.away_max = options_.away_max;
    node_options.memory_max = options_.memory_max;
    node_options.disk_max = options_.disk_max;
    overlay::WorkerEvents events;
    events.joined = [this](WorkerId id, const std::string&) { post(Joined{id}); };
    events.publication = [this](const overlay::Publication& p) { post(p); };
    events.message = [this](std::string bytes) { post(Message{std::move(bytes)}); };
    events.away = [this](const std::string& reason) { post(Away{reason}); };
    events.disconnected = [this](const std::string& reason, bool in_order) { post(Disconnected{reason, in_order}); };
    ECHO_ASSIGN(node_, overlay::WorkerNode::start(std::move(node_options), std::move(events)));
    const Status result = work();
    if (stop_ && !ended_) hand_over();
    mailbox_.close();
    node_->stop();
    if (!result) return result.error();
    return report_;
  }

 private:
  // Called on the loop thread. A mailbox this full means that generation has hung for minutes.
  void post(Event event) {
    if (!mailbox_.try_push(std::move(event))) overflowed_ = true;
  }

  bool ended() const { return stop_ || ended_; }

  // Asked to stop: whoever receives policies from this worker is given another parent first.
  void hand_over() {
    tell_leaving();
    node_->drain();
    const TimePoint deadline = clock_.now() + kHandOverMax;
    while (!ended_ && clock_.now() < deadline)
      if (auto event = mailbox_.pop(kPoll); event && std::holds_alternative<Disconnected>(*event)) return;
  }

  Status work() {
    while (!ended()) {
      ECHO_TRY(wait_for_event(next_wake()));
      if (ended() || !task_) continue;
      // The safe point: between batches, and not while a grant for the installed version is on its way.
      if (!asking_.awaits_grant()) ECHO_TRY(install_pending());
      if (!leases_.empty()) {
        ECHO_TRY(generate_batch());
        ECHO_TRY(drain());
        if (ended()) continue;
        ECHO_TRY(install_pending());
      }
      request_work();
    }
    if (stop_ && report_.reason.empty()) report_.reason = "asked to stop";
    return ok();
  }

  TimePoint next_wake() const {
    if (!leases_.empty()) return clock_.now();
    const TimePoint poll = clock_.now() + kPoll;
    return std::min(poll, std::max(clock_.now(), asking_.not_before()));
  }

  // Takes one event, waiting until `deadline`, and everything that is there already.
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
      log::info("joined as worker {} ({})", id_, options_.name);
      asking_.joined();
    } else if (auto* publication = std::get_if<overlay::Publication>(&event)) {
      pending_.push_back(std::move(*publication));
    } else if (auto* message = std::get_if<Message>(&event)) {
      return handle_message(message->bytes);
    } else if (auto* away = std::get_if<Away>(&event)) {
      // The learner takes its leases back and hears nothing until this worker has joined again.
      log::warn("the learner is out of reach: {}", away->reason);
      asking_.away();
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
        if (task_) break;  // told again after it was away
        ECHO_ASSIGN(auto spec, data_plane::unpack_run_spec(message.run_spec()));
        ECHO_ASSIGN(task_, make_task(std::move(spec)));
        installer_.emplace(task_->model);
        producer_.emplace(*task_);
        log::info("task '{}', model of {} parameters", task_->spec.adapter_name(), task_->model->config().parameters());
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

  Status install_pending() {
    while (!pending_.empty()) {
      const overlay::Publication publication = std::move(pending_.front());
      pending_.pop_front();
      const Status installed = installer_->install(publication);
      if (installed) {
        ++report_.versions;
        if (publication.activate) node_->installed(publication.version, publication.policy_digest);
      } else {
        log::warn("{}", installed.error().message());
        node_->install_failed(publication.version, installed.error().message());
      }
    }
    return ok();
  }

  void request_work() {
    if (!leases_.empty() || !installer_ || !installer_->version() || !pending_.empty()) return;
    if (clock_.now() < asking_.not_before()) return;
    const double rate = rate_.value_or(options_.rollouts_per_s_max.value_or(0));
    const auto groups = static_cast<std::uint32_t>(rate * kBatchSeconds / task_->spec.group_size() + 0.5);
    schema::WorkerMessage message;
    schema::WorkRequest& request = *message.mutable_request();
    request.set_version(installer_->version()->value);
    request.set_policy_digest(installer_->digest().data(), installer_->digest().size());
    request.set_groups_max(std::clamp<std::uint32_t>(groups, 1, kGroupsPerBatchMax));
    say(message);
    asking_.asked();
  }

  Status generate_batch() {
    const TimePoint start = clock_.now();
    const std::vector<schema::Lease> batch(leases_.begin(), leases_.end());
    leases_.clear();
    progress_due_ = start + progress_every_;
    const Produced produced = producer_->produce(batch, id_, [&] { return got_on(batch); });
    if (produced.interrupted) return ok();  // stopped in the middle
    if (speed_) {
      const TimePoint generated = clock_.now(), due = speed_->due(start, produced.rollouts);
      while (!got_on(batch) && clock_.now() < due) ECHO_TRY(wait_for_event(std::min(due, clock_.now() + kPoll)));
      speed_->ended(due, generated, clock_.now());
    }
    if (produced.rollouts > 0) {
      const double elapsed_s = std::max(1e-6, seconds(clock_.now() - start));
      const double measured = static_cast<double>(produced.rollouts) / elapsed_s;
      rate_ = rate_ ? kRateMemory * *rate_ + (1 - kRateMemory) * measured : measured;
      busy_s_ += elapsed_s;
      generated_ += produced.rollouts;
      schema::Vitals vitals;
      vitals.set_rollouts(generated_);
      vitals.set_busy_s(busy_s_);
      node_->set_heartbeat(vitals.SerializeAsString());
    }
    for (const schema::Submission& submission : produced.submissions) {
      schema::WorkerMessage message;
      *message.mutable_submission() = submission;
      if (const Status sent = node_->send(message.SerializeAsString()); !sent)
        give_back(submission.lease(), schema::WORK_FAILURE_SIZE, sent.error().message());
    }
    for (const schema::WorkFailed& failed : produced.failures)
      give_back(failed.lease(), failed.failure(), failed.detail());
    return ok();
  }

  void say(const schema::WorkerMessage& message) {
    if (const Status sent = node_->send(message.SerializeAsString()); !sent) log::error("{}", sent.error().message());
  }

  void give_back(std::uint64_t lease, schema::WorkFailure why, const std::string& detail) {
    schema::WorkerMessage message;
    message.mutable_failed()->set_lease(lease);
    message.mutable_failed()->set_failure(why);
    message.mutable_failed()->set_detail(detail);
    say(message);
  }

  // Asked to stop: the learner hears of it at once, and rents another.
  void tell_leaving() {
    if (finish_by_ != kNever) return;
    finish_by_ = clock_.now() + kFinishMax;
    schema::WorkerMessage message;
    message.mutable_leaving();
    if (asking_.is_joined()) say(message);
  }

  // Asked to stop in the middle of a batch: what is nearly done is handed in, unless nobody wants it any more.
  bool may_finish() {
    tell_leaving();
    if (!drain()) ended_ = true;
    return asking_.is_joined() && !ended_ && clock_.now() < finish_by_;
  }

  // Called whenever some work on these leases is done: says so now and then. True: stop working.
  bool got_on(const std::vector<schema::Lease>& leases) {
    ++progress_;
    const TimePoint now = clock_.now();
    if (now >= progress_due_ && asking_.is_joined()) {
      progress_due_ = now + progress_every_;
      schema::WorkerMessage message;
      for (const schema::Lease& lease : leases) message.mutable_progress()->add_leases(lease.id());
      message.mutable_progress()->set_progress(progress_);
      say(message);
    }
    return ended_ || (stop_ && !may_finish());
  }

  const AgentOptions& options_;
  const std::atomic<bool>& stop_;
  SystemClock clock_;
  BoundedQueue<Event> mailbox_;
  std::atomic<bool> overflowed_ = false;
  std::unique_ptr<overlay::WorkerNode> node_;
  WorkerId id_;
  std::optional<Task> task_;
  std::optional<Installer> installer_;
  std::optional<Producer> producer_;
  std::deque<overlay::Publication> pending_;  // complete and in order, waiting for the safe point
  std::deque<schema::Lease> leases_;
  Asking asking_;
  Duration progress_every_ = std::chrono::seconds(3);
  TimePoint progress_due_{};
  TimePoint finish_by_ = kNever;  // asked to stop
  std::uint64_t progress_ = 0;  // grows with every token, rollout and poll at work
  std::optional<double> rate_;  // rollouts/s while generating
  std::optional<Speed> speed_;  // that it is held to
  double busy_s_ = 0;
  std::uint64_t generated_ = 0;
  bool ended_ = false;
  AgentReport report_;
};

}  // namespace

Result<AgentReport> run_agent(const AgentOptions& options, const std::atomic<bool>& stop) {
  Agent agent(options, stop);
  return agent.run();
}

}  // namespace echoline::worker
