// Plans a sweep for cli/sweep.cpp. A cell is one combination of the swept values. Reads the run file, lists its cells,
// and writes out the complete configuration of every run: one for each cell and seed.
#include "study/sweep_plan.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "base/config.hpp"
#include "base/files.hpp"
#include "base/text.hpp"
#include "delta/digest.hpp"
#include "learner/run_config.hpp"
#include "study/sim_run_config.hpp"
#include "study/sweep_expression.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

constexpr std::size_t kProblemsShown = 10;
constexpr const char* kKeysSetBySweep[] = {"run.name", "run.folder", "run.seed", "simulation.seed"};

struct SweepSection {
  std::vector<SweepAxis> axes;
  std::uint32_t seeds = 1;
  std::vector<std::string> measures;
};

// A value of the section `sweep` as text, as --over takes it.
Result<std::string> value_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return fail(Code::kInvalid, "", "expected a value, found null");
  return value.dump();  // JSON is also YAML, in flow style
}

// Keys whose values are paths. Paths in a file are relative to its folder, those of the command line to the working
// directory.
const std::set<std::string>& path_keys() {
  static const std::set<std::string> keys = [] {
    std::set<std::string> paths;
    for (const auto& key_list : {learner::run_file_keys(), simulation_keys()})
      for (const ConfigKey& key : key_list)
        if (key.type == "path") paths.insert(key.path);
    return paths;
  }();
  return keys;
}

// The content of kSweepSourceFile, which records the sweep's run file by its absolute path.
std::string source_file_content(const std::filesystem::path& config) {
  return std::filesystem::absolute(config).lexically_normal().string() + "\n";
}

std::string absolute_path(const std::string& path, const std::filesystem::path& file) {
  return std::filesystem::absolute(file.parent_path() / path).lexically_normal().string();
}

// Reads the values of each key of sweep.over as an axis.
void read_over(ConfigSection over, const std::filesystem::path& file, std::vector<SweepAxis>& axes) {
  for (const std::string& name : over.keys()) {
    const std::string key = full_key(name);  // the name may be short, as S
    const json values = json::parse(over.json(name));
    SweepAxis axis{.source = fmt::format("{}: sweep.over.{}", file.string(), name), .points = {}};
    std::vector<std::string> texts;
    if (values.is_array()) {
      for (const json& value : values) {
        const auto text = value_text(value);
        if (!text) over.error(name, text.error().detail);
        texts.push_back(text ? *text : "");  // finish() returns the error later; until then the axis keeps its length
      }
    } else {
      auto split = split_values(values.is_string() ? values.get<std::string>() : values.dump());
      if (split)
        texts = *std::move(split);
      else
        over.error(name, split.error().detail);
    }
    for (std::string& text : texts) {
      if (path_keys().contains(key)) text = absolute_path(text, file);
      axis.points.push_back(KeyValues{{key, std::move(text)}});  // a point with this one key
    }
    axes.push_back(std::move(axis));
  }
}

// Reads the listed cells as the points of one axis, which is combined with the axes of sweep.over.
void read_cells(ConfigSection sweep, const std::filesystem::path& file, std::vector<SweepAxis>& axes) {
  SweepAxis axis{.source = fmt::format("{}: sweep.cells", file.string()), .points = {}};
  for (ConfigSection cell : sweep.sections("cells")) {
    KeyValues point;
    for (const std::string& name : cell.keys()) {
      const std::string key = full_key(name);
      auto text = value_text(json::parse(cell.json(name)));
      if (!text)
        cell.error(name, text.error().detail);
      else
        point.emplace_back(key, path_keys().contains(key) ? absolute_path(*text, file) : *std::move(text));
    }
    axis.points.push_back(std::move(point));
  }
  if (!axis.points.empty()) axes.push_back(std::move(axis));
}

// Moves the section `sweep` out of the file, because it is no part of a run's configuration, and reads it.
Result<SweepSection> take_sweep_section(ConfigFile& file, const std::filesystem::path& path) {
  ConfigFile sweep_file = file.split("sweep");
  SweepSection section;
  ConfigSection sweep = sweep_file.root().section("sweep");
  read_over(sweep.section("over"), path, section.axes);
  read_cells(sweep, path, section.axes);
  sweep.read("seeds", section.seeds, {.min = 1, .max = kSweepSeedsMax});
  sweep.read("measures", section.measures);
  ECHO_TRY(sweep_file.finish());
  return section;
}

Result<ConfigFile> load(const std::filesystem::path& path) {
  auto file = ConfigFile::load(path);
  if (!file) return as_user_error(std::move(file).error());
  return file;
}

// Returns the number in the file at a dotted key; absent if the file has none.
std::optional<double> number_in_file(ConfigFile& file, std::string_view key) {
  ConfigSection section = file.root();
  std::size_t dot = key.find('.');
  while (dot != std::string_view::npos) {
    if (dot == 0) return std::nullopt;
    section = section.section(key.substr(0, dot));
    key.remove_prefix(dot + 1);
    dot = key.find('.');
  }
  std::optional<double> value;
  if (!key.empty()) section.read(key, value);
  return value;
}

// Problems of the cells. Each is reported once, with the first cell that has it.
class Problems {
 public:
  // Rewrites the configuration parser's "--set KEY: reason" as "--over KEY=VALUE: reason": the user has given --over.
  void add(const std::string& problems, const SweepCell& cell) {
    for (std::size_t start = 0; start < problems.size();) {
      const std::size_t end = std::min(problems.find('\n', start), problems.size());
      std::string line = problems.substr(start, end - start);
      start = end + 1;
      for (const auto& [key, value] : cell.values)
        if (const std::string set_prefix = fmt::format("--set {}: ", key); line.starts_with(set_prefix))
          line = fmt::format("--over {}={}: {}", key, printable(value, 80), line.substr(set_prefix.size()));
      const auto is_same = [&](const Problem& problem) { return problem.line == line; };
      if (const auto it = std::find_if(problems_.begin(), problems_.end(), is_same); it != problems_.end())
        ++it->cell_count;
      else if (problems_.size() < kProblemsShown)
        problems_.push_back({.line = line, .first_cell = cell.name(), .cell_count = 1});
      else
        ++problems_left_out_;
    }
  }

  // Returns the problems as one error. A problem names its first cell, unless all `total_cells` cells have it.
  Status to_status(std::size_t total_cells) const {
    if (problems_.empty()) return ok();
    std::string text;
    for (const Problem& problem : problems_) {
      text += fmt::format("{}{}", text.empty() ? "" : "\n", problem.line);
      if (problem.cell_count >= total_cells) continue;
      const std::size_t more_cells = problem.cell_count - 1;
      text += fmt::format(" (cell {}{})", problem.first_cell,
                          more_cells > 0 ? fmt::format(" and {} more", more_cells) : "");
    }
    if (problems_left_out_ > 0) text += fmt::format("\nand {} more problems", problems_left_out_);
    return Error{Code::kInvalid, "", text};
  }

 private:
  struct Problem {
    std::string line, first_cell;
    std::size_t cell_count;
  };
  std::vector<Problem> problems_;
  std::size_t problems_left_out_ = 0;
};

std::string digest_of(SweepKind kind, const std::string& version, std::uint64_t seed, const std::string& config) {
  const std::string text =
      fmt::format("{}\n{}\n{}\n{}", kind == SweepKind::kReal ? "real" : "simulated", version, seed, config);
  return delta::digest_bytes(std::as_bytes(std::span(text))).hex();
}

// Loads the run file with the values of a cell, and adds a complete configuration for each seed.
class ConfigResolver {
 public:
  ConfigResolver(const SweepArguments& arguments, SweepKind kind) : arguments_(arguments), kind_(kind) {}

  Status add_runs(SweepCell& cell, std::uint32_t seeds) {
    std::uint64_t first_seed = 1;
    std::string scenario_yaml;
    if (kind_ == SweepKind::kReal) {
      ECHO_ASSIGN(const learner::RunConfig config, learner::load_run_config(arguments_.config, cell.values));
      first_seed = config.run.seed;
    } else {
      ECHO_ASSIGN(SimRun run, load_sim_run(ConfigFile::load(arguments_.config), cell.values));
      first_seed = run.scenario.seed;
      scenario_yaml = std::move(run.config.resolved_yaml);
    }
    for (std::uint32_t i = 0; i < seeds; ++i) {
      SweepRun run;
      run.seed = first_seed + i;
      if (kind_ == SweepKind::kSimulated) {
        run.config = scenario_yaml;  // the seed is an argument of the run's command
        run.digest = digest_of(kind_, arguments_.version, run.seed, run.config);
      } else {
        // A run's name and folder contain its digest, so the digest is computed without them.
        constexpr const char *kAnyName = "run", *kAnyFolder = "/";
        ECHO_ASSIGN(run.config, resolve_run(cell, run.seed, kAnyName, kAnyFolder));
        run.digest = digest_of(kind_, arguments_.version, run.seed, run.config);
        ECHO_ASSIGN(run.config, resolve_run(cell, run.seed, run.digest, arguments_.out / "cells"));
      }
      run.folder = arguments_.out / "cells" / run.digest;  // <run.folder>/<run.name> of the configuration
      cell.runs.push_back(std::move(run));
    }
    return ok();
  }

 private:
  Result<std::string> resolve_run(const SweepCell& cell, std::uint64_t seed, const std::string& name,
                                  const std::filesystem::path& folder) const {
    KeyValues values = cell.values;
    values.emplace_back("run.seed", std::to_string(seed));
    values.emplace_back("run.name", name);
    values.emplace_back("run.folder", folder.string());
    ECHO_ASSIGN(learner::RunConfig config, learner::load_run_config(arguments_.config, values));
    return std::move(config.resolved_yaml);
  }

  const SweepArguments& arguments_;
  const SweepKind kind_;
};

constexpr std::size_t kFieldBytesMax = 200;           // longest field name that --measure accepts
constexpr std::uint64_t kReportBytesMax = 256 << 20;  // 256 MiB

Status check(const SweepPlan& plan) {
  for (const std::string& key : plan.keys)
    if (std::find(std::begin(kKeysSetBySweep), std::end(kKeysSetBySweep), key) != std::end(kKeysSetBySweep))
      return fail(Code::kInvalid, "sweep",
                  "'{}' cannot be swept: the sweep sets it for every run; use --seeds N for N seeds", key);
  if (plan.cells.size() * plan.seeds > kSweepRunsMax)
    return fail(Code::kInvalid, "sweep", "expected at most {} runs, found {} cells with {} seeds each", kSweepRunsMax,
                plan.cells.size(), plan.seeds);
  for (const std::string& field : plan.measures)
    if (field.empty() || field.size() > kFieldBytesMax || !is_printable(field) ||
        field.find_first_of(",\"<>& \t") != std::string::npos)
      return fail(Code::kInvalid, "sweep",
                  "--measure: expected a field of the report such as learner.idle_fraction, found '{}'",
                  printable(field, 80));
  return ok();
}

}  // namespace

std::string SweepCell::name() const {
  std::string text;
  for (const auto& [key, value] : values)
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", short_key(key), printable(value, 60));
  return text.empty() ? "as it is" : text;
}

std::optional<std::string> SweepCell::value(const std::string& key) const {
  const auto it = std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.first == key; });
  return it == values.end() ? std::nullopt : std::optional(it->second);
}

std::filesystem::path default_sweep_folder(const std::filesystem::path& config) {
  const std::filesystem::path preferred = std::filesystem::absolute("sweeps") / config.stem();
  std::filesystem::path folder = preferred;
  for (int suffix = 2;; ++suffix) {
    const auto source = read_file(folder / kSweepSourceFile);
    if (!source || *source == source_file_content(config)) return folder.lexically_normal();
    folder = fmt::format("{}-{}", preferred.string(), suffix);
  }
}

Status write_sweep_source(const SweepPlan& plan) {
  std::error_code ignored;
  if (std::filesystem::exists(plan.out / kSweepSourceFile, ignored)) return ok();
  return write_file_atomic(plan.out / kSweepSourceFile, source_file_content(plan.config));
}

Result<SweepPlan> plan_sweep(const SweepArguments& arguments) {
  ECHO_ASSIGN(ConfigFile file, load(arguments.config));
  ECHO_ASSIGN(SweepSection section, take_sweep_section(file, arguments.config));
  std::vector<SweepAxis> axes;
  for (const std::string& text : arguments.over) {
    ECHO_ASSIGN(SweepAxis axis, parse_over(text));
    const std::string& key = axis.points.front().front().first;
    const auto sweeps_only_key = [&](const SweepAxis& other) {
      return !other.points.empty() && other.points.front().size() == 1 && other.points.front().front().first == key;
    };
    std::erase_if(section.axes, sweeps_only_key);  // --over replaces the axis of the same key in the file
    axes.push_back(std::move(axis));
  }
  axes.insert(axes.begin(), section.axes.begin(), section.axes.end());
  if (axes.empty() && arguments.seeds == 0 && section.seeds == 1)
    return fail(Code::kInvalid, "sweep",
                "nothing to sweep: give --over KEY=V1,V2 or --seeds N, or add a section `sweep:` to {}",
                arguments.config.string());

  SweepPlan plan;
  plan.config = arguments.config;
  plan.out = arguments.out;
  plan.keys = swept_keys(axes);
  plan.seeds = arguments.seeds > 0 ? arguments.seeds : section.seeds;
  plan.measures = section.measures;
  plan.measures.insert(plan.measures.end(), arguments.measures.begin(), arguments.measures.end());
  plan.kind = arguments.kind.value_or(file.root().has("simulation") ? SweepKind::kSimulated : SweepKind::kReal);
  ECHO_ASSIGN(auto cells, expand(axes, [&](const std::string& key) { return number_in_file(file, key); }));
  for (GridCell& cell : cells)
    plan.cells.push_back({.values = std::move(cell.values), .written = std::move(cell.written), .runs = {}});
  ECHO_TRY(check(plan));

  ConfigResolver config_resolver(arguments, plan.kind);
  Problems problems;
  for (SweepCell& cell : plan.cells)
    if (const Status status = config_resolver.add_runs(cell, plan.seeds); !status)
      problems.add(status.error().detail, cell);
  ECHO_TRY(problems.to_status(plan.cells.size()));
  return plan;
}

bool is_complete(SweepKind kind, const std::filesystem::path& folder) {
  const auto text = read_file(folder / "report.json", kReportBytesMax);
  if (!text) return false;
  const json report = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object() || !report.contains("schema_version")) return false;
  const auto ended = report.find("ended");
  return kind == SweepKind::kSimulated || ended == report.end() || *ended == "completed";
}

}  // namespace echoline::study
