// A rental plan: which offers to rent for a run, why each other one is not rented, what it costs and how stale it gets.
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

struct PlanRequest {
  LearnerPace pace;          // R, kappa, T
  int staleness_budget = 2;  // S
  int lookahead = 0;         // L, batches of work handed out beyond the one in training
  // The replay buffer's rule: oldest a rollout can be when it is trained on, of a staleness_lag(). Absent: S. A plan
  // that was read back has none.
  std::function<int(int lag)> staleness_worst;
  double group_size = 1;                       // G, rollouts that one worker generates as a unit
  std::optional<Duration> run_time;            // of all steps
  std::optional<double> learner_usd_per_hour;  // the learner's own machine; absent: not stated

  Bytes delta_bytes;   // what one publication carries
  Bytes full_bytes;    // a snapshot: what a worker receives once, when it joins
  BitRate learner_up;  // B
  Bytes chunk;         // none: as is best for the payload and the fleet
  PathSettings paths;
  double quorum = 0.9;  // q of T_b
  chains::TopologyPolicy topology = chains::TopologyPolicy::kTrees;

  // Which offers are considered, how they are paid for and how many are rented. Not considered are offers of other
  // providers, offers below reliability_min, duration_min or up_min, and offers that state that they end before
  // `run_time` is over.
  FleetSettings fleet;
  std::optional<Bytes> gpu_memory_min;  // of one GPU
  std::vector<std::string> keep;  // ids of offers that are rented whatever they cost: what is left of an earlier plan
};

// $/h of one offer under the plan. A part is absent where the offer does not state its price and none is assumed.
struct OfferCost {
  std::optional<double> gpu, storage, bandwidth;
  std::optional<double> usd_per_hour() const {
    return gpu && storage && bandwidth ? std::optional(*gpu + *storage + *bandwidth) : std::nullopt;
  }
};

struct PlanRow {
  Offer offer;
  int rank = 0;  // 1 = least $ per 1k rollouts among eligible offers; 0: not eligible
  bool chosen = false;
  std::optional<WorkerId> worker;         // of a chosen offer, 1..n
  std::string reason;                     // why it is (not) rented
  std::vector<std::string> assumed;       // what it does not state and the plan counts as assumed: keys of fleet.assume
  OfferCost cost;                         // of a chosen offer with its place in the topology, else forwarding once
  std::optional<double> losses_per_hour;  // of a chosen offer: how often it will have to be replaced; absent: not known
  double cumulative_rollouts_per_s = 0;   // of the chosen rows up to and including this one; 0 when not chosen

  // Absent where the price or the throughput is not known.
  std::optional<double> usd_per_1k_rollouts() const;
};

// Of dollars, low and high: what the closed loop would come to rent if the workers were faster or slower than
// predicted, by as much as they may be (Offer::uncertainty), bids rose to the price on demand, and as few or as many
// machines were lost as may be.
struct Spend {
  double low = 0, expected = 0, high = 0;
};

// What it costs over the run that machines are lost and replaced: each replacement boots, is paid for, and does
// nothing.
struct Replacing {
  double losses = 0;  // expected
  Spend usd;
};

// Where the offers come from.
struct Market {
  std::string source;                     // "offers.json", the URL of a service
  std::string format;                     // OfferList::format
  std::optional<double> recorded_unix_s;  // when they were true
};

struct Plan {
  PlanRequest request;
  Market market;
  CapacityTarget target;
  Duration broadcast_time{};       // T_b the target was computed with
  Duration broadcast_time_last{};  // until every worker holds the payload
  Duration broadcast_lower_bound{};
  bool settled = true;               // set, topology and T_b agree with one another
  std::vector<PlanRow> rows;         // every offer: chosen by rank, then others by rank, then not eligible
  std::uint64_t rows_left_out = 0;   // of a plan that was read back: rows that were not written
  std::vector<std::string> standby;  // offer ids to activate next, best first
  Bytes chunk;                       // with which T_b is predicted
  chains::Topology topology;         // over the chosen rows' workers
  double rollouts_per_s = 0;         // of the chosen
  Spend usd_per_hour;                // of the fleet
  double usd_joining = 0;            // once: every chosen worker receives the snapshot
  Replacing replacing;               // over the run; nothing without a run time
  std::string method;                // "greedy" | "exact": which search gave the set
  // What the search compared, with every worker forwarding one copy of each publication: the set that was taken, the
  // cheapest prefix by price per rollout, the fractional lower bound and the true optimum.
  double set_usd_per_hour = 0;
  double greedy_usd_per_hour = 0;
  double lp_bound_usd_per_hour = 0;
  std::optional<double> exact_usd_per_hour;  // when at most kExactPoolMax offers are eligible
  int staleness_needed = 0;                  // least budget under which the learner never waits
  int staleness_worst = 0;                   // oldest a rollout can be when it is trained on
  std::vector<std::string> notes;            // what the reader should know, one sentence each

  std::vector<const PlanRow*> chosen() const;
  Spend rollouts_range() const;  // of `rollouts_per_s`, if all of them were slower or faster than predicted
  const PlanRow* row_of(std::string_view offer) const;  // null for an unknown id
  // Fleet over `run_time`, joining and replacing included; with the learner where its price is stated. Absent without a
  // run time.
  std::optional<Spend> usd_fleet() const;
  std::optional<Spend> usd_run() const;
  // Fields as in docs/plan.md. Unknown costs are null. At most kRowsWritten offers: the chosen, then the best of the
  // others.
  nlohmann::json to_json() const;
  // What to_json() wrote; kInvalid with the field that is missing or wrong.
  static Result<Plan> from_json(const nlohmann::json& json);
  // For people: header lines, the rented offers with cumulative rollouts/s, the first of the others with the reason.
  // ASCII; the tables take at most 80 columns. `now_unix_s`: to tell the age of the offers. `columns`, from 40 on: of
  // the screen; lines are folded and tables leave columns out.
  std::string to_table(std::optional<double> now_unix_s = {}, std::optional<std::size_t> columns = {}) const;
  // Who would send to whom, for Graphviz.
  std::string to_dot() const;
};

inline constexpr std::size_t kRowsWritten = 2000;

// Reads a plan.json; kNotFound or kIo when that fails, kInvalid when it is not a plan of this version. `document`
// receives all that stands in it, of which the plan is a part.
Result<Plan> load_plan(const std::filesystem::path& path, nlohmann::json* document = nullptr);

// Why an offer cannot be rented under a request, whatever else is rented; absent where it can.
std::optional<std::string> defect_of(const PlanRequest& request, const Offer& offer);

// Solves set -> topology -> T_b -> M* -> set to a fixed point. Where that does not settle it keeps the smallest
// T_b that its own set meets, says so in `notes` and clears `settled`. Errors: kInvalid for a request out of range;
// kInfeasible, with what to change, when no T_b, pool, budget, worker limit or staleness budget allows it.
Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers);

}  // namespace echoline::provisioner
