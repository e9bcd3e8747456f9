#include "learner/planning.hpp"

#include <algorithm>

namespace echoline::learner {
namespace {

// What the planner takes for a learner without a stated uplink: a data-centre port.
constexpr BitRate kUplinkUnlimited{1e10};

BitRate capped(BitRate rate, const std::optional<BitRate>& cap) { return cap ? std::min(rate, *cap) : rate; }

}  // namespace

Result<model::ModelConfig> run_model_config(const RunConfig& config) {
  if (config.model.preset) return model::preset(*config.model.preset);
  auto model = model::ModelConfig::from_file(*config.model.path / "config.json");
  if (!model) return as_mistake(std::move(model).error());
  return model;
}

BitRate worker_up(const RunConfig& config, const provisioner::Offer& offer) {
  return capped(offer.up, config.network.worker_rate);
}

BitRate worker_down(const RunConfig& config, const provisioner::Offer& offer) {
  return capped(offer.down, config.network.worker_rate);
}

Result<RunPlan> plan_run(const RunConfig& config) {
  ECHO_ASSIGN(const model::ModelConfig model, run_model_config(config));
  RunPlan result;
  auto offers = provisioner::load_offers(config.fleet.offers);
  if (!offers) return as_mistake(std::move(offers).error());
  result.offers = std::move(*offers);
  const double full_bytes = static_cast<double>(model.parameters()) * 2;  // bf16
  provisioner::PlanRequest request;
  request.pace.rollouts_per_step = static_cast<double>(config.rollout.trajectories_per_step());
  request.pace.publish_every = static_cast<int>(config.staleness.publish_every);
  request.pace.step_time = config.fleet.step_time_expected;
  request.staleness_budget = static_cast<int>(config.staleness.budget);
  request.headroom = config.fleet.headroom;
  request.delta_bytes = Bytes{static_cast<std::uint64_t>(full_bytes / config.fleet.delta_ratio_expected) + 1};
  request.full_bytes = Bytes{static_cast<std::uint64_t>(full_bytes)};
  request.learner_up = config.network.uplink.value_or(kUplinkUnlimited);
  request.worker_cap = config.network.worker_rate;
  request.chunk = config.network.chunk;
  request.delay = config.network.delay_expected;
  request.install_time = config.fleet.install_time_expected;
  request.active_fraction = config.network.quorum;
  request.workers_max = config.fleet.workers_max;
  request.reliability_min = config.fleet.reliability_min;
  request.budget_usd_per_hour = config.fleet.usd_per_hour_max;
  ECHO_ASSIGN(result.plan, provisioner::make_plan(request, result.offers));
  return result;
}

}  // namespace echoline::learner
