// The report of a run (report.json), from its measurements and the fleet's last state.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/process_memory.hpp"
#include "learner/attendance.hpp"
#include "learner/regrading.hpp"
#include "learner/run_config.hpp"
#include "learner/run_figures.hpp"
#include "learner/scorer.hpp"
#include "overlay/types.hpp"
#include "provisioner/fleet_driver.hpp"
#include "provisioner/plan.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::learner {

// A worker at the end of the run, or when it was lost.
struct WorkerEntry {
  WorkerId id;
  std::string offer;
  std::optional<double> price_usd_per_hour;         // machine and disk; absent: not stated
  std::uint64_t rollouts = 0;                       // accepted
  std::uint64_t bytes_in = 0, bytes_forwarded = 0;  // of policies: received, and sent on to other workers
  Duration delay{};                                 // one way from the learner; zero: unknown
  std::uint32_t region = 0;                         // index in network.regions, and its name; "" without regions
  std::string region_name;
  std::optional<double> install_seconds_mean;  // reported by the worker: from a complete policy until it is in place
  std::uint64_t memory_bytes = 0, heap_bytes = 0;  // reported by the worker; 0: not reported
  std::optional<Version> version;                  // the newest that it acknowledged, and its digest of that policy
  overlay::Digest digest{};
  Presence presence = Presence::kPresent;
  bool quarantined = false;          // forwarded bad chunks, so it must not forward any more
  std::uint64_t trouble_events = 0;  // errors of the worker that the overlay reported
};

struct ReportInput {
  const RunConfig* config = nullptr;
  const provisioner::Plan* plan = nullptr;
  RunFigures figures;  // from metrics.jsonl, of all processes of the run
  std::vector<WorkerEntry> workers;
  nlohmann::json nodes = nlohmann::json::array();  // of the trainer, as in status.json
  provisioner::FleetSummary fleet;
  double wall_seconds = 0;            // of all processes of the run, as RunClock counts
  std::optional<double> learner_usd;  // absent: the price of its machine is unknown
  Version version;                    // the learner's policy at the end
  overlay::Digest digest{};
  std::uint64_t bytes_sent = 0;  // by the learner, chunks and control
  std::uint64_t steps_done = 0;
  std::string topology;
  std::string end_reason;                                 // "completed", or the reason for an early end
  nlohmann::json rejected = nlohmann::json::object();     // trajectories or submissions by reason
  std::map<std::string, std::uint64_t> groups_set_aside;  // by reason
  replay_buffer::LimitedStepCounter limited_steps;        // steps in which a staleness limit delayed workers
  ProcessMemory memory;                                   // of the learner's process
  RegradingCounts regrading;
  ScorerCounts scoring;
};

// The value below which a fraction q of the values lies (nearest rank); null without values.
nlohmann::json quantile(std::vector<double> values, double q);
// The same for a histogram: value -> count.
nlohmann::json quantile(const std::map<std::uint64_t, std::uint64_t>& histogram, double q);

// A worker's entry in status.json. `rollouts_per_s`: its measured rate while it generates. `rollouts_per_s_expected`:
// its offer's rate.
nlohmann::json worker_status(const WorkerEntry& worker, std::optional<double> rollouts_per_s,
                             std::optional<double> rollouts_per_s_expected, bool receives_from_learner);

// Fields as documented in docs/report.md; seconds, bytes and dollars unless a name says otherwise.
nlohmann::json make_report(const ReportInput& input);

// Says how often the staleness budget (S) and the lookahead delayed workers, from a report's `staleness`: "S bound in
// 12 steps, the lookahead of 2 in 3". Empty if neither did.
std::string bound_text(const nlohmann::json& staleness);

// The report as a page of text, at most 100 columns.
std::string report_text(const nlohmann::json& report);

}  // namespace echoline::learner
