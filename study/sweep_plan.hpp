// Plans a sweep: reads a run file or scenario and its section `sweep`, and writes out the configuration of each run. A
// cell is one combination of the swept values; it has a run for each seed.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "study/sweep_grid.hpp"

namespace echoline::study {

inline constexpr std::size_t kSweepSeedsMax = 1000;
inline constexpr std::size_t kSweepRunsMax = 20'000;

enum class SweepKind { kReal, kSimulated };  // `echoline up`, or `echoline sim run`

struct SweepArguments {
  std::filesystem::path config, out;
  std::vector<std::string> over;      // arguments of --over: KEY=V1,V2
  std::vector<std::string> measures;  // fields of the report to show beside the default measures
  std::uint32_t seeds = 0;            // 0: the number in the file, or 1
  std::optional<SweepKind> kind;      // absent: simulated if the file has a section `simulation`
  std::string version;                // of the program; results of other versions are not reused
};

// One process to run, and the folder of its results.
struct SweepRun {
  std::uint64_t seed = 0;
  std::string digest;            // of the complete configuration, seed, kind and program version
  std::filesystem::path folder;  // <out>/cells/<digest>
  std::string config;            // the text of <folder>/config.yaml
};

struct SweepCell {
  KeyValues values;  // of the swept keys
  // The values as the user wrote them; several if different texts, such as 1 and S-1, mean the same.
  std::vector<KeyValues> written;
  std::vector<SweepRun> runs;
  std::string name() const;                                        // "S=3 kappa=1"
  std::optional<std::string> value(const std::string& key) const;  // absent if the cell does not set the key
};

struct SweepPlan {
  SweepKind kind = SweepKind::kReal;
  std::filesystem::path config, out;
  std::vector<std::string> keys;      // the swept keys
  std::vector<std::string> measures;  // in addition to the default measures
  std::uint32_t seeds = 1;
  std::vector<SweepCell> cells;
};

// The default folder for the results of this file: sweeps/<name of the file> in the working directory. If a sweep of
// another file uses that folder (kSweepSourceFile), the first free one of <name>-2, <name>-3, ...
std::filesystem::path default_sweep_folder(const std::filesystem::path& config);

// A file in a sweep's folder that contains the absolute path of the run file or scenario.
inline constexpr const char* kSweepSourceFile = "source";
// Writes the file if it does not exist.
Status write_sweep_source(const SweepPlan& plan);

// Reads the run file or scenario and returns the complete plan; starts and writes nothing. kInvalid lists every
// problem: one of the file with its place, one of a swept value with its --over argument and cell.
Result<SweepPlan> plan_sweep(const SweepArguments& arguments);

// Whether the folder contains the report.json of a complete run. A real run that was interrupted has a report too, but
// is not complete. A simulated run is complete however it ended, because a repetition would end in the same way.
bool is_complete(SweepKind kind, const std::filesystem::path& folder);

}  // namespace echoline::study
