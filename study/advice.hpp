// Finds settings that make a simulated run cheaper or faster. The planner judges many combinations of a few settings.
// The combinations with the best plans are compared by short simulations, the best of these by longer ones (successive
// halving), and the last few by simulations of the whole run.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "sim/run_scenario.hpp"
#include "study/sweep_grid.hpp"

namespace echoline::study {

enum class AdviceAim { kUsd, kHours };

struct AdviceArguments {
  std::string scenario;  // path of a run file with a section `simulation`
  KeyValues overrides;
  AdviceAim aim = AdviceAim::kUsd;
  std::optional<double> hours_max, usd_max;           // limits of the whole run
  std::optional<std::uint32_t> staleness_budget_max;  // absent: the run file's staleness.budget
  unsigned threads = 0;                               // 0: one for each processor
};

// A simulated run, an estimate of it from its first steps, or the mean of runs with several seeds.
struct AdviceFigures {
  bool possible = false;                                          // there is a plan, and the run completed its steps
  double usd = 0, hours = 0;                                      // with the learner
  double usd_min = 0, usd_max = 0, hours_min = 0, hours_max = 0;  // over the seeds
  double usd_per_hour = 0;
  double idle_fraction = 0;                      // share of the learner's time after the first step
  double staleness_mean = 0;                     // learner steps
  std::uint64_t staleness_p95 = 0, workers = 0;  // the greatest over the seeds; workers: number in the plan
};

struct AdvisedRun {
  KeyValues settings;  // of every searched key
  AdviceFigures figures;
};

// The advised run with one key as the run file has it.
struct AdviceEffect {
  std::string key, advised, given;
  AdviceFigures with_given;  // not `possible` if the other settings exclude the run file's value
  bool within_limits = true;
};

struct Advice {
  AdviceAim aim = AdviceAim::kUsd;
  AdvisedRun given;                   // with the run file's own settings
  std::vector<AdvisedRun> best;       // at most kAdvisedMax, the best first; simulated completely, with kAdviceSeeds
  std::vector<AdviceEffect> effects;  // of the first of `best`: each key that differs from the run file; greatest first
  std::uint64_t seed = 0;             // the run file's, the first of kAdviceSeeds
  std::size_t plans = 0, simulations = 0;  // how many were made
  // False: no combination keeps the limits, and `best` has those that exceed the limits least.
  bool within_limits = true;
};

inline constexpr std::size_t kAdvisedMax = 3, kAdviceSeeds = 3;

// `progress` gets the finished and the expected number of plans and simulations, from any thread. Deterministic: the
// number of threads changes nothing. kInvalid if the file or an override is wrong, kInfeasible if no combination has a
// plan.
Result<Advice> advise(const AdviceArguments& arguments,
                      const std::function<void(std::uint64_t done, std::uint64_t total)>& progress = {});

// The figures of a run of `steps_total` steps. `result` may have only the first of these steps.
AdviceFigures advice_figures(const sim::RunResult& result, std::uint64_t steps_total);

// The settings of `run` that differ from the run file's.
KeyValues advised_changes(const Advice& advice, const AdvisedRun& run);
// The complete run file with these settings, as YAML.
Result<std::string> advised_run_file(const AdviceArguments& arguments, const KeyValues& changes);

nlohmann::json advice_json(const Advice& advice);

}  // namespace echoline::study
