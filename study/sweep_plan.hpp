// What a sweep will run: a run file or scenario, its `sweep:` section, and what each cell and seed resolves to.
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
  std::vector<std::string> over;      // KEY=V1,V2
  std::vector<std::string> measures;  // more fields of the report
  std::uint32_t seeds = 0;            // 0: what the file says, or 1
  std::optional<SweepKind> kind;      // absent: simulated where the file has a section `simulation`
  std::string version;                // of the program: what another one has measured is measured again
};

// One process to run, and where what it leaves is.
struct SweepRun {
  std::uint64_t seed = 0;
  std::string digest;            // of the resolved file, the seed, the kind and the program's version
  std::filesystem::path folder;  // <out>/cells/<digest>
  std::string config;            // what config.yaml in there says
};

struct SweepCell {
  KeyValues values;              // of the swept keys
  std::vector<KeyValues> given;  // how they were written (GridCell)
  std::vector<SweepRun> runs;
  std::string name() const;  // "S=3 kappa=1"
  std::optional<std::string> value(const std::string& key) const;
};

struct SweepPlan {
  SweepKind kind = SweepKind::kReal;
  std::filesystem::path config, out;
  std::vector<std::string> keys;      // swept
  std::vector<std::string> measures;  // beyond those that every sweep has
  std::uint32_t seeds = 1;
  std::vector<SweepCell> cells;
};

// The default folder of a sweep of this file: sweeps/<name of the file> in the working directory, or the first of
// <name>-2, -3,
// ... that no sweep of another file has taken (kSweepSourceFile).
std::filesystem::path default_sweep_folder(const std::filesystem::path& config);

// A file in a sweep's folder that holds the absolute path of the run file or scenario.
inline constexpr const char* kSweepSourceFile = "source";
// Writes that file, unless it is there.
Status note_sweep_source(const SweepPlan& plan);

// Reads and resolves everything; starts and writes nothing. kInvalid with every problem: those of the file by their
// place, those of swept values by the --over that sets them and the cell.
Result<SweepPlan> plan_sweep(const SweepArguments& arguments);

// Whether a run that has ended lies in the folder: a report.json that says so. A real one that was interrupted goes on.
bool is_complete(SweepKind kind, const std::filesystem::path& folder);

}  // namespace echoline::study
