// The offers of a run: where they are read, and how many rollouts a second each is predicted to give.
#pragma once
#include <string>
#include <vector>

#include "base/result.hpp"
#include "learner/run_config.hpp"
#include "model/config.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

struct RunMarket {
  std::vector<provisioner::Offer> offers;
  provisioner::Market from;
};

// Reads the offers file, or searches the market for what `request` could use, and predicts what each offer does for a model of this shape by the profile and by what earlier
// runs below run.folder have measured. kInvalid for a bad or missing file; kUnavailable where the market does not answer.
Result<RunMarket> run_market(const RunConfig& config, const model::ModelConfig& model,
                             const provisioner::PlanRequest& request);

}  // namespace echoline::learner
