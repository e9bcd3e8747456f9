// Plans for `echoline plan`, the learner and a resumed run.
#include "learner/planning.hpp"

#include <algorithm>
#include <iterator>

#include "base/log.hpp"
#include "delta/checkpoint.hpp"
#include "learner/market.hpp"
#include "model/policy.hpp"
#include "provisioner/down.hpp"
#include "provisioner/providers/registry.hpp"
#include "replay_buffer/idle_prediction.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::learner {
namespace {

// The learner's upload rate if it is not stated. An estimate that is too high would make this link the bottleneck of
// every path. One that is too low makes workers forward a little more than necessary.
constexpr BitRate kLearnerUploadDefault{1e9};

// The share of time for which the learner would wait for this fleet, from a simulation of some steps.
double predicted_idle(const provisioner::PlanRequest& request, const provisioner::FleetPace& fleet,
                      const replay_buffer::LeaseLength& lease, schema::OnNewPolicy on_new_policy) {
  using enum replay_buffer::GroupsInProgress;
  const auto at_least_one = [](double value) { return static_cast<std::uint32_t>(std::max(1.0, value)); };
  replay_buffer::IdleQuestion question;
  question.pacing.staleness = {.budget = static_cast<std::uint32_t>(request.staleness_budget),
                               .publish_every = static_cast<std::uint32_t>(request.pace.publish_every),
                               .lookahead = static_cast<std::uint32_t>(request.lookahead)};
  question.pacing.group_size = at_least_one(request.group_size);
  question.pacing.trajectories_per_step = at_least_one(request.pace.rollouts_per_step);
  question.lease = lease;
  question.step_s = seconds(request.pace.step_time);
  question.install_s = seconds(request.fleet.install_time_expected);
  question.link_s = seconds(fleet.links_busy);
  // ECHO-2's rule assumes that workers do not generate during a broadcast.
  question.stops_during_broadcast = request.fleet.capacity_rule == provisioner::CapacityRule::kEcho2;
  question.groups_in_progress = on_new_policy == schema::ON_NEW_POLICY_ABORT    ? kAbort
                                : on_new_policy == schema::ON_NEW_POLICY_FINISH ? kFinish
                                                                                : kContinue;
  for (const provisioner::FleetPace::Worker& worker : fleet.workers) {
    constexpr double kGroupsMax = 1024;  // so that the conversion to an integer cannot overflow
    const double groups_ahead = worker.rollouts_per_s * seconds(fleet.work_ahead) / request.group_size;
    question.workers.push_back(
        {.group_s = request.group_size / worker.rollouts_per_s,
         .policy_s = seconds(worker.policy_arrival),
         .groups_at_once =
             std::max(fleet.groups_at_once, 1 + static_cast<std::uint32_t>(std::min(groups_ahead, kGroupsMax)))});
  }
  return replay_buffer::predict_idle(question).idle_fraction;
}

}  // namespace

Result<model::ModelConfig> run_model_config(const RunConfig& config) {
  auto model = config.model.preset ? model::preset(*config.model.preset)
                                   : model::ModelConfig::from_folder(*config.model.path, model_use(config));
  if (!model) return as_user_error(std::move(model).error());
  ECHO_TRY(set_low_rank_adapter(config, *model));
  return model;
}

Status set_low_rank_adapter(const RunConfig& config, model::ModelConfig& model) {
  const model::AdapterConfig& requested = config.learner.adapter;
  if (requested.rank == 0) {
    if (!model.adapter) return ok();
    return fail(Code::kInvalid, "model.path",
                "the model has an adapter of rank {}, and the run has no learner.adapter: give it the same adapter to "
                "go on training that, or merge it into the model first (echoline model export --merged)",
                model.adapter->rank);
  }
  if (model.adapter && !model.adapter->computes_as(requested))
    return fail(Code::kInvalid, "model.path",
                "the model has an adapter of rank {}, alpha {} on {}, and learner.adapter has rank {}, alpha {} on {}: "
                "the two must be equal",
                model.adapter->rank, model.adapter->alpha, fmt::join(model.adapter->targets, ", "), requested.rank,
                requested.alpha, fmt::join(requested.targets, ", "));
  const bool is_added_now = !model.adapter;
  model.adapter = requested;
  if (model.family == model::Family::kCarried) {
    // A carried model's sizes come from its files, which do not have the added adapter yet.
    if (is_added_now && config.model.path) {
      ECHO_ASSIGN(const delta::Checkpoint weights, delta::Checkpoint::open(*config.model.path));
      ECHO_ASSIGN(const delta::StateView layout, model::adapter_layout(weights.view(), requested));
      for (const delta::TensorView& tensor : layout) {
        ECHO_ASSIGN(const std::int64_t elements, delta::element_count(tensor.shape));
        model.carried_elements += static_cast<std::uint64_t>(elements);
        const Bytes bytes_fp32{4 * static_cast<std::uint64_t>(elements)};  // a trainer may send them in fp32
        model.carried_bytes += bytes_fp32;
        model.carried_adapter_bytes += bytes_fp32;
      }
    }
  } else {
    ECHO_TRY(model::policy_layout(model));  // checks that the adapter's targets are matrices of the model
    if (config.learner.trainer == TrainerKind::kBuiltIn || config.worker.engine == "builtin")
      ECHO_TRY(model::check_adapter_computable(model));
  }
  model.adapter->base_model = (config.run_folder() / "model").string();
  return ok();
}

std::int64_t expert_choices_max(const RunConfig& config, const model::ModelConfig& model) {
  constexpr std::int64_t kChoicesOfCarried = 1024;  // for example 128 layers with 8 experts per token
  if (!config.learner.router_replay) return 0;
  return model.family == model::Family::kCarried ? kChoicesOfCarried : model.expert_choices();
}

BitRate learner_upload_rate(const RunConfig& config) { return config.network.uplink.value_or(kLearnerUploadDefault); }

Bytes gpu_memory_needed(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens) {
  constexpr std::uint64_t kGpuProgramBytes = 1'000'000'000;  // context, libraries, workspace
  const model::MemoryEstimate estimate = model::memory_estimate(model);
  const std::uint64_t tokens = std::min<std::uint64_t>(prompt_tokens + config.rollout.response_tokens_max,
                                                       static_cast<std::uint64_t>(model.positions_max));
  // Logits of the longest prompt, or of one token of every response, whichever are more.
  const std::uint64_t logits_bytes = std::max<std::uint64_t>(prompt_tokens, config.rollout.group_size) *
                                     static_cast<std::uint64_t>(model.vocab_size) * sizeof(float);
  return Bytes{estimate.policy_bf16.count + config.rollout.group_size * tokens * estimate.kv_cache_per_token.count +
               logits_bytes + kGpuProgramBytes};
}

provisioner::ProviderOptions provider_options(const RunConfig& config) {
  return {.log_folder = config.run_folder() / "logs",
          .file = config.fleet.provider_file.value_or(std::filesystem::path{}),
          .services = config.fleet.services};
}

provisioner::PlanRequest plan_request(const RunConfig& config, const model::ModelConfig& model,
                                      std::uint64_t prompt_tokens) {
  const model::MemoryEstimate needs = model::memory_estimate(model);
  provisioner::PlanRequest request = plan_request(config, needs.policy_bf16, needs.trained_bf16);
  if (config.worker.engine != "builtin") {
    // The worker writes the policy to files in memory, from which each server reads it. A server has the model in its
    // own memory until it lies on the GPU.
    constexpr std::uint64_t kPolicyCopies = 2;
    request.host_memory_min = Bytes{kPolicyCopies * needs.policy_bf16.count};
  }
  const provisioner::WorkerEngines engines = config.worker.worker_engines();
  if (!engines.on_cpu || config.fleet.where.cuda_min) request.cuda_min = config.fleet.cuda_needed();
  // Tensor parallelism divides weights, keys and values.
  request.gpu_memory_min = Bytes{gpu_memory_needed(config, model, prompt_tokens).count /
                                 static_cast<std::uint64_t>(config.worker.gpus_per_engine)};
  return request;
}

provisioner::PlanRequest plan_request(const RunConfig& config, Bytes policy, Bytes trained) {
  provisioner::PlanRequest request;
  request.pace.rollouts_per_step = static_cast<double>(config.rollout.trajectories_per_step());
  request.pace.publish_every = static_cast<int>(config.staleness.publish_every);
  request.pace.step_time = config.fleet.step_time_expected;
  request.staleness_budget = static_cast<int>(config.staleness.budget);
  request.lookahead = static_cast<int>(config.staleness.lookahead_steps());
  request.staleness_worst = [settings = config.staleness](int lag) {
    return static_cast<int>(replay_buffer::staleness_worst(
        settings.budget, settings.publish_every, settings.lookahead_steps(), static_cast<std::uint32_t>(lag)));
  };
  request.predict_idle = [lease = config.lease_length(), on_new_policy = config.rollout.on_new_policy](
                             const provisioner::PlanRequest& asked, const provisioner::FleetPace& fleet) {
    return predicted_idle(asked, fleet, lease, on_new_policy);
  };
  request.group_size = config.rollout.group_size;
  request.fleet = config.fleet;
  request.run_time = from_seconds(static_cast<double>(config.run.steps) * seconds(config.fleet.step_time_expected));
  request.learner_usd_per_hour = config.learner.usd_per_hour;
  const double delta_bytes = static_cast<double>(trained.count) / config.fleet.delta_ratio_expected;
  request.delta_bytes = Bytes{static_cast<std::uint64_t>(delta_bytes) + 1};  // rounded up, so never 0
  request.full_bytes = policy;
  request.learner_up = learner_upload_rate(config);
  request.paths = config.paths;
  request.chunk = config.network.chunk.value_or(Bytes{});
  request.quorum = config.network.quorum;
  request.topology = config.network.topology;
  return request;
}

Result<RunPlan> plan_run(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens) {
  const provisioner::PlanRequest request = plan_request(config, model, prompt_tokens);
  ECHO_ASSIGN(RunMarket market, read_run_market(config, model, request));
  RunPlan result;
  ECHO_ASSIGN(result.plan, provisioner::make_plan(request, market.offers));
  result.plan.market = std::move(market.market);
  std::move(market.notes.begin(), market.notes.end(), std::back_inserter(result.plan.notes));
  result.offers = std::move(market.offers);
  return result;
}

Result<RunPlan> stored_plan(const RunConfig& config, const std::filesystem::path& file) {
  RunPlan result;
  ECHO_ASSIGN(result.plan, provisioner::load_plan(file));
  result.plan.request.fleet = config.fleet;  // the current run file sets the limits on money and machines
  for (const provisioner::PlanRow& row : result.plan.rows) {
    result.offers.push_back(row.offer);
    result.offers.back().engine = config.worker.worker_engines().text();  // a plan's file does not contain it
  }
  return result;
}

Status release_earlier(const RunConfig& config, const std::filesystem::path& folder) {
  const auto file = folder / "ledger.sqlite";
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return ok();
  ECHO_ASSIGN(auto ledger, provisioner::Ledger::open(file, config.run.name));
  if (ledger.orphans().empty()) return ok();
  provisioner::DownOptions options;
  const provisioner::ProviderOptions providers = provider_options(config);
  options.provider = [&](const std::string& name) { return provisioner::make_provider(name, providers); };
  options.bill = provisioner::bill_reader(providers);
  ECHO_ASSIGN(const auto report, provisioner::bring_down(ledger, SystemClock(), options));
  for (const auto& line : report.released)
    log::warn("the earlier run in {} still had {}: {}", folder.string(), line.instance, line.what);
  if (report.problems.empty()) return ok();
  return fail(Code::kUnavailable, "release the earlier run",
              "{} may still have something rented: {}. `echoline down {}` releases it", folder.string(),
              report.problems.front(), folder.string());
}

}  // namespace echoline::learner
