// The report of a simulated run: the same fields as a real one (docs/report.md), with the figures of the simulation
// under `simulation`.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "study/sim_run_config.hpp"

namespace echoline::study {

inline constexpr std::size_t kMetricRowsMax = 2000;
inline constexpr std::size_t kWorkersListed = 1000;

// Rows of metrics.jsonl in order of time; `unix_s` counts from the beginning of the run.
std::vector<nlohmann::json> sim_run_metrics(const sim::RunResult& result);
// The share of its time that the learner waited, without the first step, which also waits for the first policy. Absent
// without a second step.
std::optional<double> idle_fraction_after_first_step(const sim::RunResult& result);
nlohmann::json sim_run_report(const SimRun& run, const sim::RunResult& result,
                              const std::vector<nlohmann::json>& metrics);
// Keeps at most kMetricRowsMax rows, so that pages and files stay small: the rows of every n-th step, and of its
// publication and broadcast. `steps`: number of the run's steps.
std::vector<nlohmann::json> thin_out_metrics(std::vector<nlohmann::json> metrics, std::uint64_t steps);
// The report as text of at most 60 columns.
std::string sim_run_table(const nlohmann::json& report);

}  // namespace echoline::study
