// Plans for `echoline plan`, the learner and a resumed run.
#include "learner/planning.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "learner/market.hpp"
#include "provisioner/down.hpp"
#include "provisioner/providers/registry.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::learner {
namespace {

// The learner's upload rate if it is not stated. An estimate that is too high would make this link the bottleneck of
// every path. One that is too low makes workers forward a little more than necessary.
constexpr BitRate kLearnerUploadDefault{1e9};

}  // namespace

Result<model::ModelConfig> run_model_config(const RunConfig& config) {
  if (config.model.preset) return model::preset(*config.model.preset);
  auto model = model::ModelConfig::from_folder(*config.model.path, model_use(config));
  if (!model) return as_user_error(std::move(model).error());
  return model;
}

BitRate learner_upload_rate(const RunConfig& config) { return config.network.uplink.value_or(kLearnerUploadDefault); }

Bytes gpu_memory_needed(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens) {
  constexpr std::uint64_t kGpuProgramBytes = 1'000'000'000;  // context, libraries, workspace
  const model::MemoryEstimate needs = model::memory_estimate(model);
  const std::uint64_t tokens = std::min<std::uint64_t>(prompt_tokens + config.rollout.response_tokens_max,
                                                       static_cast<std::uint64_t>(model.positions_max));
  // Logits of the longest prompt, or of one token of every response, whichever are more.
  const std::uint64_t logits_bytes = std::max<std::uint64_t>(prompt_tokens, config.rollout.group_size) *
                                     static_cast<std::uint64_t>(model.vocab_size) * sizeof(float);
  return Bytes{needs.policy_bf16.count + config.rollout.group_size * tokens * needs.kv_cache_per_token.count +
               logits_bytes + kGpuProgramBytes};
}

provisioner::ProviderOptions provider_options(const RunConfig& config) {
  return {.log_folder = config.run_folder() / "logs",
          .file = config.fleet.provider_file.value_or(std::filesystem::path{}),
          .services = config.fleet.services};
}

provisioner::PlanRequest plan_request(const RunConfig& config, const model::ModelConfig& model,
                                      std::uint64_t prompt_tokens) {
  provisioner::PlanRequest request = plan_request(config, model::memory_estimate(model).policy_bf16);
  request.gpu_memory_min = gpu_memory_needed(config, model, prompt_tokens);
  return request;
}

provisioner::PlanRequest plan_request(const RunConfig& config, Bytes policy) {
  const auto full_bytes = static_cast<double>(policy.count);
  provisioner::PlanRequest request;
  request.pace.rollouts_per_step = static_cast<double>(config.rollout.trajectories_per_step());
  request.pace.publish_every = static_cast<int>(config.staleness.publish_every);
  request.pace.step_time = config.fleet.step_time_expected;
  request.staleness_budget = static_cast<int>(config.staleness.budget);
  request.lookahead = static_cast<int>(config.staleness.lookahead_steps());
  request.staleness_worst = [s = config.staleness](int lag) {
    return static_cast<int>(replay_buffer::staleness_worst(s.budget, s.publish_every, s.lookahead_steps(),
                                                           static_cast<std::uint32_t>(lag)));
  };
  request.group_size = config.rollout.group_size;
  request.fleet = config.fleet;
  request.run_time = from_seconds(static_cast<double>(config.run.steps) * seconds(config.fleet.step_time_expected));
  request.learner_usd_per_hour = config.learner.usd_per_hour;
  request.delta_bytes = Bytes{static_cast<std::uint64_t>(full_bytes / config.fleet.delta_ratio_expected) + 1};
  request.full_bytes = Bytes{static_cast<std::uint64_t>(full_bytes)};
  request.learner_up = learner_upload_rate(config);
  request.paths = config.paths;
  request.chunk = config.network.chunk.value_or(Bytes{});
  request.quorum = config.network.quorum;
  request.topology = config.network.topology;
  return request;
}

Result<RunPlan> plan_run(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens) {
  const provisioner::PlanRequest request = plan_request(config, model, prompt_tokens);
  ECHO_ASSIGN(RunMarket market, run_market(config, model, request));
  RunPlan result;
  ECHO_ASSIGN(result.plan, provisioner::make_plan(request, market.offers));
  result.plan.market = std::move(market.market);
  result.offers = std::move(market.offers);
  return result;
}

Result<RunPlan> stored_plan(const RunConfig& config, const std::filesystem::path& file) {
  RunPlan result;
  ECHO_ASSIGN(result.plan, provisioner::load_plan(file));
  result.plan.request.fleet = config.fleet;  // the current run file sets the limits on money and machines
  for (const provisioner::PlanRow& row : result.plan.rows) result.offers.push_back(row.offer);
  return result;
}

Status release_earlier(const RunConfig& config, const std::filesystem::path& moved_to) {
  const auto file = moved_to / "ledger.sqlite";
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return ok();
  ECHO_ASSIGN(auto ledger, provisioner::Ledger::open(file, config.run.name));
  if (ledger.orphans().empty()) return ok();
  provisioner::DownOptions options;
  options.provider = [provider = provider_options(config)](const std::string& name) {
    return provisioner::make_provider(name, provider);
  };
  ECHO_ASSIGN(const auto report, provisioner::bring_down(ledger, SystemClock(), options));
  for (const auto& line : report.released)
    log::warn("the earlier run in {} still had {}: {}", moved_to.string(), line.instance, line.what);
  if (report.problems.empty()) return ok();
  return fail(Code::kUnavailable, "release the earlier run",
              "{} may still have something rented: {}. `echoline down {}` releases it", moved_to.string(),
              report.problems.front(), moved_to.string());
}

}  // namespace echoline::learner
