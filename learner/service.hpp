// The learner process: plans and rents a fleet, trains on its rollouts, publishes every policy, reports.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "learner/policy_source.hpp"
#include "learner/run_config.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

struct ServiceOptions {
  bool resume = false;
  std::filesystem::path plan;  // the plan to rent by; empty: the resumed run's own plan, or a new one
  // The echoline program itself, started as `<program> worker ...` for each rented local offer.
  std::filesystem::path program;
  BuiltIn built_in;              // the built-in trainer, if the program has it (learner/training/built_in.hpp).
  const Clock* clock = nullptr;  // null: the system's clock; a test's may run faster
  // Called with the plan, before an earlier run is moved aside; may be empty.
  std::function<void(const provisioner::Plan&)> on_plan;
};

struct ServiceOutcome {
  nlohmann::json report;                // as written to report.json
  bool completed = false;               // false: stopped on request, with a checkpoint to resume from
  std::vector<std::string> unreturned;  // FleetSummary::unreturned
};

// Runs `config` to its end; writes only below its run folder. When `stop` turns true, the learner finishes its current
// step, writes a checkpoint and a report, and returns the fleet. The caller's thread trains; the overlay's loop, the
// rollout desk, the fleet and the snapshot encoder have one thread each. Errors: those of the plan (kInvalid,
// kInfeasible); kInvalid for a port in use or a bad model; kUnavailable if no worker ever joined.
Result<ServiceOutcome> run_learner(const RunConfig& config, const ServiceOptions& options,
                                   const std::atomic<bool>& stop);

}  // namespace echoline::learner
