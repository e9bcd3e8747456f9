// The offers of a run: their source, and the predicted rollouts per second of each.
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
  std::vector<provisioner::Offer> offers;  // with the predicted speed of each
  provisioner::Market market;              // where and when the offers were found
  std::vector<std::string> notes = {};     // OfferList::notes
};

// Reads the offers file, or searches the market for offers that `request` could use. Predicts each offer's speed for a
// model of this shape, from the profile and from measurements of earlier runs below run.folder. kInvalid for a bad or
// missing file; kUnavailable if the market does not answer.
Result<RunMarket> read_run_market(const RunConfig& config, const model::ModelConfig& model,
                                  const provisioner::PlanRequest& request);

// The offers of a run in progress: reads a changed file again, or repeats the search every fleet.search_every.
class MarketSource {
 public:
  // `known`: the market that the run's plan was made from.
  MarketSource(const RunConfig& config, model::ModelConfig model, provisioner::PlanRequest request,
               const provisioner::Market& known);
  // Returns the current offers; absent if the file is unchanged or it is not time to search. After an error, reads
  // again when the file changes or at the next search. `stop` turns true when the caller no longer waits.
  Result<std::optional<std::vector<provisioner::Offer>>> read_changed_offers(double now_unix_s,
                                                                             const std::atomic<bool>& stop);

 private:
  const RunConfig& config_;
  const model::ModelConfig model_;
  const provisioner::PlanRequest request_;
  // From earlier runs. Read once, because the fleet itself accounts for this run's measurements.
  std::vector<provisioner::MeasuredRate> measured_;
  std::vector<provisioner::KnownLinks> links_;
  std::string read_identity_;  // identifies the content of the offers file that was last read
  double searched_unix_s_ = 0;
};

}  // namespace echoline::learner
