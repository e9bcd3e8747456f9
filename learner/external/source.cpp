#include "learner/external/source.hpp"

#include <sys/stat.h>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/external/api.hpp"
#include "learner/external/batch_file.hpp"
#include "learner/external/exchange.hpp"
#include "model/policy.hpp"

namespace echoline::learner {
namespace {

constexpr Duration kPoll = std::chrono::milliseconds(200);

class External final : public PolicySource {
 public:
  explicit External(const SourceHost& host) : host_(host) {}

  ~External() override {
    api_.reset();
    std::error_code error;
    std::filesystem::remove(address_file(), error);
  }

  Status start(bool resume) {
    if (host_.config.learner.warm_start.enabled)
      log::warn("learner.warm_start is the built-in trainer's, and left out: begin from `model.path` instead");
    if (resume) {
      ECHO_ASSIGN(const Resumed resumed,
                  read_newest_checkpoint(checkpoints(),
                                         [&](const std::filesystem::path& folder) { return read_checkpoint(folder); }));
      for (const Resumed::Damaged& damaged : resumed.damaged) {
        log::warn("checkpoint {} is damaged and was left aside as damaged-{}: {}", damaged.name, damaged.name,
                  damaged.reason);
        host_.record.event("checkpoint_damaged", {{"checkpoint", damaged.name}, {"reason", damaged.reason}});
      }
      steps_ = static_cast<std::uint64_t>(resumed.step);
      saved_ = Version{steps_};
      host_.record.event("resumed", {{"step", steps_}});
    } else if (host_.config.model.path) {
      ECHO_ASSIGN(policy_, read_policy(*host_.config.model.path));
    } else {
      ECHO_ASSIGN(policy_, model::init_policy(host_.task.files.config, host_.config.run.seed));
    }
    exchange_.emplace(ExchangeOptions{host_.config.staleness.publish_every, host_.config.run.steps}, clock_, steps_);
    return resume ? serve() : ok();
  }

  std::uint64_t steps() const override { return steps_; }

  Status begin() override {
    host_.record.event("started", {{"step", steps_}});
    ECHO_TRY(checkpoint());
    return serve();
  }

  Result<std::optional<TrainedStep>> step(const std::vector<schema::Trajectory>& batch) override {
    ECHO_ASSIGN(std::string bytes, pack_batch(batch));
    exchange_->offer(steps_ + 1, std::make_shared<const std::string>(std::move(bytes)));
    for (;;) {
      if (auto figures = exchange_->wait_consumed(kPoll)) {
        ++steps_;
        return std::optional(TrainedStep{std::move(*figures), {}});
      }
      if (host_.stop) return std::optional<TrainedStep>();
      ECHO_TRY(wait_on(fmt::format("step {}: the batch {} trainer", steps_ + 1,
                                   exchange_->status()["batch"] == "taken" ? "is with the" : "waits for a")));
    }
  }

  Result<std::optional<delta::OwnedState>> policy(Version version) override {
    while (policy_version_ != version) {  // the one to begin with is there
      if (auto published = exchange_->wait_policy(version, kPoll)) {
        policy_ = std::move(*published);
        policy_version_ = version;
        continue;
      }
      if (host_.stop) return std::optional<delta::OwnedState>();
      ECHO_TRY(wait_on(fmt::format("waiting for the trainer to publish version {}", version.value)));
    }
    ECHO_ASSIGN(delta::OwnedState copy, delta::copy_of(policy_->view()));
    return std::optional(std::move(copy));
  }

  Status step_done() override { return ok(); }
  Status evaluate(const char*) override { return ok(); }
  const std::map<std::string, double>& accuracy() const override { return accuracy_; }

  // Of the newest policy that was published, which is not the newest step's where κ > 1.
  Status checkpoint() override {
    if (!policy_ || saved_ == policy_version_) return ok();
    const auto write = [&](const std::filesystem::path& folder) -> Status {
      ECHO_TRY(model::save_model(folder / kCheckpointModel, host_.task.files, policy_->view()));
      const nlohmann::json state = {{"format", kCheckpointFormat},
                                    {"trainer", "external"},
                                    {"steps", policy_version_.value},
                                    {"policy_digest", policy_->digest().hex()}};
      return write_file_atomic(folder / kCheckpointState, json_text(state, 2) + "\n");
    };
    ECHO_ASSIGN(const std::filesystem::path saved,
                add_checkpoint(checkpoints(), static_cast<std::int64_t>(policy_version_.value),
                               host_.config.learner.checkpoints_kept, write));
    saved_ = policy_version_;
    return model::place_directory(saved / kCheckpointModel, host_.record.folder() / "model", /*link=*/true);
  }

 private:
  // Once the run's folder holds the policy that a trainer begins with.
  Status serve() {
    ApiOptions api;
    api.listen = host_.config.learner.api;
    api.folder = host_.record.folder();
    api.body_max = {4 * model::memory_estimate(host_.task.files.config).policy_bf16.count +
                    (1 << 20)};  // as fp32, and more
    api.about = about();
    api.parse_policy = [this](const std::string& bytes) -> Result<delta::OwnedState> {
      ECHO_ASSIGN(const auto content,
                  delta::parse_safetensors(std::as_bytes(std::span(bytes)), "the policy that was sent"));
      return model::policy_of(content.tensors, host_.task.files.config);
    };
    api.read_policy = [this](const std::filesystem::path& path) { return read_policy(path); };
    ECHO_ASSIGN(api_, Api::start(std::move(api), *exchange_));
    // The token in it is a secret.
    const mode_t mask = ::umask(0177);
    const Status written = write_file_atomic(address_file(), json_text(api_->address(), 2) + "\n");
    ::umask(mask);
    ECHO_TRY(written);
    log::info("waiting for a trainer: {} says where", address_file().string());
    return ok();
  }

  // What the service has to say while a trainer is waited for. An error ends the run, which can go on from here.
  Status wait_on(const std::string& phase) {
    host_.phase(phase);
    Status going_on = host_.waiting();
    if (!going_on) ECHO_TRY(checkpoint());
    return going_on;
  }

  std::filesystem::path checkpoints() const { return host_.record.folder() / "checkpoints"; }
  std::filesystem::path address_file() const { return host_.record.folder() / kTrainerAddressFile; }

  Result<delta::OwnedState> read_policy(const std::filesystem::path& path) const {
    ECHO_ASSIGN(const delta::Checkpoint checkpoint, delta::Checkpoint::open(path));
    return model::policy_of(checkpoint.view(), host_.task.files.config);
  }

  Result<std::int64_t> read_checkpoint(const std::filesystem::path& folder) {
    ECHO_ASSIGN(const nlohmann::json state, read_checkpoint_state(folder));
    ECHO_ASSIGN(delta::OwnedState policy, read_policy(folder / kCheckpointModel));
    if (state["policy_digest"] != policy.digest().hex())
      return fail(Code::kCorrupt, "resume", "{}: its policy has the digest {} instead of {}", folder.string(),
                  policy.digest().hex(), state["policy_digest"].get<std::string>());
    policy_ = std::move(policy);
    policy_version_ = Version{state["steps"].get<std::uint64_t>()};
    return state["steps"].get<std::int64_t>();
  }

  nlohmann::json about() const {
    const RunConfig& c = host_.config;
    return {{"run", c.run.name},
            {"steps_total", c.run.steps},
            {"publish_every", c.staleness.publish_every},
            {"staleness_budget", c.staleness.budget},
            {"prompts_per_step", c.rollout.prompts_per_step},
            {"group_size", c.rollout.group_size},
            {"temperature", c.rollout.temperature},
            {"top_p", c.rollout.top_p},
            {"top_k", c.rollout.top_k},
            {"min_p", c.rollout.min_p},
            {"response_tokens_max", c.rollout.response_tokens_max},
            {"model_config", nlohmann::json::parse(host_.task.files.config.to_json())},
            {"model", std::filesystem::absolute(host_.record.folder() / "model").string()}};
  }

  const SourceHost host_;
  const SystemClock clock_;
  std::uint64_t steps_ = 0;
  std::optional<delta::OwnedState> policy_;  // the newest published, or the one to begin with
  Version policy_version_;
  std::optional<Version> saved_;
  std::optional<Exchange> exchange_;
  std::unique_ptr<Api> api_;
  const std::map<std::string, double> accuracy_;
};

}  // namespace

Result<std::unique_ptr<PolicySource>> load_external(const SourceHost& host, bool resume) {
  auto source = std::make_unique<External>(host);
  ECHO_TRY(source->start(resume));
  return std::unique_ptr<PolicySource>(std::move(source));
}

}  // namespace echoline::learner
