// A rental plan: which offers to rent for a run, why each other one is not rented, what it costs and how stale it gets.
#pragma once
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
  double headroom = 0.10;

  Bytes delta_bytes;                  // what one publication carries
  Bytes full_bytes;                   // a snapshot: what a worker receives once, when it joins
  BitRate learner_up;                 // B
  std::optional<BitRate> worker_cap;  // most a worker may send or receive; absent: what its offer states
  Bytes chunk{256 * 1024};
  Duration delay{};              // one way, between any two neighbours
  Duration install_time{};       // part of T_b that is not transfer: waiting for a safe point, applying
  double active_fraction = 0.9;  // q of T_b
  chains::TopologyPolicy topology = chains::TopologyPolicy::kEcho2;

  std::size_t workers_max = 64;
  std::optional<double> budget_usd_per_hour;
  // Offers below these are not considered; an offer that does not state the value is not either.
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
  double usd_per_hour_high = 0;    // what offers are compared by
  double usd_per_1k_rollouts = 0;  // of usd_per_hour_high
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
  double usd_per_hour_low = 0;
  double usd_per_hour_high = 0;
  double usd_joining_low = 0;  // once: every chosen worker receives the snapshot
  double usd_joining_high = 0;
  std::string method;  // "greedy" | "exact": which search gave the set
  // What the search compared, with every worker forwarding one copy of each publication: the set that was taken,
  // the greedy one, the fractional lower bound and the true optimum.
  double set_usd_per_hour = 0;
  double greedy_usd_per_hour = 0;
  double lp_bound_usd_per_hour = 0;
  std::optional<double> exact_usd_per_hour;  // when at most kExactPoolMax offers are eligible
  int staleness_worst = 0;                   // with the chosen capacity
  int staleness_bound = 0;                   // with any fleet that meets M*
  std::vector<std::string> notes;            // what the reader should know, one sentence each

  std::vector<const PlanRow*> chosen() const;
  // {"schema_version":1, ...}: header, totals, offers, standby, topology. Unknown costs are null.
  nlohmann::json to_json() const;
  // For people: header lines, the rented offers with cumulative rollouts/s, the others with the reason. ASCII; the
  // tables take at most 132 columns.
  std::string to_table() const;
};

// Solves set -> topology -> T_b -> M* -> set to a fixed point. Where that does not settle it keeps the smallest
// T_b that its own set meets, says so in `notes` and clears `settled`. Errors: kInvalid for a request out of range;
// kInfeasible, with what to change, when no T_b, pool, budget, worker limit or staleness budget allows it.
Result<Plan> make_plan(const PlanRequest& request, std::span<const Offer> offers);

}  // namespace echoline::provisioner
