// The checks of `echoline plan`, `echoline doctor` and a starting learner.
#include "learner/preflight.hpp"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/file_memory.hpp"
#include "base/files.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/policy_input.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/publisher.hpp"
#include "learner/resume.hpp"
#include "learner/run_task.hpp"
#include "model/phrasing.hpp"
#include "model/policy.hpp"
#include "overlay/sizes.hpp"
#include "overlay/types.hpp"
#include "overlay/uv/hosts.hpp"
#include "provisioner/providers/registry.hpp"
#include "replay_buffer/buffer.hpp"

namespace echoline::learner {
namespace {

// Memory of a learner whose policies are in files: its threads' buffers, and what is below kFileMemoryMin.
constexpr Bytes kCarryingMemory{512u << 20};

constexpr std::uint64_t kProblemsChecked = 512;  // checked training problems; held-out ones are all checked
constexpr std::size_t kTextBytesPerToken = 8;    // estimate, on the safe side: common text has four
constexpr std::size_t kTrajectoryBytes = 1024;   // estimate for a trajectory without its tokens and text

// Whether the check is about this machine: its devices, memory, ports, files and keys.
bool is_about_machine(const Check& check) {
  static const std::set<std::string_view> kNames{"trainer", "port", "bundle", "providers", "memory", "GPU memory"};
  return kNames.contains(check.name);
}

// Runs the checks in order. A check is skipped if one that it depends on has failed.
class PreflightRun {
 public:
  PreflightRun(const RunConfig& config, const PreflightOptions& options) : config_(config), options_(options) {}

  Preflight run() {
    check_model();
    if (options_.resume && model_)
      add_result("resume", check_resume(config_, *model_, options_.built_in), "it goes on from its newest checkpoint");
    check_devices();
    check_task();
    if (model_ && phrasing_ && adapter_) check_lengths();
    if (model_) check_messages();
    if (model_) check_publications();
    check_store();
    check_settings();
    add_result("port", can_listen(config_.network.bind, config_.network.port),
               config_.network.port == 0 ? "any free port" : fmt::format("{} is free", config_.network.port));
    check_uplink();
    check_bundle();
    check_plan();
    if (result_.plan) check_providers();
    if (model_) {
      const auto memory_bytes =
          static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGE_SIZE));
      const bool has_local_workers = config_.fleet.is_local() && result_.plan;
      const std::size_t workers = has_local_workers ? result_.plan->plan.chosen().size() : 0;
      const bool is_built_in = config_.learner.trainer != TrainerKind::kExternal;
      const auto training = is_built_in ? std::optional(training_shape()) : std::nullopt;
      result_.checks.push_back(memory_check(*model_, config_.network.store, workers, Bytes{memory_bytes}, training,
                                            /*workers_on_gpu=*/config_.worker.device != "cpu"));
      for (const GpuLoad& load : gpu_loads(config_, *model_, prompt_tokens_, training, workers))
        result_.checks.push_back(gpu_memory_check(
            load, options_.built_in.device_memory ? options_.built_in.device_memory(load.device) : std::nullopt));
    }
    if (options_.elsewhere)
      for (Check& check : result_.checks)
        if (is_about_machine(check) && check.verdict == Verdict::kFailed) check.verdict = Verdict::kWarning;
    result_.prompt_tokens = prompt_tokens_;
    return std::move(result_);
  }

 private:
  model::TrainingShape training_shape() const {
    const LearnerSection& learner = config_.learner;
    model::TrainingShape shape;
    shape.bf16 = learner.compute == Compute::kBf16;
    shape.int8_moments = learner.optimizer.moments == Moments::kInt8;
    shape.reference = learner.loss.kl_coefficient > 0;
    shape.recompute = learner.recompute;
    const auto tokens = static_cast<std::int64_t>(prompt_tokens_ + config_.rollout.response_tokens_max);
    const auto minibatch_rows =  // + 1: at least the quotient, rounded up
        static_cast<std::int64_t>(config_.rollout.trajectories_per_step() / learner.minibatches) + 1;
    shape.sequence_tokens = std::min(tokens, model_->positions_max);
    shape.microbatch_tokens = std::min(learner.microbatch_tokens, minibatch_rows * shape.sequence_tokens);
    shape.on_device = learner.device != "cpu";
    shape.optimizer_on_host = learner.optimizer.on_host;
    return shape;
  }
  void add_check(std::string name, Verdict verdict, std::string detail, Code code = Code::kInvalid) {
    result_.checks.push_back({.name = std::move(name), .verdict = verdict, .detail = std::move(detail), .code = code});
  }
  // A check that succeeded with `detail`, or failed with the error of `status`.
  void add_result(const std::string& name, const Status& status, std::string detail) {
    if (status)
      add_check(name, Verdict::kOk, std::move(detail));
    else
      add_check(name, Verdict::kFailed, status.error().message(), status.error().code);
  }

  Status read_model() {
    const std::optional<std::filesystem::path>& folder = config_.model.path;
    ECHO_ASSIGN(model::ModelFiles files, folder ? model::ModelFiles::read(*folder, model_use(config_))
                                                : model::ModelFiles::of_preset(*config_.model.preset));
    if (folder) ECHO_TRY(model::check_weights(*folder, files.config));
    ECHO_TRY(set_low_rank_adapter(config_, files.config));
    if (config_.worker.engine == "builtin")
      if (const Status computable = files.config.check_computable(); !computable)
        return fail(Code::kInvalid, "worker.engine", "the built-in engine cannot generate with this model: {}",
                    computable.error().detail);
    model_ = files.config;
    ECHO_ASSIGN(phrasing_, model::Phrasing::make(files, config_.prompts));
    return ok();
  }

  void check_model() {
    Status read = read_model();
    if (!read) read = as_user_error(std::move(read).error());
    add_result("model", read,
               model_ ? fmt::format("{}, vocabulary of {}, {} positions", model_->summary(), model_->vocab_size,
                                    model_->positions_max)
                      : "");
  }

  void check_task() {
    auto adapter = make_task_adapter(config_);
    if (!adapter) {
      add_result("task", as_user_error(std::move(adapter).error()), "");
      return;
    }
    adapter_ = std::move(*adapter);
    evaluation_ = adapter_->evaluation();
    std::vector<std::string> names;
    for (const data_plane::WeightedTask& task : config_.task.listed_tasks) names.push_back(task.name);
    if (names.empty()) names.push_back(config_.task.adapter);
    add_result("task", ok(), fmt::format("{}, {} held-out problems", fmt::join(names, ", "), evaluation_.size()));
  }

  // Whether rented hosts run a copy of this program, rather than that of a bundle or image.
  bool sends_this_program() const {
    const provisioner::ProviderKind* kind = provisioner::provider_kind(config_.fleet.provider);
    return kind != nullptr && kind->is_bare_host && !config_.fleet.bundle;
  }

  // Checks the devices of the learner and of workers on this machine, and what this program can do on rented hosts.
  void check_devices() {
    std::string trainer_device;  // empty: an external trainer
    const auto check_all = [&]() -> Status {
      if (config_.learner.trainer != TrainerKind::kExternal) {
        ECHO_TRY(source_maker(config_, options_.built_in));  // fails if this program has no built-in trainer
        trainer_device = config_.learner.device;
        if (const Status usable = can_compute_on(config_.learner.device); !usable)
          return fail(Code::kInvalid, "learner.device", "{}", usable.error().message());
      }
      const std::string& worker = config_.worker.device;
      if (config_.fleet.is_local() && config_.worker.engine == "builtin")
        if (const Status usable = can_compute_on(worker); !usable)
          return fail(Code::kInvalid, "worker.device", "{}", usable.error().message());
      if (sends_this_program() && config_.worker.engine == "builtin" && worker != "cpu" && options_.built_in.has_cuda &&
          !options_.built_in.has_cuda())
        return fail(Code::kInvalid, "worker.device",
                    "expected cpu, found {}: fleet.provider {} sends this program to its hosts, and its libtorch was "
                    "built without CUDA. Build echoline with a libtorch with CUDA, or name a bundle of such a build in "
                    "fleet.bundle",
                    worker, config_.fleet.provider);
      return ok();
    };
    const Status usable = check_all();  // sets trainer_device
    add_result("trainer", usable,
               trainer_device.empty() ? "an external one" : "the built-in one computes on " + trainer_device);
  }
  Status can_compute_on(const std::string& device) const {
    return options_.built_in.can_compute_on ? options_.built_in.can_compute_on(device) : ok();
  }

  // Checks the keys and files of the providers from which the run will rent, and the credit of their accounts.
  void check_providers() {
    if (config_.fleet.joined_by_hand()) return;
    std::set<std::string> providers;
    std::string accounts;
    Verdict verdict = Verdict::kOk;
    for (const provisioner::PlanRow* row : result_.plan->plan.chosen()) {
      if (!providers.insert(row->offer.provider).second) continue;
      if (const auto provider = provisioner::make_provider(row->offer.provider, provider_options(config_)); !provider)
        return add_check("providers", Verdict::kFailed,
                         fmt::format("fleet: offer '{}' is of provider '{}': {}", row->offer.id, row->offer.provider,
                                     as_user_error(provider.error()).message()));
      const provisioner::ProviderKind* kind = provisioner::provider_kind(row->offer.provider);
      if (kind == nullptr || !kind->account) continue;
      const auto account = kind->account(provider_options(config_));
      if (!account && account.error().code == Code::kInvalid)
        return add_check("providers", Verdict::kFailed, as_user_error(account.error()).message());
      if (!account) {
        verdict = Verdict::kWarning;
        accounts += fmt::format("; the key of {} could not be checked: {}", kind->name, account.error().message());
      } else if (account->credit_usd && *account->credit_usd <= 0) {
        verdict = Verdict::kWarning;
        accounts += fmt::format("; the account of {} has no credit (${:.2f})", kind->name, *account->credit_usd);
      } else if (account->credit_usd) {
        const double usd_per_hour = result_.plan->plan.usd_per_hour.expected;
        accounts += fmt::format(
            "; {} accepts the key, credit ${:.2f}{}", kind->name, *account->credit_usd,
            usd_per_hour > 0 ? fmt::format(", {:.1f} h of the plan", *account->credit_usd / usd_per_hour) : "");
      }
    }
    add_check("providers", verdict, fmt::format("{}{}", fmt::join(providers, ", "), accounts));
  }

  // Prompts must be encodable in the model's tokens and leave room for a response.
  void check_lengths() {
    std::vector<schema::Problem> problems = evaluation_;
    for (std::uint64_t i = 0; i < kProblemsChecked; ++i)
      if (auto problem = adapter_->problem(i)) problems.push_back(std::move(*problem));
    std::size_t unwritable = 0, too_long = 0;
    std::string first_unwritable, first_too_long;
    const auto positions = static_cast<std::uint64_t>(model_->positions_max);
    for (const schema::Problem& problem : problems) {
      const auto tokens = phrasing_->prompt(data_plane::prompt_of(problem));
      if (!tokens) {
        if (++unwritable == 1) first_unwritable = fmt::format("{}: {}", problem.id(), tokens.error().message());
        continue;
      }
      prompt_tokens_ = std::max<std::uint64_t>(prompt_tokens_, tokens->size());
      if (tokens->size() + config_.rollout.response_tokens_max > positions && ++too_long == 1)
        first_too_long = fmt::format("{}: {} tokens", problem.id(), tokens->size());
    }
    const std::size_t bad_prompts = unwritable + too_long;
    if (bad_prompts == 0) {
      add_check("lengths", Verdict::kOk,
                fmt::format("prompts of up to {} tokens and responses of {} fit into {} positions", prompt_tokens_,
                            config_.rollout.response_tokens_max, positions));
      return;
    }
    std::string text;
    if (too_long > 0)
      text = fmt::format(
          "{} of {} prompts leave no room for rollout.response_tokens_max = {} in the model's {} positions ({})",
          too_long, problems.size(), config_.rollout.response_tokens_max, positions, first_too_long);
    if (unwritable > 0)
      text += fmt::format("{}{} of {} prompts cannot be put in the model's tokens ({})", text.empty() ? "" : "; ",
                          unwritable, problems.size(), first_unwritable);
    // A few such problems are set aside when their turn comes. With many of them, the run could hardly learn.
    add_check("lengths", 2 * bad_prompts > problems.size() ? Verdict::kFailed : Verdict::kWarning, text);
    prompt_tokens_ = std::min(prompt_tokens_, positions);  // longer ones are never generated
  }

  void check_messages() {
    const data_plane::TrajectoryLimits limits;
    const auto failed = [&](std::string text) { add_check("messages", Verdict::kFailed, std::move(text)); };
    if (config_.rollout.response_tokens_max > limits.response_tokens_max)
      return failed(fmt::format("rollout.response_tokens_max = {}, and a trajectory holds at most {}",
                                config_.rollout.response_tokens_max, limits.response_tokens_max));
    const Bytes group = submission_bytes_max(config_, *model_, prompt_tokens_);
    const std::uint64_t limit = std::min<std::uint64_t>(limits.message_max.count, overlay::kMessageBytesMax);
    if (group.count > limit)
      return failed(fmt::format(
          "a group of rollout.group_size = {} responses of up to {} tokens can take {}, and a message at "
          "most {}: lower one of them",
          config_.rollout.group_size, config_.rollout.response_tokens_max, to_text(group), to_text(Bytes{limit})));
    add_check("messages", Verdict::kOk,
              fmt::format("a group takes at most {} of {}", to_text(group), to_text(Bytes{limit})));
  }

  // A full snapshot must fit into chunks, and into the store for late workers.
  void check_publications() {
    const Bytes policy = model::memory_estimate(*model_).policy_bf16;
    const Bytes snapshot = overlay::publication_bytes_max(policy), chunk = overlay::chunk_bytes_min(policy);
    if (config_.network.chunk && *config_.network.chunk < chunk)
      return add_check("publications", Verdict::kFailed,
                       fmt::format("a policy of {} needs network.chunk of at least {}, found {}", to_text(policy),
                                   to_text(chunk), to_text(*config_.network.chunk)));
    if (config_.network.store && *config_.network.store < snapshot)
      return add_check(
          "publications", Verdict::kFailed,
          fmt::format("a policy of {} needs network.store of at least {}, found {}; leave it out, and it follows "
                      "the policy's size",
                      to_text(policy), to_text(snapshot), to_text(*config_.network.store)));
    add_check("publications", Verdict::kOk, fmt::format("a snapshot takes at most {}", to_text(snapshot)));
  }

  // The plan depends on the learner's uplink, which carries every policy. Workers on this machine do not use it.
  void check_uplink() {
    if (config_.network.uplink || config_.fleet.is_local()) return;
    add_check(
        "uplink", Verdict::kWarning,
        fmt::format("network.uplink is not given: the plan assumes {}, and the learner sends without a limit. If its "
                    "link is slower, it feeds too many workers, and T_b is longer",
                    to_text(learner_upload_rate(config_))));
  }

  // The replay buffer keeps trajectories until checkpoints have passed them.
  void check_store() {
    // The steps that are kept, those up to the next checkpoint, those generated ahead, and the step in training.
    const std::uint64_t steps_stored =
        std::min<std::uint64_t>(config_.run.steps, steps_kept(config_) + config_.learner.checkpoint_every +
                                                       config_.staleness.lookahead_steps() + 1);
    const std::uint64_t trajectories = steps_stored * config_.rollout.trajectories_per_step();
    const std::uint64_t trajectories_max = replay_buffer::BufferOptions{}.rows_max;
    if (trajectories > trajectories_max)
      add_check(
          "store", Verdict::kFailed,
          fmt::format("{} trajectories would wait in the replay buffer for checkpoints to pass them, and it holds {}: "
                      "lower learner.checkpoint_every or learner.checkpoints_kept",
                      trajectories, trajectories_max));
    else
      add_check("store", Verdict::kOk,
                fmt::format("at most {} trajectories of {} in the replay buffer", trajectories, trajectories_max));
  }

  // Warns of unusual settings of the built-in trainer.
  void check_settings() {
    if (config_.learner.trainer != TrainerKind::kBuiltIn) return;
    const double rate = config_.learner.optimizer.learning_rate, default_rate = default_learning_rate(config_.model);
    const double factor = rate > default_rate ? rate / default_rate : default_rate / rate;
    if (factor >= kLearningRateFactorUsual)
      add_check("learning rate", Verdict::kWarning,
                fmt::format("learner.learning_rate {:g} is {:.3g} times {} {:g}, the default for {}: {}", rate, factor,
                            rate > default_rate ? "above" : "below", default_rate,
                            config_.model.path ? "a model that is loaded (model.path)" : "a new model (model.preset)",
                            rate > default_rate ? "it may destroy the model" : "the model may learn nothing"));
    if (config_.rollout.truncates())
      add_check(
          "sampling", Verdict::kWarning,
          fmt::format("rollout.top_p {:g}, top_k {} and min_p {:g} leave tokens out, but the loss is that of the whole "
                      "distribution: its gradient is biased (docs/losses.md). 1, 0 and 0 leave none out",
                      config_.rollout.top_p, config_.rollout.top_k, config_.rollout.min_p));
  }

  // Checks the bundle that rented hosts fetch, and whether they have the programs to unpack it.
  void check_bundle() {
    if (!config_.fleet.bundle) return;
    const std::filesystem::path& file = *config_.fleet.bundle;
    const std::string name = file.filename().string();
    const bool needs_decompressor = name.ends_with(".tar.zst") || name.ends_with(".tar.xz");
    if (!needs_decompressor && !name.ends_with(".tar.gz") && !name.ends_with(".tgz") && !name.ends_with(".tar"))
      return add_check(
          "bundle", Verdict::kFailed,
          fmt::format("fleet.bundle: expected an archive (.tar.gz, .tar.zst, .tar.xz, .tar) that `echoline bundle` has "
                      "made, found '{}'",
                      file.string()));
    std::error_code error;
    if (!std::filesystem::is_regular_file(file, error) || ::access(file.c_str(), R_OK) != 0)
      return add_check("bundle", Verdict::kFailed,
                       fmt::format("fleet.bundle: {} cannot be read; `echoline bundle -o {}` makes it", file.string(),
                                   file.string()));
    add_check(
        "bundle", needs_decompressor ? Verdict::kWarning : Verdict::kOk,
        fmt::format("rented hosts fetch {}{}", to_text(Bytes{std::filesystem::file_size(file, error)}),
                    needs_decompressor ? "; one without zstd or xz cannot unpack it, and .tar.gz every one can" : ""));
  }

  void check_plan() {
    if (!model_) {  // without a model there is no plan, but errors in the offers can be reported
      if (config_.fleet.search) return;
      if (const auto offers = provisioner::load_offers(config_.fleet.offers); !offers)
        add_result("plan", as_user_error(offers.error()), "");
      return;
    }
    auto plan = options_.plan.empty() || !std::filesystem::exists(options_.plan)
                    ? plan_run(config_, *model_, prompt_tokens_)
                    : stored_plan(config_, options_.plan);
    if (!plan) {
      add_result("plan", plan.error(), "");
      return;
    }
    const provisioner::Plan& rental = plan->plan;
    add_check("plan", rental.converged ? Verdict::kOk : Verdict::kWarning,
              fmt::format("{} of {} offers, {:.1f} rollouts/s for {:.1f}, ${:.2f}/h", rental.chosen().size(),
                          rental.rows.size(), rental.rollouts_per_s, rental.target.required_rollouts_per_s,
                          rental.usd_per_hour.expected));
    result_.plan = std::move(*plan);
  }

  const RunConfig& config_;
  const PreflightOptions& options_;
  Preflight result_;
  std::optional<model::ModelConfig> model_;
  std::optional<model::Phrasing> phrasing_;
  std::unique_ptr<data_plane::Adapter> adapter_;
  std::vector<schema::Problem> evaluation_;
  std::uint64_t prompt_tokens_ = 0;  // of the longest prompt checked
};

}  // namespace

Status Preflight::status() const {
  std::string text;
  bool all_infeasible = true;
  for (const Check& check : checks) {
    if (check.verdict != Verdict::kFailed) continue;
    text += (text.empty() ? "" : "\n") + check.detail;
    all_infeasible = all_infeasible && check.code == Code::kInfeasible;
  }
  if (text.empty()) return ok();
  return Error{all_infeasible ? Code::kInfeasible : Code::kInvalid, "", text};
}

Check memory_check(const model::ModelConfig& model, std::optional<Bytes> store, std::size_t local_workers,
                   Bytes available, const std::optional<model::TrainingShape>& training, bool workers_on_gpu) {
  const model::MemoryEstimate estimate = model::memory_estimate(model);
  const bool is_in_files = !training && model.family == model::Family::kCarried &&
                           estimate.policy_bf16.count >= kFileMemoryMin;  // see base/file_memory.hpp
  // `stored`: the deltas and snapshots in the store, estimated as at most two snapshots. `published`: the newest
  // published policy, the next, which is compared with it, and deltas that are folded for a late worker.
  const Bytes stored = std::min(store.value_or(overlay::learner_store_bytes(estimate.policy_bf16)),
                                Bytes{2 * overlay::publication_bytes_max(estimate.policy_bf16).count});
  // All policies of the built-in trainer share the memory of an adapter's base, in bf16. The base is a part of
  // policy_bf16, so the difference below is not negative.
  const std::uint64_t shared_bytes = training && model.adapter ? 2 * model.parameters() : 0;
  const auto own_bytes = static_cast<double>(estimate.policy_bf16.count - shared_bytes);  // of each policy
  const Bytes published{shared_bytes + static_cast<std::uint64_t>(Publisher::kPoliciesHeld * own_bytes)};
  Bytes training_bytes;  // in this machine's memory, not a device's
  if (!training) {
    training_bytes = estimate.policy_bf16;  // the next policy as it is sent, in bf16
  } else {
    const model::TrainingMemory memory = model::training_memory(model, *training);
    training_bytes = memory.total();
    if (training->on_device) training_bytes = training->optimizer_on_host ? memory.optimizer : Bytes{0};
  }
  if (is_in_files)
    return {"memory", kCarryingMemory > available ? Verdict::kFailed : Verdict::kOk,
            fmt::format("carrying the policies of an external trainer takes {}, this machine has {}; the policies, up "
                        "to {}, are in files on the disk of the run's folder",
                        to_text(kCarryingMemory), to_text(available), to_text(training_bytes + published + stored))};
  const Bytes learner = training_bytes + published + stored;
  const std::string parts = fmt::format(
      "{} of it for the newest policy and the next while that is published, {} for publications that are "
      "stored",
      to_text(published), to_text(stored));
  const char* activity = training ? "training this model" : "holding the policies of an external trainer";
  if (learner > available)
    return {
        "memory", Verdict::kFailed,
        fmt::format(
            "{} takes {} of memory ({}), and this machine has {}: {} (docs/models.md)", activity, to_text(learner),
            parts, to_text(available),
            training ? "learner.recompute, learner.moments, learner.compute and learner.microbatch_tokens change that"
                     : "a smaller model, or a machine with more memory, is needed")};
  // A worker holds the received policy in bf16. On a CPU, it also holds the weights with which it computes, in fp32,
  // which are twice as large.
  const std::uint64_t policies_of_worker = workers_on_gpu ? 1 : 3;
  const Bytes workers{local_workers * policies_of_worker * estimate.policy_bf16.count};
  return {"memory", learner + workers > available ? Verdict::kWarning : Verdict::kOk,
          fmt::format("{} takes {} ({}){}, this machine has {}", activity, to_text(learner), parts,
                      local_workers > 0 ? fmt::format(" and the workers on it {}", to_text(workers)) : "",
                      to_text(available))};
}

std::vector<GpuLoad> gpu_loads(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens,
                               const std::optional<model::TrainingShape>& training, std::size_t workers) {
  // Estimate of what is not weights or training: CUDA's context, libraries, workspace, records of changes.
  constexpr std::uint64_t kGpuProgramBytes = 1'000'000'000;
  const auto same_device = [](const std::string& a, const std::string& b) {  // "cuda" is the first GPU
    return (a == "cuda" ? "cuda:0" : a) == (b == "cuda" ? "cuda:0" : b);
  };
  std::vector<GpuLoad> loads;
  if (training && training->on_device) {
    const model::TrainingMemory memory = model::training_memory(model, *training);
    const Bytes tensors{memory.tensors().count - (training->optimizer_on_host ? memory.optimizer.count : 0)};
    // The published policy, with which the next is compared, is also on the GPU.
    loads.push_back({.device = config.learner.device,
                     .learner = tensors + model::memory_estimate(model).policy_bf16 + Bytes{kGpuProgramBytes},
                     .worker = {},
                     .workers = 0});
  }
  if (workers > 0 && config.worker.engine == "builtin" && config.worker.device != "cpu") {
    if (loads.empty() || !same_device(loads.front().device, config.worker.device))
      loads.push_back({.device = config.worker.device, .learner = {}, .worker = {}, .workers = 0});
    loads.back().worker = gpu_memory_needed(config, model, prompt_tokens);
    loads.back().workers = workers;
  }
  return loads;
}

Check gpu_memory_check(const GpuLoad& load, std::optional<Bytes> available) {
  const Bytes workers{load.workers * load.worker.count}, learner_and_workers = load.learner + workers;
  std::string text;
  if (load.learner.count > 0) text = fmt::format("training this model takes up to {}", to_text(load.learner));
  if (load.workers > 0)
    text += fmt::format("{}{} worker{} up to {}{}", text.empty() ? "" : ", ", load.workers,
                        load.workers == 1 ? " takes" : "s take", to_text(workers),
                        load.workers == 1 ? "" : fmt::format(" ({} each)", to_text(load.worker)));
  if (!available)
    return {"GPU memory", Verdict::kWarning,
            fmt::format("on {}, {}; this program cannot tell how much {} has", load.device, text, load.device)};
  text = fmt::format("on {}, {}, and it has {}", load.device, text, to_text(*available));
  constexpr auto kTraining =
      "learner.recompute, learner.moments, learner.optimizer_on_host and learner.microbatch_tokens change what "
      "training takes (docs/models.md)";
  if (load.learner > *available) return {"GPU memory", Verdict::kFailed, fmt::format("{}: {}", text, kTraining)};
  if (load.workers > 0 && load.worker > *available)
    return {"GPU memory", Verdict::kFailed,
            fmt::format("{}: not even one worker fits; a lower rollout.group_size or rollout.response_tokens_max needs "
                        "less",
                        text)};
  if (learner_and_workers > *available)
    return {"GPU memory", Verdict::kWarning,
            fmt::format("{}: together they may not fit. Fewer workers on this machine, worker.device: cpu "
                        "or a lower rollout.group_size need less{}",
                        text, load.learner.count > 0 ? fmt::format("; {}", kTraining) : "")};
  return {"GPU memory", Verdict::kOk, text};
}

Preflight preflight(const RunConfig& config, const PreflightOptions& options) {
  return PreflightRun(config, options).run();
}

Status can_listen(const std::string& host, std::uint16_t port) {
  ECHO_ASSIGN(const std::string numeric_host, overlay::resolve(host));
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* addresses = nullptr;
  if (::getaddrinfo(numeric_host.c_str(), std::to_string(port).c_str(), &hints, &addresses) != 0)
    return fail(Code::kInvalid, "network.bind", "expected an address such as 127.0.0.1 or ::, found '{}'", host);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> address(addresses, ::freeaddrinfo);
  const Descriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // SO_REUSEADDR, as the learner's own socket: a port that another program has just left counts as free.
  const int enabled = 1;
  if (socket.get() >= 0) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &enabled, sizeof enabled);
  if (socket.get() >= 0 && ::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 &&
      ::listen(socket.get(), 1) == 0)
    return ok();
  if (errno == EADDRINUSE)
    return fail(Code::kInvalid, "network.port",
                "{} on {} is in use by another program; choose another, or 0 for any that is free", port, host);
  return fail(Code::kInvalid, "network.bind", "cannot listen on {} port {}: {}", host, port, std::strerror(errno));
}

Bytes submission_bytes_max(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens) {
  // A token is a varint with 7 bits per byte. Each response token also has a log-probability and its text.
  const auto largest_token = static_cast<std::uint64_t>(std::max<std::int64_t>(1, model.vocab_size - 1));
  const auto token_bytes = static_cast<std::uint64_t>((std::bit_width(largest_token) + 6) / 7);
  const std::uint64_t response_bytes =
      config.rollout.response_tokens_max * (token_bytes + sizeof(float) + kTextBytesPerToken);
  return Bytes{config.rollout.group_size * (prompt_tokens * token_bytes + response_bytes + kTrajectoryBytes)};
}

}  // namespace echoline::learner
