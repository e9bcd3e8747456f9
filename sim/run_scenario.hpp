// Simulates a whole training run. The real cores decide about rentals, leases (groups of rollouts lent to workers) and
// training. Workers, market, learner steps and faults are simulated. docs/simulation.md explains the abstractions.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/fleet_core.hpp"
#include "provisioner/plan.hpp"
#include "replay_buffer/rules.hpp"
#include "sim/draws.hpp"

namespace echoline::sim {

// Treatment of a worker's groups in progress when a new policy arrives: they continue with the new one, are finished
// with the old one before the new one is installed, or are given back.
enum class OnNewPolicy { kContinue, kFinish, kAbort };
// Which offers are rented. With kRandom, the fleet core sees random prices, so the cheapest offers are random ones.
enum class OfferChoice { kCheapest, kRandom };
inline constexpr double kRandomPriceSpread = 1000;  // highest random price / lowest one, per rollout/s
enum class FleetSize { kByNeed, kPlanned };  // kPlanned: lost machines are replaced, and no other is rented or released
enum class LeaseShares { kBySpeed, kEqual };  // a worker's share of each batch
enum class PublicationForm { kDelta, kSnapshot };
// A group is leased only if its result will be fresh enough for training, or in any case.
enum class LeaseRule { kInTime, kAnyAge };

// An offer as the market states it, with its true properties.
struct RunOffer {
  provisioner::Offer offer;
  std::uint32_t region = 0;  // index in RunScenario::regions
  double rate_share = 1;     // true throughput, as a share of the promised one
};

// The loss of many machines at one time.
struct Preemption {
  Duration at{};                        // after the run's start
  double share = 1;                     // share of the working machines that are lost
  std::optional<std::uint32_t> region;  // only machines there; absent: in all regions
};

struct RunChurn {
  double per_hour = 0;                             // losses per working machine
  double announced = 0;                            // share of the losses that the provider announces
  Duration notice = std::chrono::seconds(30);      // from the announcement to the loss
  Duration returns_after = std::chrono::hours(1);  // time until a lost machine is offered again
  std::vector<Preemption> preemptions;             // in order of time
};

// Machines that become slow at one time without being lost.
struct Slowdown {
  Duration at{};                                   // after the run's start
  double share = 1;                                // share of the working machines that become slow
  double token_rate_left = 1, link_rate_left = 1;  // remaining share of the tokens/s, and of the rate of both links
  std::optional<Duration> lasts;                   // absent: for good
  std::optional<std::uint32_t> region;             // absent: all
};

struct RunFaults {
  double never_joins = 0;           // share of the machines that cost but never join
  double refused = 0;               // share of the attempts to rent that fail
  double hangs_per_hour = 0;        // per worker: it falls silent but still costs
  std::vector<Slowdown> slowdowns;  // in order of time
};

struct RunScenario {
  std::uint64_t seed = 1;
  // The planner's input: rollouts per step, publishing interval, step time, staleness budget, sizes, links, topology,
  // prices and budgets. The fleet core's rules follow from it.
  provisioner::PlanRequest request;
  std::vector<RunOffer> offers;

  replay_buffer::Pacing pacing;  // steps_total is required
  replay_buffer::LeaseLength lease;
  OnNewPolicy on_new_policy = OnNewPolicy::kContinue;
  // Tokens of a response: from `token_histogram` if it is set, else `tokens`; at most lease.tokens_max.
  Lognormal tokens;
  std::optional<Histogram> token_histogram;
  std::uint32_t groups_at_once = 2;  // groups that a worker holds at a time, including the one in progress
  // A worker holds the group in progress and all that it completes in this time, if they are more than groups_at_once.
  Duration work_ahead{};
  std::optional<double> sequence_tokens_per_s;  // most tokens per second of a single response

  std::vector<double> step_seconds;      // of successive learner steps, repeated; empty: step_time
  Duration step_time{};                  // of the learner, without waiting; the plan uses request.pace
  std::optional<Duration> install_time;  // on a worker; absent: as planned, request.fleet.install_time_expected
  double step_s_per_token = 0;           // added for each token trained on
  Duration encode_time{};       // from the end of a step until its policy can be sent; the next step runs meanwhile
  Duration acknowledge_time{};  // from a worker's installation until the learner knows of it

  double wire_overhead = 0;  // bytes of headers and encryption per payload byte; plans and lower bounds ignore them
  std::vector<Bytes> delta_bytes;       // of successive publications; the last value repeats
  std::optional<Bytes> snapshot_bytes;  // of a whole policy as it is sent; absent: as planned, request.full_bytes
  PublicationForm publication_form = PublicationForm::kDelta;
  OfferChoice offer_choice = OfferChoice::kCheapest;
  FleetSize fleet_size = FleetSize::kByNeed;
  LeaseShares lease_shares = LeaseShares::kBySpeed;
  LeaseRule lease_rule = LeaseRule::kInTime;

  Lognormal boot_s{30, 30};  // from a machine's request until its worker connects
  Duration heartbeat_timeout = std::chrono::seconds(3);

  std::vector<std::string> regions{""};  // their names
  RunChurn churn;
  RunFaults faults;
  Duration time_max = std::chrono::hours(24 * 365);  // of virtual time; the run then ends
};

// A row of the report for each learner step.
struct SimStep {
  std::uint64_t step = 0;                            // counted from 1
  double at_s = 0, wait_s = 0, train_s = 0;          // its end; waiting for its batch; training
  std::map<std::uint64_t, std::uint64_t> staleness;  // rollouts trained on, by age in learner steps
  std::uint64_t tokens = 0, mixed_version_rollouts = 0;
  double tokens_mean = 0;
  std::size_t working = 0, joining = 0;      // machines
  double rollouts_per_s = 0;                 // promised by the working machines
  double target_rollouts_per_s = 0;          // throughput that the fleet core wants
  std::uint64_t waiting = 0, in_flight = 0;  // rollouts in the buffer, and leased
  double usd = 0, usd_per_hour = 0;          // spent so far; current rate, with the learner
};

struct SimPublication {
  std::uint64_t version = 0;
  double at_s = 0;  // end of its learner step
  bool snapshot = false;
  Bytes bytes, learner_bytes;  // size of the payload; bytes that the learner sent
  // T_b: seconds from the publication until the learner knows that the quorum has installed it.
  std::optional<double> t_b_s;
  double lower_bound_s = 0, predicted_s = 0;  // until the quorum has received it: physical limit; expected time
  std::size_t workers = 0, installed = 0;     // at the time of T_b
  std::size_t depth = 0;                      // of the topology
};

struct SimMachine {
  std::string offer;
  std::uint32_t region = 0;
  double usd_per_hour = 0;
  double paid_from_s = 0, paid_to_s = 0;
  std::uint64_t rollouts = 0;  // accepted by the learner
  double bytes_in = 0, bytes_forwarded = 0, usd_traffic = 0;
  std::uint64_t version = 0;  // last version installed
  std::uint64_t worker = 0;   // number of its worker; 0: never joined
  bool lost = false;
};

struct SimDecision {  // of the fleet core
  double at_s = 0;
  std::string what, offer, why;
};

struct RunResult {
  provisioner::Plan plan;  // if there is one
  std::string plan_error;  // why there is no plan; then the cheapest offers within the limits are rented
  // The learner's idle share by PlanRequest::predict_idle, for the first fleet with its true speeds and times.
  std::optional<double> idle_predicted;
  std::string ended;                        // "completed", "time" (time_max is over), or another reason
  double wall_s = 0, first_snapshot_s = 0;  // end of the run; publication of the first snapshot
  std::uint64_t steps = 0, version = 0;     // learner steps; newest version sent
  std::vector<SimStep> by_step;
  std::vector<SimPublication> publications;
  std::vector<SimMachine> machines;    // all machines that were paid for, in order of renting
  std::vector<SimDecision> decisions;  // at most kDecisionsKept, the earliest ones
  std::map<std::string, std::uint64_t> decision_counts;
  std::map<std::string, std::uint64_t> rejected;        // rollouts that were generated but not trained on, by reason
  std::map<std::string, std::uint64_t> unfinished;      // rollouts of leases without a result, by reason
  std::map<std::uint64_t, std::uint64_t> stale_by_age;  // of `rejected`, those that were too stale
  // Average number of rollouts at the start of a step, by age: leased; in the buffer, without the step's batch.
  std::map<std::uint64_t, double> in_flight, in_queue;
  std::uint64_t groups_set_aside = 0;  // groups that are not leased again, because several workers were lost with them
  replay_buffer::LimitedStepCounter work_limits;  // reasons that kept workers from more work
  std::uint64_t machines_planned = 0, machines_started = 0, machines_lost = 0, machines_replaced = 0;
  double usd_fleet = 0, usd_rent = 0, usd_traffic = 0, usd_learner = 0, machine_hours = 0;
  double learner_bytes_sent = 0;
  double crossing_bytes_sent = 0;    // between regions
  double busy_s = 0, present_s = 0;  // summed over workers: generating; from joining until they leave
  std::vector<double> recoveries_s;  // how long each shortfall of capacity lasted
  std::size_t workers_peak = 0;      // most working at a time
  std::string topology;
  std::uint64_t events = 0, topologies_planned = 0, publications_merged = 0;
  double tokens_generated = 0, tokens_trained = 0;
};

inline constexpr std::size_t kDecisionsKept = 2000;

// The mean length of a response, limited to the allowed maximum.
double mean_tokens(const RunScenario& scenario);

// Deterministic. kInvalid for an inconsistent scenario.
Result<RunResult> simulate_run(const RunScenario& scenario,
                               const std::function<void(std::uint64_t step)>& progress = {});

}  // namespace echoline::sim
