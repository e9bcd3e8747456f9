// The offers of a run: where they are read, and how many rollouts a second each is predicted to give.
#pragma once
#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "learner/run_config.hpp"
#include "model/config.hpp"
#include "provisioner/links.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/plan.hpp"
#include "provisioner/throughput.hpp"

namespace echoline::learner {

struct RunMarket {
  std::vector<provisioner::Offer> offers;
  provisioner::Market from;
};

// Reads the offers file, or searches the market for what `request` could use, and predicts what each offer does for a
// model of this shape by the profile and by what earlier runs below run.folder have measured. kInvalid for a bad or
// missing file; kUnavailable where the market does not answer.
Result<RunMarket> run_market(const RunConfig& config, const model::ModelConfig& model,
                             const provisioner::PlanRequest& request);

// The market of a run that goes on: a file is read again when it is another, a search is repeated every
// fleet.search_every.
class MarketSource {
 public:
  // `known`: the market that the run's plan was made from.
  MarketSource(const RunConfig& config, model::ModelConfig model, provisioner::PlanRequest request,
               const provisioner::Market& known);
  // What can be rented now; nothing where it is not the time to ask, or where the file is as before. What could not be
  // read is read again when it has changed, or when it is time to search again. `stop`: nobody waits for it any more.
  Result<std::optional<std::vector<provisioner::Offer>>> look(double now_unix_s, const std::atomic<bool>& stop);

 private:
  const RunConfig& config_;
  const model::ModelConfig model_;
  const provisioner::PlanRequest request_;
  // Read once: what this run measures, its fleet counts with already.
  std::vector<provisioner::MeasuredRate> measured_;
  std::vector<provisioner::KnownLinks> links_;
  std::string seen_;  // of the file
  double searched_unix_s_ = 0;
};

}  // namespace echoline::learner
