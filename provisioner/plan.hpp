// A rental plan: which offers to rent for a run, why each other one is not rented, what it costs and how stale it gets.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "chains/topology.hpp"
#include "provisioner/capacity.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

struct PlanRequest {
  LearnerPace pace;          // R, kappa, T
  int staleness_budget = 2;  // S
  int lookahead = 0;         // L, batches of work handed out beyond the one in training
  // The replay buffer's rule: oldest a rollout can be when it is trained on, of a staleness_lag(). Absent: S.
  std::function<int(int lag)> staleness_worst;
  double group_size = 1;     // G, rollouts that one worker generates as a unit
  double headroom = 0.10;
  std::optional<Duration> run_time;            // of all steps
  std::optional<double> learner_usd_per_hour;  // the learner's own machine; absent: not stated

  Bytes delta_bytes;                  // what one publication carries
  Bytes full_bytes;                   // a snapshot: what a worker receives once, when it joins
  BitRate learner_up;                 // B
  std::optional<BitRate> worker_cap;  // most a worker may send or receive; absent: what its offer states
  Bytes chunk{256 * 1024};
  Duration delay{};              // one way, between any two neighbours
  Duration install_time{};       // part of T_b that is not transfer: waiting for a safe point, applying
  double active_fraction = 0.9;  // q of T_b
  chains::TopologyPolicy topology = chains::TopologyPolicy::kTrees;

  std::size_t workers_max = 64;
  std::optional<double> budget_usd_per_hour;  // of the fleet
  std::string provider;                       // who starts the workers; offers of others are not considered; "": any
  std::optional<Bytes> gpu_memory_min;        // of one GPU; an offer that does not state its memory is considered
  // Offers below these are not considered; an offer that does not state the value is not either. Offers that state that
  // they end before `run_time` is over are not considered in any case.
  std::optional<double> reliability_min;
  std::optional<Duration> duration_min;
  std::optional<BitRate> up_min;
};

// $/h of one offer under the plan. An absent part is not stated by the offer; `usd_per_hour_high` counts it at the
// dearest price any offer of the pool states, `usd_per_hour_low` at nothing.
struct OfferCost {
  double gpu = 0;
  std::optional<double> storage;
  std::optional<double> bandwidth;
  double usd_per_hour_low = 0;
  std::optional<double> usd_per_hour_high;  // absent where no offer at all states such a price
  double usd_per_hour_compared = 0;         // what offers are compared by: the high one, or what is known of it
  double usd_per_1k_rollouts = 0;           // of that
};

struct PlanRow {
  Offer offer;
  int rank = 0;  // 1 = least $ per 1k rollouts among eligible offers; 0: not eligible
  bool chosen = false;
  std::optional<WorkerId> worker;        // of a chosen offer, 1..n
  std::string reason;                    // why it is (not) rented
  OfferCost cost;                        // of a chosen offer with its place in the topology, else forwarding once
  double cumulative_rollouts_per_s = 0;  // of the chosen rows up to and including this one; 0 when not chosen
};

struct Plan {
  PlanRequest request;
  CapacityTarget target;
  Duration broadcast_time{};       // T_b the target was computed with
  Duration broadcast_time_last{};  // until every worker holds the payload
  Duration broadcast_lower_bound{};
  bool settled = true;               // set, topology and T_b agree with one another
  std::vector<PlanRow> rows;         // every offer: chosen by rank, then others by rank, then not eligible
  std::vector<std::string> standby;  // offer ids to activate next, best first
  chains::Topology topology;         // over the chosen rows' workers
  double rollouts_per_s = 0;         // of the chosen
  // Of the fleet; the high ones are absent where a price is known of nobody.
  double usd_per_hour_low = 0;
  std::optional<double> usd_per_hour_high;
  double usd_joining_low = 0;  // once: every chosen worker receives the snapshot
  std::optional<double> usd_joining_high;
  std::string method;  // "greedy" | "exact": which search gave the set
  // What the search compared, with every worker forwarding one copy of each publication: the set that was taken,
  // the greedy one, the fractional lower bound and the true optimum.
  double set_usd_per_hour = 0;
  double greedy_usd_per_hour = 0;
  double lp_bound_usd_per_hour = 0;
  std::optional<double> exact_usd_per_hour;  // when at most kExactPoolMax offers are eligible
  int staleness_needed = 0;                  // least budget under which the learner never waits
  int staleness_worst = 0;                   // oldest a rollout can be when it is trained on
  std::vector<std::string> notes;            // what the reader should know, one sentence each

  std::vector<const PlanRow*> chosen() const;
  // Fleet and learner over `run_time`, joining included; absent where a price is not known.
  std::optional<double> usd_run_low() const;
  std::optional<double> usd_run_high() const;
  // Fields as in docs/plan.md. Unknown costs are null.
  nlohmann::json to_json() const;
  // For people: header lines, the rented offers with cumulative rollouts/s, the first of the others with the reason.
  // ASCII; the tables take at most 80 columns.
  std::string to_table() const;
};

// Solves set -> topology -> T_b -> M* -> set to a fixed point. Where that does not settle it keeps the smallest
// T_b that its own set meets, says so in `notes` and clears `settled`. Errors: kInvalid for a request out of range;
// kInfeasible, with what to change, when no T_b, pool, budget, worker limit or staleness budget allows it.
Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers);

}  // namespace echoline::provisioner
