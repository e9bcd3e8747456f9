// The start of a simulated run: the real planner's plan, if there is one, and the rules of its fleet.
#pragma once
#include "sim/run_scenario.hpp"

namespace echoline::sim {

struct Receiver;  // run_broadcast.hpp

struct RunStart {
  provisioner::Plan plan;
  // Why there is no plan; empty if there is one. Without one, `wanted` has the cheapest offers that the limits allow,
  // and `plan` their cost.
  std::string plan_error;
  std::vector<std::size_t> wanted;       // machines to rent: indices in RunScenario::offers
  std::optional<double> idle_predicted;  // RunResult::idle_predicted
  provisioner::FleetRules rules;
  double rules_target = 0;  // rollouts/s that the fleet core will want by its rules
};

// The receiver for an offer: its links, under the limits of the plan request.
Receiver receiver_of(const RunScenario& scenario, const RunOffer& offer, WorkerId id);

// kInvalid for an inconsistent scenario.
Result<RunStart> plan_simulated_run(const RunScenario& scenario);

}  // namespace echoline::sim
