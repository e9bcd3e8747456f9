// Runs what a sweep has planned, each in a process of its own, and leaves out what an earlier sweep has finished.
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

enum class SweepEnd { kNotRun, kCached, kDone, kFailed };

struct SweepOutcome {
  SweepEnd end = SweepEnd::kNotRun;
  std::string why;            // it failed
  std::filesystem::path log;  // what it wrote; empty when it was not started
};

using SweepOutcomes = std::map<std::string, SweepOutcome>;  // by the digest of the run; one for every run of the plan

struct SweepRunnerOptions {
  std::filesystem::path program;                 // echoline
  unsigned jobs = 1;                             // processes at a time
  Duration limit = std::chrono::hours(24);       // of a run
  Duration grace = std::chrono::minutes(2);      // from asking one to end until it is killed
  Duration lock_wait = std::chrono::minutes(5);  // for a process that an earlier sweep left and that still ends its run
  std::function<void(const std::string&)> line;  // a line that stays: what has ended, and how
  std::function<void(const std::string&)> state;   // how it stands right now
  std::function<void(const SweepOutcomes&)> some;  // after each run that ends, with what is known by then
};

// kUnavailable when another sweep works in the folder, kIo when that cannot be written; a run that fails is an outcome.
// `stop`: those that run are asked to end, and no other begins.
Result<SweepOutcomes> run_sweep(const SweepPlan& plan, const SweepRunnerOptions& options, const Clock& clock,
                                const std::atomic<bool>& stop);

}  // namespace echoline::study
