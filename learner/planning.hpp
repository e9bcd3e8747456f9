// From a run file to a rental plan: the capacity model fed with the run's own sizes and rates.
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
  std::vector<provisioner::Offer> offers;  // of the whole offers file, or of a stored plan
  provisioner::Plan plan;
};

// The shape of the run's model: of its preset, or of the config.json in its folder.
Result<model::ModelConfig> run_model_config(const RunConfig& config);

// What the run asks of a plan.
provisioner::PlanRequest plan_request(const RunConfig& config, const model::ModelConfig& model,
                                      std::uint64_t prompt_tokens);

// The same where nothing is known of the model but its size: whatever memory a GPU has will do.
provisioner::PlanRequest plan_request(const RunConfig& config, double parameters);

// For a model of this shape and prompts of up to so many tokens. kInvalid for a bad offers file; kInfeasible when no
// fleet meets the target, with the ways out.
Result<RunPlan> plan_run(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

// The plan that was written to `file`, under the limits on money and machines that the run has now.
Result<RunPlan> stored_plan(const RunConfig& config, const std::filesystem::path& file);

// What a GPU must hold to generate one group: the weights in bf16, keys and values of every token, the logits of the
// longest prompt, and what any GPU program takes.
Bytes gpu_memory_needed(const RunConfig& config, const model::ModelConfig& model, std::uint64_t prompt_tokens);

// For how many steps consumed trajectories are kept: what going back to the oldest checkpoint needs, and two more.
inline std::uint64_t steps_kept(const RunConfig& config) {
  return std::uint64_t{config.learner.checkpoint_every} * (config.learner.checkpoints_kept + 2);
}

// What the learner is taken to send: as stated, or 1 Gbit/s.
BitRate learner_up(const RunConfig& config);

// What the provider that the run rents from needs to know.
provisioner::ProviderOptions provider_options(const RunConfig& config);

// Releases what an earlier run of this name still has rented: its folder was moved aside, and its ledger with it.
Status release_earlier(const RunConfig& config, const std::filesystem::path& moved_to);

}  // namespace echoline::learner
