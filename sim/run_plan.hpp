// How a simulated run begins: the production plan where there is one, and the rules of its fleet. Private to sim/.
#pragma once
#include "sim/run_broadcast.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {

struct RunStart {
  provisioner::Plan plan;
  std::string trouble;  // why there is no plan; then `wanted` is everything that may be rented, and `plan` says what
                        // that comes to
  std::vector<std::size_t> wanted;  // offers
  provisioner::FleetRules rules;
  double rules_target = 0;  // rollouts/s
};

// The links of a machine, under the run's cap.
Receiver receiver_of(const RunScenario& scenario, const RunOffer& offer, WorkerId id);

// kInvalid for a scenario that makes no sense.
Result<RunStart> plan_simulated_run(const RunScenario& scenario);

}  // namespace echoline::sim
