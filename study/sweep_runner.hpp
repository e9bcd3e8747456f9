// Executes the runs of a sweep, each in its own process. Skips runs that an earlier sweep has completed.
#pragma once
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "base/clock.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "study/sweep_plan.hpp"

namespace echoline::study {

enum class SweepEnd { kNotRun, kCached, kDone, kFailed };  // kCached: an earlier sweep has completed the run

struct SweepOutcome {
  SweepEnd end = SweepEnd::kNotRun;
  std::string why;            // reason of a failure
  std::filesystem::path log;  // the process's output; empty when it was not started
};

// By the digest of the run; one for every run of the plan.
using SweepOutcomes = std::map<std::string, SweepOutcome>;

struct SweepRunnerOptions {
  std::filesystem::path program;             // echoline
  unsigned jobs = 1;                         // most processes at a time
  Duration limit = std::chrono::hours(24);   // for one run
  Duration grace = std::chrono::minutes(2);  // from SIGTERM to SIGKILL
  // How long to wait for a process that an earlier sweep has left in a run's folder, and that is still ending.
  Duration lock_wait = std::chrono::minutes(5);
  std::function<void(const std::string&)> on_message;      // a message that stays: which run has ended, and how
  std::function<void(const std::string&)> on_status;       // the current state in one line
  std::function<void(const SweepOutcomes&)> on_run_ended;  // after each run that ends: all outcomes so far
};

// kUnavailable when another sweep uses the folder, kIo when the folder cannot be written to; a failed run is an
// outcome. `stop`: running processes are asked to end, and no other starts.
Result<SweepOutcomes> run_sweep(const SweepPlan& plan, const SweepRunnerOptions& options, const Clock& clock,
                                const std::atomic<bool>& stop);

}  // namespace echoline::study
