// Soak test: random fleets under random faults. A seed gives one scenario; the invariants are checked at every step. A
// phase with faults is followed by the peace, a phase without faults in which every worker must catch up.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "sim/invariants.hpp"

namespace echoline::sim {

struct SoakResult {
  std::uint64_t seed = 0;
  std::string scenario;  // one-line description
  std::vector<Violation> violations;
  std::uint64_t trace_hash = 0, events = 0;  // hash and number of the world's events
  Duration virtual_time{};
  double cpu_seconds = 0;  // of the thread
  Invariants::Counts counts;
  std::uint64_t timed = 0;  // publications whose delivery time was checked in peace
};

// Runs one seed. Equal seeds give equal trace hashes on every machine. `trace` receives a line per event. Thread-safe.
SoakResult soak(std::uint64_t seed, std::function<void(const std::string&)> trace = {});

struct SoakOptions {
  std::uint64_t first = 1, seeds = 1;  // the first seed, and the number of seeds
  std::size_t threads = 1;
  std::uint64_t twice = 0;  // number of seeds, from the first on, that run twice to compare their hashes
};

struct SoakSummary {
  std::uint64_t seeds = 0, events = 0, chunks = 0, activations = 0;
  std::uint64_t intrusions = 0, floods = 0;  // requests of intruders; floods that were ended
  std::uint64_t timed = 0;                   // publications whose delivery time was checked in peace
  Duration virtual_time{};
  double cpu_seconds = 0, cpu_seconds_max = 0;
  std::uint64_t slowest_seed = 0;
  std::uint64_t combined_hash = 0;   // over the seeds' trace hashes, in order
  std::vector<SoakResult> failures;  // by seed
};

// Runs the seeds on several threads. After every seed, `progress` is called with the number of completed seeds and the
// seed's result, by one thread at a time. If it returns false, no more seeds are started.
SoakSummary run_soak(const SoakOptions& options, const std::function<bool(std::uint64_t, const SoakResult&)>& progress);

}  // namespace echoline::sim
