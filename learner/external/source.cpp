// The policy source of a run with an external trainer. The service calls it; the trainer answers through the API.
#include "learner/external/source.hpp"

#include <cmath>
#include <mutex>
#include <utility>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "data_plane/policy_input.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/external/api.hpp"
#include "learner/external/batch_file.hpp"
#include "learner/external/published_adapter.hpp"
#include "learner/external/scores.hpp"
#include "learner/external/trainer_link.hpp"
#include "learner/held_out.hpp"
#include "model/policy.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kPoll = std::chrono::milliseconds(200);  // how often a wait checks whether the run must stop
constexpr double kProblemsMax = 1e9;  // of an evaluation, so that the conversion to an integer cannot overflow
constexpr std::size_t kAdapterConfigBytesMax = 1 << 20;
constexpr const char* kAdapterMetadata = "adapter_config";  // PEFT's, in the metadata of an adapter's file
constexpr std::uint64_t kPolicyHeaderBytesMax = 1 << 20;    // of a policy's file, for its header
// A trainer that has not called for this long is taken to have ended, and its evaluation is not waited for.
constexpr Duration kEvaluationPatience = std::chrono::minutes(10);

class ExternalSource final : public PolicySource {
 public:
  explicit ExternalSource(const SourceHost& host) : host_(host) {}

  ~ExternalSource() override {
    if (host_.node_calls) host_.node_calls->close();  // it calls the server
    trainer_server_.reset();
    std::error_code ignored;
    std::filesystem::remove(address_file(), ignored);
  }

  Status start(bool resume) {
    if (host_.config.learner.warm_start.enabled)
      log::warn("learner.warm_start is the built-in trainer's, and left out: begin from `model.path` instead");
    if (resume) {
      const auto resumed =
          read_newest_checkpoint(checkpoints(), [&](const auto& folder) { return read_checkpoint(folder); });
      if (!resumed)
        return fail(resumed.error().code, resumed.error().operation, "{}{}", resumed.error().detail,
                    earlier_runs_hint(host_.record.folder()));
      for (const ResumeReport::Damaged& damaged : resumed->damaged) {
        log::warn("checkpoint {} is damaged and was left aside as damaged-{}: {}", damaged.name, damaged.name,
                  damaged.reason);
        host_.record.append_event("checkpoint_damaged", {{"checkpoint", damaged.name}, {"reason", damaged.reason}});
      }
      steps_ = static_cast<std::uint64_t>(resumed->step);
      saved_version_ = Version{steps_};
      host_.record.append_event("resumed", {{"step", steps_}});
    } else if (host_.config.model.path) {
      ECHO_ASSIGN(delta::OwnedState policy, read_initial_policy(*host_.config.model.path));
      ECHO_TRY(probe(policy));
      policy_ = delta::share(std::move(policy));
    } else {
      ECHO_ASSIGN(delta::OwnedState policy, model::init_policy(host_.task.files.config, host_.config.run.seed));
      if (has_adapter()) {  // the weights under the adapter are copied once, for all policies
        ECHO_ASSIGN(delta::OwnedState base, delta::copy_of(model::split_adapter(policy.view()).base));
        base_ = delta::share(std::move(base));
        ECHO_ASSIGN(policy, to_policy(policy.view()));
      }
      policy_ = delta::share(std::move(policy));
    }
    trainer_link_.emplace(TrainerLinkOptions{.publish_every = host_.config.staleness.publish_every,
                                             .steps_total = host_.config.run.steps,
                                             .evaluate_every = host_.config.evaluation.every},
                          clock_, steps_, resumed_digest_);
    return resume ? start_api() : ok();  // begin() starts the API of a new run, once it has written the initial policy
  }

  std::uint64_t steps() const override { return steps_; }

  Status begin() override {
    host_.record.append_event("started", {{"step", steps_}});
    ECHO_TRY(checkpoint());
    return start_api();
  }

  Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) override {
    ECHO_ASSIGN(std::string bytes, pack_batch(batch));
    std::size_t tokens = 0;
    for (const schema::Trajectory& trajectory : batch)
      tokens += static_cast<std::size_t>(trajectory.response_tokens_size());
    trainer_link_->offer(steps_ + 1, std::make_shared<const std::string>(std::move(bytes)), tokens);
    for (;;) {
      auto consumed = trainer_link_->wait_consumed(kPoll);
      record_evaluations(/*wait=*/{});
      if (consumed) {
        ++steps_;
        TrainedStep trained{.figures = std::move(consumed->figures), .scrutiny = {}};
        if (consumed->scores) {
          ScoreComparison comparison = compare_scores(batch, *consumed->scores);
          trained.scrutiny = std::move(comparison.scrutiny);
          comparison.figures.update(trained.figures);  // the trainer's own figures take precedence
          trained.figures = std::move(comparison.figures);
        }
        return std::optional(std::move(trained));
      }
      if (host_.stop) return std::optional<TrainedStep>();
      ECHO_TRY(
          report_waiting(fmt::format("step {}: the batch {} trainer", steps_ + 1,
                                     trainer_link_->status()["batch"] == "taken" ? "is with the" : "waits for a")));
    }
  }

  Result<delta::SharedState> policy(Version version) override {
    while (policy_version_ != version) {  // the initial policy exists already
      if (auto published = trainer_link_->wait_policy(version, kPoll)) {
        policy_ = delta::share(std::move(*published));
        policy_version_ = version;
        continue;
      }
      if (host_.stop) return delta::SharedState();
      ECHO_TRY(report_waiting(fmt::format("waiting for the trainer to publish version {}", version.value)));
    }
    return policy_;
  }

  Status on_step_end() override {
    record_evaluations(/*wait=*/{});
    return ok();
  }

  // A trainer evaluates at its own times. The run waits for it only at its end.
  Status evaluate(const char*) override {
    record_evaluations(/*wait=*/{});
    while (!host_.stop && trainer_link_->is_evaluation_expected(kEvaluationPatience)) {
      ECHO_TRY(report_waiting(fmt::format("waiting for the trainer's evaluation of version {}", steps_)));
      record_evaluations(kPoll);
    }
    record_evaluations(/*wait=*/{});
    return ok();
  }
  const std::map<std::string, double>& accuracy() const override { return accuracy_; }

  // Saves the newest published policy. If not every step is published (staleness.publish_every is above 1), later steps
  // may be trained already.
  Status checkpoint() override {
    if (!policy_) return ok();
    if (saved_version_ != policy_version_) ECHO_TRY(save());
    if (checkpoint_to_place_.empty()) return ok();  // not empty after an earlier call that could not place it
    ECHO_TRY(model::place_directory(checkpoint_to_place_ / kCheckpointModel, host_.record.folder() / "model",
                                    /*link=*/true));
    checkpoint_to_place_.clear();
    return ok();
  }

 private:
  Status save() {
    const auto write = [&](const std::filesystem::path& folder) -> Status {
      ECHO_ASSIGN(nlohmann::json state, write_policy(folder, checkpoints(), host_.task.files, policy_->view()));
      state.update({{"format", kCheckpointFormat}, {"trainer", "external"}, {"steps", policy_version_.value}});
      return write_file_atomic(folder / kCheckpointState, json_text(state, /*indent=*/2) + "\n");
    };
    ECHO_ASSIGN(checkpoint_to_place_, add_checkpoint(checkpoints(), static_cast<std::int64_t>(policy_version_.value),
                                                     host_.config.learner.checkpoints_kept, write));
    saved_version_ = policy_version_;
    return ok();
  }

  // Call once the run's folder holds the trainer's initial policy.
  Status start_api() {
    TrainerServerOptions options;
    options.listen = host_.config.learner.api;
    options.folder = host_.record.folder();
    // A trainer may send fp32 weights, which are twice the size of bf16 weights; twice that again is a margin.
    options.body_max = {4 * model::memory_estimate(host_.task.files.config).policy_bf16.count + kPolicyHeaderBytesMax};
    const Bytes body_max = options.body_max;
    options.run_facts = run_facts();
    options.parse_policy = [this](Version version, const overlay::Slice& bytes) {
      return admit(version, parse_policy(bytes));
    };
    options.held_out = [this] { return held_out(); };
    options.grade = [this](const nlohmann::json& body) { return grade(body); };
    options.read_policy = [this](Version version, const std::filesystem::path& path, const std::string& strip_prefix) {
      return admit(version, read_policy(path, strip_prefix));
    };
    options.check_policy = [this](Version version, delta::OwnedState joined) {
      const auto owner = std::make_shared<const delta::OwnedState>(std::move(joined));
      return admit(version, to_policy(owner->view(), owner));
    };
    ECHO_ASSIGN(trainer_server_, TrainerServer::start(std::move(options), *trainer_link_));
    // The file contains a secret token.
    ECHO_TRY(write_private_file_atomic(address_file(), json_text(trainer_server_->address(), /*indent=*/2) + "\n"));
    if (host_.node_calls)
      host_.node_calls->open([this](TrainerCall call) { return trainer_server_->answer_node(std::move(call)); },
                             body_max, host_.record.folder());
    log::info("waiting for a trainer: {} says where", address_file().string());
    return ok();
  }

  // Writes the evaluations that the trainer has sent to the metrics. If there are none, waits up to `wait` for one.
  void record_evaluations(Duration wait) {
    for (const PolicyEvaluation& evaluation : trainer_link_->wait_evaluations(wait)) {
      const std::uint64_t step = evaluation.version.value;
      const char* when = step == 0 ? "before" : step >= host_.config.run.steps ? "after" : "during";
      nlohmann::json row = {
          {"when", when}, {"step", step}, {"accuracy", evaluation.accuracy}, {"problems", evaluation.problems}};
      if (evaluation.reward_mean) row["reward_mean"] = *evaluation.reward_mean;
      if (!evaluation.by_task.empty()) row["by_task"] = evaluation.by_task.figures("problems");
      host_.record.append_metric("evaluation", std::move(row));
      accuracy_[when] = evaluation.accuracy;
      log::info("accuracy {} training, step {}: {:.3f} on {} held-out problems, as the trainer evaluates", when, step,
                evaluation.accuracy, evaluation.problems);
    }
  }

  // The held-out problems with the model's prompts. Text behind the end of a response is ignored, so a trainer needs no
  // list of ending tokens.
  nlohmann::json held_out() const {
    nlohmann::json problems = nlohmann::json::array();
    for (const schema::Problem& problem : host_.task.evaluation) {
      const auto text = host_.task.phrasing.prompt_text(data_plane::prompt_of(problem));
      const auto tokens = host_.task.phrasing.prompt(data_plane::prompt_of(problem));
      if (text && tokens) problems.push_back({{"id", problem.id()}, {"prompt", *text}, {"prompt_tokens", *tokens}});
    }
    return {{"response_tokens_max", host_.config.rollout.response_tokens_max},
            {"eos", host_.task.phrasing.eos()},
            {"stop", host_.task.phrasing.stop()},
            {"problems", std::move(problems)}};
  }

  Result<PolicyEvaluation> grade(const nlohmann::json& body) const {
    if (!body.is_object())
      return fail(Code::kInvalid, "evaluate",
                  "expected {{\"responses\": {{problem: tokens or text}}}} or {{\"accuracy\", \"problems\"}}");
    return body.contains("responses") ? evaluation_from_responses(body["responses"]) : evaluation_from_figures(body);
  }

  // A problem without a response counts as wrong.
  Result<PolicyEvaluation> evaluation_from_responses(const nlohmann::json& responses) const {
    const std::vector<schema::Problem>& problems = host_.task.evaluation;
    if (!responses.is_object() || responses.size() > problems.size())
      return fail(Code::kInvalid, "evaluate", "expected responses by problem, at most {}", problems.size());
    double correct = 0, reward = 0;
    const bool has_several_tasks = host_.task.adapter->name() == data_plane::kSeveralTasksAdapter;
    TaskFigures by_task;
    std::size_t responses_used = 0;
    for (const schema::Problem& problem : problems) {
      std::string text;
      if (const auto it = responses.find(problem.id()); it != responses.end()) {
        ++responses_used;
        ECHO_ASSIGN(text, response_text(problem.id(), *it));
      }
      ECHO_ASSIGN(const data_plane::Score score, host_.task.adapter->score(problem, text));
      correct += score.correct ? 1 : 0;
      reward += score.reward;
      if (has_several_tasks) by_task.add(problem.id(), score.correct, score.reward);
    }
    if (responses_used != responses.size())
      return fail(Code::kInvalid, "evaluate",
                  "{} of the responses are to no held-out problem: GET /v1/evaluation lists them",
                  responses.size() - responses_used);
    const auto problem_count = static_cast<double>(problems.size());
    return PolicyEvaluation{.version = {},
                            .accuracy = correct / problem_count,
                            .reward_mean = reward / problem_count,
                            .problems = problems.size(),
                            .by_task = std::move(by_task)};
  }

  Result<std::string> response_text(const std::string& problem, const nlohmann::json& response) const {
    if (response.is_string()) {
      const std::string text = response.get<std::string>();
      return std::string(up_to_stop(text, host_.task.phrasing.stop()).first);
    }
    std::vector<model::Token> tokens;
    bool is_valid = response.is_array() && response.size() <= host_.config.rollout.response_tokens_max;
    for (std::size_t i = 0; is_valid && i < response.size(); ++i) {
      is_valid =
          response[i].is_number_integer() && response[i] >= 0 && response[i] < host_.task.files.config.vocab_size;
      if (is_valid) tokens.push_back(response[i].get<model::Token>());
    }
    if (!is_valid)
      return fail(Code::kInvalid, "evaluate", "{}: expected a text, or at most {} tokens of the vocabulary", problem,
                  host_.config.rollout.response_tokens_max);
    return host_.task.phrasing.answer(tokens);
  }

  static Result<PolicyEvaluation> evaluation_from_figures(const nlohmann::json& body) {
    const auto number = [&](const char* name) -> std::optional<double> {
      const auto it = body.find(name);
      return it != body.end() && it->is_number() && std::isfinite(it->get<double>()) ? std::optional(it->get<double>())
                                                                                     : std::nullopt;
    };
    const auto accuracy = number("accuracy"), problems = number("problems");
    if (!accuracy || *accuracy < 0 || *accuracy > 1 || !problems || *problems < 1 || *problems > kProblemsMax)
      return fail(Code::kInvalid, "evaluate",
                  "expected responses, or an accuracy from 0 to 1 and how many problems it is of");
    return PolicyEvaluation{.version = {},
                            .accuracy = *accuracy,
                            .reward_mean = number("reward_mean"),
                            .problems = static_cast<std::uint64_t>(*problems),
                            .by_task = {}};
  }

  // Reports the phase and lets the service work while the source waits for the trainer. An error ends the run, which
  // can be resumed.
  Status report_waiting(const std::string& phase) {
    host_.report_phase(phase);
    Status can_go_on = host_.while_waiting();
    if (!can_go_on) ECHO_TRY(checkpoint());
    return can_go_on;
  }

  std::filesystem::path checkpoints() const { return host_.record.folder() / "checkpoints"; }
  std::filesystem::path address_file() const { return host_.record.folder() / kTrainerAddressFile; }

  // The trainer's tensors as a policy of the run's model. With an adapter, they need not include the base. `owner`, if
  // set, keeps the tensors' memory, which does not change any more: the policy may share it.
  Result<delta::OwnedState> to_policy(const delta::StateView& tensors,
                                      std::shared_ptr<const void> owner = nullptr) const {
    if (has_adapter()) return join_published(base_, tensors, *host_.task.files.config.adapter);
    const delta::StateView adapter = model::split_adapter(tensors).adapter;
    if (!adapter.empty())
      return fail(Code::kInvalid, "publish", "tensor '{}' is of an adapter, and the run has none: `learner.adapter`",
                  adapter.front().name);
    return model::policy_of(tensors, host_.task.files.config, delta::allocate_in(host_.record.folder()),
                            std::move(owner));
  }
  bool has_adapter() const { return host_.task.files.config.adapter.has_value(); }

  // The policy of a model's folder. If the run has an adapter and the folder has not, the adapter changes nothing yet.
  Result<delta::OwnedState> read_initial_policy(const std::filesystem::path& path) {
    if (!has_adapter()) return read_policy(path);
    ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(path));
    const model::SplitPolicy parts = model::split_adapter(checkpoint.view());
    model::ModelConfig base_config = host_.task.files.config;
    base_config.adapter.reset();
    ECHO_ASSIGN(delta::OwnedState base,
                model::policy_of(parts.base, base_config, delta::allocate_in(host_.record.folder())));
    base_ = delta::share(std::move(base));
    if (!parts.adapter.empty()) return to_policy(parts.adapter);
    ECHO_ASSIGN(const delta::OwnedState adapter,
                model::init_adapter(base_->view(), *host_.task.files.config.adapter, host_.config.run.seed));
    return to_policy(adapter.view());
  }

  Result<delta::OwnedState> read_policy(const std::filesystem::path& path, const std::string& strip_prefix = {}) const {
    ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(path));
    const std::filesystem::path peft_config = path / model::kAdapterConfigFile;
    if (std::error_code ignored; has_adapter() && std::filesystem::exists(peft_config, ignored)) {
      ECHO_ASSIGN(const std::string text, read_file(peft_config, kAdapterConfigBytesMax));
      ECHO_TRY(check_adapter_config(text, *host_.task.files.config.adapter));
    }
    if (strip_prefix.empty()) return to_policy(checkpoint.view());
    delta::StateView renamed = checkpoint.view();
    for (delta::TensorView& tensor : renamed)
      if (tensor.name.starts_with(strip_prefix)) tensor.name.erase(0, strip_prefix.size());
    ECHO_ASSIGN(renamed, delta::canonical(std::move(renamed)));
    return to_policy(renamed);
  }

  // Returns ok if workers could generate with the policy, or if this program only carries the model and so cannot tell.
  Status probe(const delta::OwnedState& policy) const {
    if (!host_.probe || !host_.task.files.config.check_computable()) return ok();
    ECHO_TRY(host_.probe(policy.view(), host_.task.files.config, host_.config.rollout.temperature,
                         static_cast<int>(host_.config.learner.threads)));
    return ok();
  }

  // Returns the trainer's policy, or the reason for refusing it. After a refusal, the run keeps the version before and
  // waits for another policy.
  Result<delta::OwnedState> admit(Version version, Result<delta::OwnedState> policy) {
    const std::lock_guard lock(probe_mutex_);  // one probe at a time
    Status accepted = policy ? probe(*policy) : Status(policy.error());
    if (accepted) return policy;
    std::pair<Version, std::string> refusal(version, accepted.error().message());
    if (refusal != last_refusal_) {  // a repeated refusal is reported once
      log::warn("the trainer's policy of version {} is refused: {}", version.value, refusal.second);
      host_.record.append_event("policy_refused", {{"version", version.value}, {"reason", refusal.second}});
      last_refusal_ = std::move(refusal);
    }
    return std::move(accepted).error();
  }

  // Reads a policy from the bytes of a safetensors file.
  Result<delta::OwnedState> parse_policy(const overlay::Slice& bytes) const {
    ECHO_ASSIGN(const auto content, delta::parse_safetensors(bytes.bytes(), "the policy that was sent"));
    if (const auto it = content.metadata.find(kAdapterMetadata); has_adapter() && it != content.metadata.end())
      ECHO_TRY(check_adapter_config(it->second, *host_.task.files.config.adapter));
    return to_policy(content.tensors, std::make_shared<overlay::Slice>(bytes));
  }

  Result<std::int64_t> read_checkpoint(const std::filesystem::path& folder) {
    ECHO_ASSIGN(const nlohmann::json state, read_checkpoint_state(folder));
    ECHO_ASSIGN(delta::OwnedState policy, read_initial_policy(folder / kCheckpointModel));
    if (state["policy_digest"] != policy.digest().hex())
      return fail(Code::kCorrupt, "resume", "{}: its policy has the digest {} instead of {}", folder.string(),
                  policy.digest().hex(), state["policy_digest"].get<std::string>());
    resumed_digest_ = policy.digest();
    policy_ = delta::share(std::move(policy));
    policy_version_ = Version{state["steps"].get<std::uint64_t>()};
    return state["steps"].get<std::int64_t>();
  }

  nlohmann::json run_facts() const {
    const RunConfig& config = host_.config;
    return {{"run", config.run.name},
            {"steps_total", config.run.steps},
            {"publish_every", config.staleness.publish_every},
            {"staleness_budget", config.staleness.budget},
            {"prompts_per_step", config.rollout.prompts_per_step},
            {"group_size", config.rollout.group_size},
            {"temperature", config.rollout.temperature},
            {"top_p", config.rollout.top_p},
            {"top_k", config.rollout.top_k},
            {"min_p", config.rollout.min_p},
            {"response_tokens_max", config.rollout.response_tokens_max},
            {"model_config", nlohmann::json::parse(host_.task.files.config.to_json())},
            {"adapter_config", has_adapter() ? nlohmann::json::parse(host_.task.files.config.adapter->to_json())
                                             : nlohmann::json(nullptr)},
            {"model", std::filesystem::absolute(host_.record.folder() / "model").string()}};
  }

  const SourceHost host_;
  const SystemClock clock_;
  std::uint64_t steps_ = 0;
  delta::SharedState base_;    // the weights under an adapter, which all policies share; null without an adapter
  delta::SharedState policy_;  // the newest published one, or the initial one
  Version policy_version_;
  std::optional<Version> saved_version_;
  std::filesystem::path checkpoint_to_place_;  // the newest checkpoint, until the run's folder `model` holds its policy
  std::optional<delta::Digest> resumed_digest_;  // digest of the policy from which the run resumes
  std::mutex probe_mutex_;
  std::pair<Version, std::string> last_refusal_;  // the last refused policy and the reason; guarded by probe_mutex_
  std::optional<TrainerLink> trainer_link_;
  std::unique_ptr<TrainerServer> trainer_server_;
  std::map<std::string, double> accuracy_;  // by time of evaluation: before, during, after
};

}  // namespace

Result<std::unique_ptr<PolicySource>> load_external(const SourceHost& host, bool resume) {
  auto source = std::make_unique<ExternalSource>(host);
  ECHO_TRY(source->start(resume));
  return std::unique_ptr<PolicySource>(std::move(source));
}

}  // namespace echoline::learner
