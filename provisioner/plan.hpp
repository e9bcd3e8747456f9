// A rental plan: the offers to rent for a run, the reason against each other offer, the cost and the staleness.
#pragma once
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "chains/topology.hpp"
#include "provisioner/capacity.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/regions.hpp"
#include "provisioner/settings.hpp"

namespace echoline::provisioner {

// The properties of a fleet from which the learner's idle time is predicted.
struct FleetPace {
  struct Worker {
    double rollouts_per_s = 0;
    Duration policy_arrival{};  // from the end of a step until the worker has received its policy
  };
  std::vector<Worker> workers;  // at least one
  Duration links_busy{};        // how long one publication occupies the learner's links
  // A worker holds at least `groups_at_once` groups. A fast worker holds more: the group that it generates now, and all
  // groups that it can complete within `work_ahead`.
  std::uint32_t groups_at_once = 2;
  Duration work_ahead{};
};

struct PlanRequest {
  LearnerPace pace;  // R: rollouts per step; kappa: steps per publication; T: time of a step
  // S: the highest allowed age of a rollout's policy in training, in learner steps.
  int staleness_budget = 2;
  int lookahead = 0;  // batches of work that workers may hold, besides the batch in training
  // The replay buffer's rule: returns the highest age of a rollout in training. `lag`: the steps that pass while slow
  // workers wait for a policy or finish a group (staleness_lag()). Empty, as in a plan that is read from a file: the
  // highest age is S.
  std::function<int(int lag)> staleness_worst;
  // Returns the share of its time that the learner waits with this fleet, by the replay buffer's rules. Empty: the
  // share is not predicted.
  std::function<double(const PlanRequest&, const FleetPace&)> predict_idle;
  double group_size = 1;                       // rollouts that a worker generates as a unit; a whole number
  std::optional<Duration> run_time;            // for all steps
  std::optional<double> learner_usd_per_hour;  // price of the learner's own machine; absent: not stated

  Bytes delta_bytes;   // size of one publication
  Bytes full_bytes;    // size of a snapshot, which a worker receives once when it joins
  BitRate learner_up;  // the learner's uplink
  Bytes chunk;         // 0: the best size for the payload and the fleet
  PathSettings paths;
  double quorum = 0.9;  // T_b, the time of a broadcast, ends when this share of the workers has the publication
  chains::TopologyPolicy topology = chains::TopologyPolicy::kTrees;

  // Which offers are considered, how they are paid for and how many are rented. Offers of other providers, offers below
  // reliability_min, duration_min or up_min, and offers that state an end before `run_time` is over are not considered.
  FleetSettings fleet;
  std::optional<Bytes> gpu_memory_min;   // per GPU
  std::optional<Bytes> host_memory_min;  // of an offer that states its host memory
  std::optional<double> cuda_min;        // the CUDA version that the machine's driver must support
  std::vector<std::string> keep;         // offers of an earlier plan that are rented at any cost
  // Share of the target that is rented. It is 1 except in the smaller and larger plans that plan_study makes to compare
  // them with the run's plan.
  double capacity_share = 1;

  CapacityTerms capacity_terms() const {
    return {.rule = fleet.capacity_rule, .staleness_budget = staleness_budget, .headroom = fleet.headroom};
  }
  PublicationTimes publication_times(Duration broadcast_time) const {
    return {.broadcast = broadcast_time, .install = fleet.install_time_expected};
  }
};

// The cost of one offer under the plan, per hour. A part is absent if its price is neither stated nor assumed.
struct OfferCost {
  std::optional<double> gpu, storage, bandwidth;
  std::optional<double> usd_per_hour() const {
    return gpu && storage && bandwidth ? std::optional(*gpu + *storage + *bandwidth) : std::nullopt;
  }
};

struct PlanRow {
  Offer offer;
  int rank = 0;  // 1: least $ per 1k rollouts among eligible offers; 0: not eligible
  bool chosen = false;
  std::optional<WorkerId> worker;    // only if chosen: 1..n
  std::string reason;                // why it is rented, or not
  std::vector<std::string> assumed;  // assumptions that replaced unstated values: keys of fleet.assume
  OfferCost cost;  // if chosen: at its place in the topology; otherwise: if it forwarded each publication once
  std::optional<double> losses_per_hour;  // expected replacements of a chosen offer; absent: unknown
  double cumulative_rollouts_per_s = 0;   // sum over the chosen rows up to and including this one; 0 when not chosen

  // Absent if the price or the throughput is unknown.
  std::optional<double> usd_per_1k_rollouts() const;
};

// An expected value with bounds. The bounds of dollars are those of the fleet that a run would rent as it adapts to
// measurements. They assume workers that are faster or slower than predicted by Offer::uncertainty, bids that rise to
// the price on demand, and the fewest or most machine losses.
struct Estimate {
  double low = 0, expected = 0, high = 0;
};

// The cost over the run of losing and replacing machines. Each replacement boots, is paid for and does nothing
// meanwhile.
struct ReplacementCost {
  double losses = 0;  // expected number
  Estimate usd;
};

// The source of the offers.
struct Market {
  std::string source;                     // "offers.json", the URL of a service
  std::string format;                     // OfferList::format
  std::optional<double> recorded_unix_s;  // when they were recorded
};

struct Plan {
  PlanRequest request;
  Market market;  // set by the caller of make_plan()
  CapacityTarget target;
  Duration broadcast_time{};         // T_b with which the target was computed
  Duration broadcast_time_last{};    // until every worker has the publication
  Duration broadcast_lower_bound{};  // no topology has a shorter T_b
  bool converged = true;             // the set's topology has the T_b for which the set was chosen
  std::vector<PlanRow> rows;         // all offers: first the chosen ones by rank, ineligible ones last
  std::uint64_t rows_left_out = 0;   // offers that the plan file lacks, if the plan was read from a file
  std::vector<std::string> standby;  // offers to rent next, best first
  Bytes chunk;                       // chunk size of the predicted T_b
  chains::Topology topology;         // connects the chosen rows' workers
  double rollouts_per_s = 0;         // sum over the chosen offers
  Estimate usd_per_hour;             // cost of the whole fleet
  double usd_joining = 0;            // cost of the snapshots that all chosen workers receive once
  ReplacementCost replacing;         // over the run; empty without a run time
  std::string method;                // "exact": no set is cheaper; "bounded": `lp_bound_usd_per_hour` limits the excess
  // Costs that the search compared, as if every worker forwarded each publication once.
  double chosen_usd_per_hour = 0;            // of the chosen set
  double greedy_usd_per_hour = 0;            // of AllocationSearch's prefix, the simplest set that reaches the target
  double lp_bound_usd_per_hour = 0;          // no set within the limits costs less
  std::optional<double> exact_usd_per_hour;  // of the cheapest set, if it is known
  int staleness_needed = 0;                  // least budget with which the learner never waits
  int staleness_worst = 0;                   // highest age of a rollout in training
  std::optional<double> idle_fraction;       // share of its time that the learner waits; absent: not predicted
  std::vector<std::string> notes;            // remarks for the reader, one sentence each

  std::vector<const PlanRow*> chosen() const;
  // `rollouts_per_s`, with bounds for a fleet whose workers are all slower or all faster than predicted.
  Estimate rollouts_per_s_estimate() const;
  const PlanRow* row_of(std::string_view offer) const;  // null for an unknown id
  // Cost of the fleet over `run_time`, including joining and replacing; usd_run() adds the learner if its price is
  // stated. Absent without a run time.
  std::optional<Estimate> usd_fleet() const;
  std::optional<Estimate> usd_run() const;
  // Expected cost of the run if each step takes longer by the predicted waiting. Absent without a run time or
  // prediction.
  std::optional<double> usd_run_with_waiting() const;
  // Fields as in docs/plan.md; unknown costs are null. Writes at most kRowsWritten offers: the chosen ones, then the
  // best others.
  nlohmann::json to_json() const;
  // Reads the output of to_json(); kInvalid with the missing or wrong field.
  static Result<Plan> from_json(const nlohmann::json& json);
  // Text for users: header lines, the rented offers with cumulative rollouts/s, and the first other offers with
  // reasons. ASCII. `now_unix_s`: for the age of the offers. `columns`, at least 40: the screen's width, at which
  // lines are folded; tables leave columns out and take at most 80.
  std::string to_table(std::optional<double> now_unix_s = {}, std::optional<std::size_t> columns = {}) const;
  // The topology for Graphviz.
  std::string to_dot() const;
};

inline constexpr std::size_t kRowsWritten = 2000;

// Reads a plan.json. kNotFound or kIo if the file cannot be read, kInvalid if it is not a plan of this version.
// `document` receives the whole JSON value.
Result<Plan> load_plan(const std::filesystem::path& path, nlohmann::json* document = nullptr);

// Why an offer cannot be rented under a request, whatever else is rented; absent if it can.
std::optional<std::string> ineligibility_reason(const PlanRequest& request, const Offer& offer);

// Chooses a set for the capacity M* (provisioner/capacity.hpp), which depends on the set's own T_b. So the search
// repeats set -> topology -> T_b -> M* -> set until nothing changes. If that does not converge, it raises the assumed
// T_b until the set for it is no slower, adds a note and clears `converged`. kInvalid for a request out of range;
// kInfeasible, with remedies, if no T_b, pool, budget, worker limit or staleness budget allows a plan.
Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers);

}  // namespace echoline::provisioner
