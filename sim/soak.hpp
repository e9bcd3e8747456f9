// Random fleets in random trouble: one seed is one scenario, with everything that can go wrong on rented machines, and
// the invariants are checked throughout. First comes trouble, then peace, in which everybody must catch up.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "sim/invariants.hpp"

namespace echoline::sim {

struct SoakResult {
  std::uint64_t seed = 0;
  std::string scenario;  // what the seed made, in a line
  std::vector<Violation> violations;
  std::uint64_t trace_hash = 0, events = 0;
  Duration virtual_time{};
  double cpu_seconds = 0;  // of the thread
  Invariants::Counts counts;
  std::uint64_t timed = 0;
};

// Runs one seed. The same seed gives the same trace hash on every machine. `trace` receives a line for everything that
// happens. Any thread; no two share anything.
SoakResult soak(std::uint64_t seed, std::function<void(const std::string&)> trace = {});

struct SoakOptions {
  std::uint64_t first = 1, seeds = 1;
  std::size_t threads = 1;
  std::uint64_t twice = 0;  // so many of the first seeds are run a second time: their hashes must be equal
};

struct SoakSummary {
  std::uint64_t seeds = 0, events = 0, chunks = 0, activations = 0;
  std::uint64_t intrusions = 0, floods = 0;  // of intruders, what they asked; of floods, those that were ended
  std::uint64_t timed = 0;                   // publications in peace whose time was held against the plan
  Duration virtual_time{};
  double cpu_seconds = 0, cpu_seconds_max = 0;
  std::uint64_t slowest_seed = 0;
  std::uint64_t combined_hash = 0;   // of all trace hashes by seed
  std::vector<SoakResult> failures;  // by seed
};

// Runs seeds first .. first + seeds - 1 on several threads. `progress` is called after every seed, by one thread at a
// time, with how many are done and the result; false stops the run.
SoakSummary run_soak(const SoakOptions& options, const std::function<bool(std::uint64_t, const SoakResult&)>& progress);

}  // namespace echoline::sim
