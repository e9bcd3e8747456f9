// A whole training run, simulated: the production cores decide what is rented, who gets work and what is trained on;
// workers, the market, the learner's steps and misfortune are made up. docs/simulation.md says what is abstracted, and
// how.
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

enum class OnNewPolicy { kContinue, kFinish, kAbort };
enum class Activation { kCheapest, kRandom };
enum class Shares { kBySpeed, kEqual };
enum class Publishes { kDelta, kSnapshot };
enum class Leases { kInTime, kAnyAge };

// What can be rented, as the market states it, and what it is in truth.
struct RunOffer {
  provisioner::Offer offer;
  std::uint32_t region = 0;  // of RunScenario::regions
  double rate_share = 1;     // of the throughput that it promises
};

// Machines that somebody takes away at one time.
struct Preemption {
  Duration at{};                        // after the run began
  double share = 1;                     // of the machines that work then
  std::optional<std::uint32_t> region;  // absent: of all
};

struct RunChurn {
  double per_hour = 0;                             // of each machine that works
  double announced = 0;                            // share of the losses that are told of before
  Duration notice = std::chrono::seconds(30);      // so long before
  Duration returns_after = std::chrono::hours(1);  // then what was taken away is offered again
  std::vector<Preemption> preemptions;             // ascending
};

// Machines that become slow at one time, and are not lost.
struct Slowdown {
  Duration at{};                        // after the run began
  double share = 1;                     // of the machines that work then
  double tokens = 1, links = 1;         // what is left of the tokens/s, and of both links
  std::optional<Duration> lasts;        // absent: for good
  std::optional<std::uint32_t> region;  // absent: of all
};

struct RunFaults {
  double never_joins = 0;           // share of the machines that are paid for and never come to work
  double refused = 0;               // share of the attempts to rent that fail
  double hangs_per_hour = 0;        // of each worker: it is heard no more, and costs on
  std::vector<Slowdown> slowdowns;  // ascending
};

struct RunScenario {
  std::uint64_t seed = 1;
  // R, kappa, T, S, L, sizes, links, topology, prices, budgets: what the planner is asked. The fleet core's rules
  // follow from it.
  provisioner::PlanRequest request;
  std::vector<RunOffer> offers;

  replay_buffer::Pacing pacing;  // steps_total is needed
  replay_buffer::LeaseLength lease;
  OnNewPolicy on_new_policy = OnNewPolicy::kContinue;
  // Tokens of a response: `tokens`, or `token_histogram` where it is given; at most lease.tokens_max.
  Lognormal tokens;
  std::optional<Histogram> token_histogram;
  std::uint32_t groups_at_once = 2;             // that a worker holds: one that it is at, and the next
  Duration work_ahead{};                        // or as many more than one as it does in this time, where that is more
  std::optional<double> sequence_tokens_per_s;  // the most that a single response gets of a machine

  std::vector<double>
      step_seconds;      // of the first learner step, the second, ..., and again from the first; empty: step_time
  Duration step_time{};  // of the learner, without waiting; request.pace has what the plan is made with
  std::optional<Duration> install_time;  // what it takes; absent: as planned, request.fleet.install_time_expected
  double step_s_per_token = 0;           // and so much for each token that it trains on
  Duration encode_time{};       // from the end of a step until its policy can be sent; the next step goes on meanwhile
  Duration acknowledge_time{};  // from a worker's installation until the learner has heard of it

  double wire_overhead = 0;  // that headers and encryption add to every byte sent; plans and bounds do not count it
  std::vector<Bytes> delta_bytes;  // of the first publication, the second, ...; the last counts for all that follow
  Publishes publishes = Publishes::kDelta;
  Activation activation = Activation::kCheapest;
  Shares shares = Shares::kBySpeed;
  Leases leases = Leases::kInTime;

  Lognormal boot_s{30, 30};  // from asking for a machine until its worker calls
  Duration heartbeat_timeout = std::chrono::seconds(3);

  std::vector<std::string> regions{""};
  RunChurn churn;
  RunFaults faults;
  Duration time_max = std::chrono::hours(24 * 365);  // of virtual time; then the run is over, wherever it is
};

struct SimStep {
  std::uint64_t step = 0;  // from 1
  double at_s = 0, wait_s = 0, train_s = 0;
  std::map<std::uint64_t, std::uint64_t> staleness;  // of what was trained on, by age
  std::uint64_t tokens = 0, mixed = 0;
  double tokens_mean = 0;
  std::size_t working = 0, joining = 0;
  double rollouts_per_s = 0, target_rollouts_per_s = 0;  // that work, and are wanted
  std::uint64_t waiting = 0, in_flight = 0;              // rollouts in the buffer, and under leases
  double usd = 0, usd_per_hour = 0;
};

struct SimPublication {
  std::uint64_t version = 0;
  double at_s = 0;
  bool snapshot = false;
  Bytes bytes, learner_bytes;
  std::optional<double> t_b_s;
  double lower_bound_s = 0, predicted_s = 0;  // without installing
  std::size_t workers = 0, installed = 0;     // when T_b was taken
  std::size_t depth = 0;
};

struct SimMachine {
  std::string offer;
  std::uint32_t region = 0;
  double usd_per_hour = 0;
  double from_s = 0, to_s = 0;  // that it was paid for
  std::uint64_t rollouts = 0;   // accepted
  double bytes_in = 0, bytes_forwarded = 0, usd_traffic = 0;
  std::uint64_t version = 0;
  std::uint64_t worker = 0;  // 0: it never joined
  bool lost = false;
};

struct SimDecision {
  double at_s = 0;
  std::string what, offer, why;
};

struct RunResult {
  provisioner::Plan plan;          // as far as there is one
  std::string plan_trouble;        // why no plan was possible: then everything that may be rented is
  std::string ended;               // completed, budget, nothing left, time
  double wall_s = 0, begun_s = 0;  // begun: the first snapshot was published
  std::uint64_t steps = 0, version = 0;
  std::vector<SimStep> by_step;
  std::vector<SimPublication> publications;
  std::vector<SimMachine> machines;    // every one that was paid for, in the order of renting
  std::vector<SimDecision> decisions;  // the first kDecisionsKept
  std::map<std::string, std::uint64_t> decision_counts;
  std::map<std::string, std::uint64_t> rejected,
      unfinished;  // rollouts by reason: not trained on; of leases without a result
  std::map<std::uint64_t, std::uint64_t> stale_by_age;  // of the rejected: what was too stale
  std::map<std::uint64_t, double> in_flight, in_queue;  // rollouts by age, on the average over the steps
  std::uint64_t groups_set_aside = 0;
  replay_buffer::BoundSteps bound;  // what kept workers from more work
  std::uint64_t planned = 0, started = 0, lost = 0, replaced = 0;
  double usd_fleet = 0, usd_rent = 0, usd_traffic = 0, usd_learner = 0, machine_hours = 0;
  double learner_bytes_sent = 0;
  double crossing_bytes_sent = 0;    // from one region to another
  double busy_s = 0, present_s = 0;  // of all workers: generating, and there
  std::vector<double> recoveries_s;  // after losses: from too little capacity until there was enough again
  std::size_t workers_most = 0;
  std::string topology;
  std::uint64_t events = 0, topologies_planned = 0, publications_merged = 0;
  double tokens_generated = 0, tokens_trained = 0;
};

inline constexpr std::size_t kDecisionsKept = 2000;

// Of a response, as drawn: the lengths are cut at the longest that is allowed.
double mean_tokens(const RunScenario& scenario);

// Deterministic in the scenario. kInvalid for a scenario that makes no sense.
Result<RunResult> simulate_run(const RunScenario& scenario,
                               const std::function<void(std::uint64_t step)>& progress = {});

}  // namespace echoline::sim
