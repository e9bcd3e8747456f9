#include "worker/agent.hpp"

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>
#include <variant>

#include "base/bounded_queue.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/run_spec.hpp"
#include "data_plane/trajectory.hpp"
#include "model/generate.hpp"
#include "model/runtime.hpp"
#include "model/tokenizer.hpp"
#include "overlay/uv/node.hpp"
#include "worker/installer.hpp"

namespace echoline::worker {
namespace {

constexpr std::size_t kMailboxMax = 4096;
constexpr Duration kPoll = std::chrono::milliseconds(100);  // how often a stop request is noticed
constexpr double kBatchSeconds = 0.25;  // wanted length of a batch: policies are installed between batches
constexpr Duration kHandOverMax = std::chrono::seconds(10);
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

// A scored batch of leases, ready to be sent.
struct Produced {
  std::vector<schema::Submission> submissions;
  std::uint64_t rollouts = 0;
};

// What the run told this worker, made usable.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::optional<model::Tokenizer> tokenizer;
  std::shared_ptr<model::Transformer> model;
  model::SamplingOptions sampling;
};

Result<Task> make_task(schema::RunSpec spec) {
  Task task;
  ECHO_ASSIGN(const model::ModelConfig config, model::ModelConfig::from_json(spec.model_config_json()));
  ECHO_ASSIGN(task.tokenizer, model::Tokenizer::from_json(spec.tokenizer_json()));
  ECHO_ASSIGN(task.adapter, data_plane::make_adapter(spec.adapter_name(), spec.adapter_config_json(), spec.seed(),
                                                     data_plane::AdapterUse::kScoring));
  ECHO_ASSIGN(task.model, model::create(config));  // the policy comes from the learner
  task.sampling.temperature = spec.temperature();
  task.sampling.top_p = spec.top_p();
  task.sampling.tokens_max = spec.response_tokens_max();
  if (const auto end = task.tokenizer->end_of_text()) task.sampling.eos = {*end};
  task.spec = std::move(spec);
  return task;
}

class Agent {
 public:
  Agent(const AgentOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), mailbox_(kMailboxMax) {}

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
      if (!awaiting_grant_) ECHO_TRY(install_pending());
      if (!leases_.empty()) {
        ECHO_TRY(generate_batch());
        ECHO_TRY(drain());
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
    return awaiting_grant_ ? poll : std::min(poll, std::max(clock_.now(), ask_again_));
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
      joined_ = true;
    } else if (auto* publication = std::get_if<overlay::Publication>(&event)) {
      pending_.push_back(std::move(*publication));
    } else if (auto* message = std::get_if<Message>(&event)) {
      return handle_message(message->bytes);
    } else if (auto* away = std::get_if<Away>(&event)) {
      // The learner takes its leases back and hears nothing until this worker has joined again.
      log::warn("the learner is out of reach: {}", away->reason);
      joined_ = awaiting_grant_ = false;
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
        if (task_) break;  // told again after it was away
        ECHO_ASSIGN(auto spec, data_plane::unpack_run_spec(message.run_spec()));
        ECHO_ASSIGN(task_, make_task(std::move(spec)));
        installer_.emplace(task_->model);
        log::info("task '{}', model of {} parameters", task_->spec.adapter_name(), task_->model->config().parameters());
        break;
      }
      case schema::LearnerMessage::kGrant:
        awaiting_grant_ = false;
        for (schema::Lease& lease : *message.mutable_grant()->mutable_leases()) leases_.push_back(std::move(lease));
        ask_again_ = clock_.now() + std::chrono::milliseconds(message.grant().retry_after_ms());
        break;
      case schema::LearnerMessage::kAck:
        if (message.ack().accepted()) {
          report_.rollouts += task_ ? task_->spec.group_size() : 0;
        } else {
          report_.refused += 1;
          log::warn("lease {} refused: {}", message.ack().lease(), message.ack().reason());
        }
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
    if (!joined_ || awaiting_grant_ || !leases_.empty() || !installer_ || !installer_->version()) return;
    if (!pending_.empty() || clock_.now() < ask_again_) return;
    const double rate = rate_.value_or(options_.rollouts_per_s_max.value_or(0));
    const auto groups = static_cast<std::uint32_t>(rate * kBatchSeconds / task_->spec.group_size() + 0.5);
    schema::WorkerMessage message;
    schema::WorkRequest& request = *message.mutable_request();
    request.set_version(installer_->version()->value);
    request.set_policy_digest(installer_->digest().data(), installer_->digest().size());
    request.set_groups_max(std::clamp<std::uint32_t>(groups, 1, kGroupsPerBatchMax));
    if (const Status sent = node_->send(message.SerializeAsString()); !sent) log::error("{}", sent.error().message());
    awaiting_grant_ = true;
  }

  Status generate_batch() {
    const TimePoint start = clock_.now();
    std::vector<schema::Lease> batch(leases_.begin(), leases_.end());
    leases_.clear();
    ECHO_ASSIGN(std::optional<Produced> produced, produce(batch));
    if (!produced) return ok();  // stopped in the middle
    // Holding the speed to the rented machine's: the batch lasts as long as it would take there.
    if (options_.rollouts_per_s_max) {
      const TimePoint due =
          start + from_seconds(static_cast<double>(produced->rollouts) / *options_.rollouts_per_s_max);
      while (!ended() && clock_.now() < due) ECHO_TRY(wait_for_event(std::min(due, clock_.now() + kPoll)));
    }
    const double elapsed_s = std::max(1e-6, seconds(clock_.now() - start));
    const double measured = static_cast<double>(produced->rollouts) / elapsed_s;
    rate_ = rate_ ? kRateMemory * *rate_ + (1 - kRateMemory) * measured : measured;
    busy_s_ += elapsed_s;
    generated_ += produced->rollouts;
    for (schema::Submission& submission : produced->submissions) {
      schema::WorkerMessage message;
      *message.mutable_submission() = std::move(submission);
      if (const Status sent = node_->send(message.SerializeAsString()); !sent) log::error("{}", sent.error().message());
    }
    node_->set_heartbeat(
        nlohmann::json{{"rollouts", generated_}, {"rollouts_per_s", *rate_}, {"busy_s", busy_s_}}.dump());
    return ok();
  }

  // Generates and scores every rollout of the leases in one batch; nothing when interrupted by a stop.
  Result<std::optional<Produced>> produce(const std::vector<schema::Lease>& batch) {
    std::vector<std::vector<model::Token>> prompts;
    for (const schema::Lease& lease : batch) {
      ECHO_ASSIGN(const std::vector<model::Token> prompt, task_->tokenizer->encode(lease.problem().prompt()));
      prompts.insert(prompts.end(), lease.rollouts(), prompt);
    }
    model::SamplingOptions sampling = task_->sampling;
    sampling.seed = mix64(task_->spec.seed() ^ mix64(batch.front().id()));
    ECHO_ASSIGN(const std::vector<model::Generation> generations,
                model::generate(*task_->model, prompts, sampling, [this] { return ended(); }));
    if (ended()) return std::optional<Produced>();
    Produced produced;
    std::size_t row = 0;
    for (const schema::Lease& lease : batch) {
      schema::Submission submission;
      submission.set_lease(lease.id());
      for (std::uint32_t member = 0; member < lease.rollouts(); ++member, ++row)
        *submission.add_trajectories() = trajectory(lease, member, prompts[row], generations[row]);
      produced.submissions.push_back(std::move(submission));
    }
    produced.rollouts = row;
    return std::optional<Produced>(std::move(produced));
  }

  schema::Trajectory trajectory(const schema::Lease& lease, std::uint32_t member,
                                const std::vector<model::Token>& prompt, const model::Generation& generation) const {
    std::vector<model::Token> spoken = generation.tokens;  // the response without the token that ends it
    const bool finished = generation.finish == model::Finish::kEos;
    if (finished && !spoken.empty()) spoken.pop_back();
    const std::string text = task_->tokenizer->decode(spoken);
    const data_plane::Score score = task_->adapter->score(lease.problem(), text);
    schema::Trajectory t;
    t.set_id(fmt::format("{}/{}", lease.id(), member));
    t.set_problem_id(lease.problem().id());
    t.set_group(lease.group());
    t.set_member(member);
    for (const model::Token token : prompt) t.add_prompt_tokens(static_cast<std::uint32_t>(token));
    for (const model::Token token : generation.tokens) t.add_response_tokens(static_cast<std::uint32_t>(token));
    for (const float logprob : generation.logprobs) t.add_logprobs(std::min(logprob, 0.0f));
    schema::VersionSpan& span = *t.add_spans();
    span.set_end(static_cast<std::uint32_t>(generation.tokens.size()));
    span.set_version(lease.version());
    t.set_reward(score.reward);
    for (const auto& [name, value] : score.components) (*t.mutable_components())[name] = value;
    t.set_policy_digest(lease.policy_digest());
    t.set_lease(lease.id());
    t.set_worker(id_.value);
    t.set_finished(finished);
    t.set_text(text);
    t.set_correct(score.correct);
    return t;
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
  std::deque<overlay::Publication> pending_;  // complete and in order, waiting for the safe point
  std::deque<schema::Lease> leases_;
  bool joined_ = false, awaiting_grant_ = false;
  TimePoint ask_again_{};
  std::optional<double> rate_;  // rollouts/s while generating
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
