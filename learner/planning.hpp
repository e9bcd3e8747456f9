// Makes the rental plan of a run file: feeds the capacity model with the run's own sizes and rates.
#pragma once
#include <filesystem>
#include <vector>

#include "base/result.hpp"
#include "learner/run_config.hpp"
#include "model/config.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/provider.hpp"

namespace echoline::learner {

struct RunPlan {
  std::vector<provisioner::Offer> offers;  // from the whole offers file, or from a stored plan
  provisioner::Plan plan;
};

// With an external trainer, a run may have a model that this program cannot compute, but only stores and sends.
inline model::ModelUse model_use(const RunConfig& config) {
  return config.learner.trainer == TrainerKind::kExternal ? model::ModelUse::kCarry : model::ModelUse::kCompute;
}

// The shape of the run's model, from its preset or from the config.json in its folder.
Result<model::ModelConfig> run_model_config(const RunConfig& config);
// Sets the model's low-rank adapter to that of learner.adapter. kInvalid if the model's directory has another one.
Status set_low_rank_adapter(const RunConfig& config, model::ModelConfig& model);

// The run's request for a plan.
provisioner::PlanRequest plan_request(const RunConfig& config, const model::ModelConfig& model,
                                      std::uint64_t prompt_tokens);

// The run's request if only the size of a policy is known, and that of the part which training changes. Any GPU memory
// then counts as sufficient.
provisioner::PlanRequest plan_request(const RunConfig& config, Bytes policy, Bytes trained);

// Plans for a model of this shape and prompts of at most `prompt_tokens`. kInvalid for a bad offers file. kInfeasible
// with remedies if no fleet meets the target.
Result<RunPlan> plan_run(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

// The plan stored in `file`, under the run's current limits on money and machines.
Result<RunPlan> stored_plan(const RunConfig& config, const std::filesystem::path& file);

// GPU memory to generate one group: the weights in bf16, keys and values of every token, the logits of the longest
// prompt, and the overhead of any GPU program.
Bytes gpu_memory_needed(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

// Number of steps for which consumed trajectories are kept: back to the oldest checkpoint, and two intervals more.
inline std::uint64_t steps_kept(const RunConfig& config) {
  return std::uint64_t{config.learner.checkpoint_every} * (config.learner.checkpoints_kept + 2);
}

// The most experts that workers of this run tell for one token; 0: they tell none, because of learner.router_replay or
// because the model is no mixture of experts. For a carried model, whose shape is not known, a number that suffices.
std::int64_t expert_choices_max(const RunConfig& config, const model::ModelConfig& model);

// The learner's upload rate: network.uplink, or 1 Gbit/s if that is not given.
BitRate learner_upload_rate(const RunConfig& config);

// The options of the run's provider.
provisioner::ProviderOptions provider_options(const RunConfig& config);

// Releases machines that the run in `folder`, an earlier one of this name, still has by its ledger.
Status release_earlier(const RunConfig& config, const std::filesystem::path& folder);

}  // namespace echoline::learner
