// The start of a simulated run: the production plan, if there is one, and its fleet's rules. Private to sim/.
#pragma once
#include "sim/run_broadcast.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {

struct RunStart {
  provisioner::Plan plan;
  // Why there is no plan. Then `wanted` has everything that may be rented, and `plan` its cost.
  std::string plan_error;
  std::vector<std::size_t> wanted;  // offer indices
  provisioner::FleetRules rules;
  double rules_target = 0;  // rollouts/s
};

// The links of a machine, under the run's limit.
Receiver receiver_of(const RunScenario& scenario, const RunOffer& offer, WorkerId id);

// kInvalid for an inconsistent scenario.
Result<RunStart> plan_simulated_run(const RunScenario& scenario);

}  // namespace echoline::sim
