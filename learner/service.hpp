// The learner process: plans and rents a fleet, trains on its rollouts, publishes every policy, reports.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "learner/policy_source.hpp"
#include "learner/run_config.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

struct ServiceOptions {
  bool resume = false;
  std::filesystem::path plan;  // a plan made before, to rent by; empty: the run's own when it goes on, else a new one
  // The echoline program itself, started as `<program> worker ...` for each rented local offer.
  std::filesystem::path program;
  BuiltIn built_in;              // the built-in trainer, in a program that has it (learner/training/built_in.hpp)
  const Clock* clock = nullptr;  // the system's, where there is none; a test's may go faster
  // Hears of the plan that the fleet is rented by, before an earlier run is moved aside; may be empty.
  std::function<void(const provisioner::Plan&)> planned;
};

struct ServiceOutcome {
  nlohmann::json report;   // as written to report.json
  bool completed = false;  // false: stopped on request, with a checkpoint to resume from
};

// Runs the whole of `config`; writes everything below its run folder. When `stop` turns true the step under way is
// finished, a checkpoint and a report are written and the fleet is returned. Threads: the caller's trains; the
// overlay's loop, the rollout desk, the fleet and the snapshot encoder have one each. Errors: those of the plan
// (kInvalid, kInfeasible), kInvalid for a port in use or a bad model, kUnavailable when no worker ever joined.
Result<ServiceOutcome> run_learner(const RunConfig& config, const ServiceOptions& options,
                                   const std::atomic<bool>& stop);

}  // namespace echoline::learner
