// FleetCore decides which machines a run rents, watches and releases. It is pure: it takes events with their times and
// returns actions, and has no clock, thread, ledger or provider. provisioner/fleet_driver carries out the actions;
// sim/market tests it under faults. provisioner/capacity.hpp defines the symbols T, T_b and M*.
#pragma once
#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "provisioner/capacity.hpp"
#include "provisioner/fleet_machines.hpp"
#include "provisioner/offer_book.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/run_pace.hpp"
#include "provisioner/settings.hpp"

namespace echoline::provisioner {

struct FleetRules {
  // `pace`, `times` and `payload` are planned values. Measurements replace them once they suffice.
  LearnerPace pace;                          // with T, the time of a learner step
  PublicationTimes times;                    // T_b, and a worker's pause to install a policy
  std::optional<int> staleness_budget = {};  // S; absent: any age is allowed
  Bytes payload{};        // expected size of a publication; 0: the traffic cost is never adjusted to measurements
  Bytes snapshot{};       // size of the whole policy, which a worker receives when it joins; 0: nothing
  double group_size = 1;  // rollouts per group, which a worker generates and submits as a unit
  // By provider: the start requests that it takes at a time; absent: any number. Further machines wait in the core,
  // without a ledger row.
  std::map<std::string, std::size_t> starts_at_once = {};
  // The core uses these settings: headroom, capacity_rule, workers_max, per_host_max, the limits of phases, away_max,
  // replace_lost, usd_per_hour_max and usd_max.
  // - away_max: a worker is stalled if the other workers submit results for this time and it submits none.
  // - replace_lost: a lost machine is replaced at once. Without it, the loss is replaced after kShortfallMin.
  // - usd_per_hour_max: if absent, M* never exceeds that of the plan, even if the learner is faster than planned.
  FleetSettings fleet;

  CapacityTerms capacity_terms() const {
    return {.rule = fleet.capacity_rule, .staleness_budget = staleness_budget, .headroom = fleet.headroom};
  }
};

// Constants of every run; docs/provisioning.md gives the reasons.
namespace rules {
inline constexpr double kDeadband = 0.05;  // share of the target; a smaller shortfall is ignored
// Unless a machine was lost, a shortfall is ignored while the learner waits for a smaller share of its time.
inline constexpr double kIdleShareMin = 0.05;
// No machine is released for lack of work while the learner waits for a larger share of its time.
inline constexpr double kIdleShareForRelease = 0.01;
// Spare capacity of a resized fleet, as a share of the needed capacity. Machines are released if the spare capacity is
// at least twice as much.
inline constexpr double kSpareShare = 0.02;
// The fleet may be so small that the stock of finished rollouts is used up within this time.
inline constexpr Duration kStockTime = std::chrono::hours(1);
// Machines are rented while the stock lasts for this many times the time that a machine takes until its first results.
inline constexpr int kStartTimesOfStock = 2;
// The window for the used capacity; kStepsInUseWindow steps if that is longer.
inline constexpr Duration kUseWindow = std::chrono::minutes(5);
inline constexpr int kStepsInUseWindow = 5;
inline constexpr Duration kThroughputWindow = std::chrono::seconds(60);  // for a worker's measured throughput
inline constexpr Duration kShortfallMin = std::chrono::seconds(30);      // a shorter shortfall rents no machine
inline constexpr Duration kSurplusMin = std::chrono::minutes(3);         // a shorter surplus releases no machine
// The window for the learner's idle share; three steps if that is longer.
inline constexpr Duration kIdleWindow = std::chrono::minutes(1);
// After this time without an answer, a stop is requested again, and a listing shows whether a start has succeeded.
inline constexpr Duration kAnswerTimeout = std::chrono::seconds(60);
// Bounds of the pause between two requests to stop or to find the same machine.
inline constexpr Duration kBackoffMin = std::chrono::seconds(5), kBackoffMax = std::chrono::minutes(1);
inline constexpr std::size_t kRentalsPerMinute = 4;  // or a quarter of workers_max, if that is more
// If a worker's measured rate is below this share of the rate that its offer promised, its host counts with the
// measured share.
inline constexpr double kDemotionShare = 0.7;
// Parts into which a snapshot is divided. Each part that a joining worker has received restarts its stall detection.
inline constexpr std::uint64_t kSnapshotParts = 8;
// A worker may submit unfinished work for this time before its machine is released.
inline constexpr Duration kDrainTimeout = std::chrono::minutes(2);
// The window for a worker's measured traffic; five publication periods if that is longer.
inline constexpr Duration kTrafficWindow = std::chrono::minutes(5);
// Part of the total budget is kept in reserve, because machines cost until the provider has ended them. The reserve is
// the fleet's cost for kReserveTime, plus kStopTime for each machine (the longest interval that a provider demands
// between two stops).
inline constexpr Duration kReserveTime = std::chrono::minutes(3), kStopTime = std::chrono::seconds(3);
// How long a run that has trained its last step keeps its machines, so that each can install the last policy.
inline constexpr Duration kFinalInstallWait = std::chrono::seconds(30);
// If the clock advances further between two calls, the process did not run (the computer slept). Then only this much
// counts as time passed.
inline constexpr Duration kTickGapMax = std::chrono::seconds(5);
}  // namespace rules

// --- events; some answer an action (below) ---

namespace fleet {
// Answers Book: the ledger has stored the intent to rent this offer.
struct Booked {
  std::string offer;
  Ticket ticket = 0;  // number of the ledger's row
};
// Answers Book: the ledger cannot store the intent, so nothing is rented.
struct BookingFailed {
  std::string offer, why;
};
// The ledger has this rental from an earlier process, without an end. Its instance may still exist.
struct Recovered {
  Ticket ticket = 0;
  FleetOffer offer;
  InstanceId instance;  // empty: the provider never reported it
  bool adopt = true;    // use it if it exists; false: stop it
};
// Answers Start: the instance is rented.
struct Started {
  Ticket ticket = 0;
  InstanceId instance;
  std::optional<double> usd_per_hour;
  bool running_follows = false;  // the container does not run yet; Running will report it
};
// The machine's container runs now.
struct Running {
  Ticket ticket = 0;
};
// Answers CancelStart if the request had not been sent; it never will.
struct Cancelled {
  Ticket ticket = 0;
};
// Answers Start: nothing is rented, or, with `perhaps_rented`, only a listing can tell whether it is.
struct StartFailed {
  Ticket ticket = 0;
  std::string why;
  bool retryable = false;  // the same offer may be requested again
  bool perhaps_rented = false;
  bool by_account = false;  // the reason is the account, so it says nothing about the offer
};
// The provider can rent nothing, or can rent again.
struct ProviderTrouble {
  std::string provider;
  std::string why;  // "": it can rent
};
// Answers FindInstance: the instance that the provider lists under this ticket.
struct Found {
  Ticket ticket = 0;
  std::optional<InstanceId> instance;  // absent: the provider lists none
  bool certain = false;                // an instance that is missing now cannot appear later
  bool running_follows = false;        // as in Started
};
// Answers Stop: the instance is not rented any more.
struct Stopped {
  Ticket ticket = 0;
};
// Answers Stop: the instance may still be rented. The core stops it again.
struct StopFailed {
  Ticket ticket = 0;
  std::string why;
};
// The provider reports that the instance ended although no Stop asked for it.
struct Exited {
  Ticket ticket = 0;
  std::string why;
  bool outbid = false;        // another customer bids more for the machine
  bool still_rented = false;  // the instance does not work any more but still costs
};
// The provider will take the machine back soon; an Exited follows.
struct Ending {
  Ticket ticket = 0;
  std::string why;
  bool outbid = false;
};
struct PriceChanged {
  Ticket ticket = 0;
  double usd_per_hour = 0;
};
// A worker has joined or come back.
struct Joined {
  WorkerId worker;
  std::string offer;  // by which its machine was rented, as the worker states it
};
// A worker's heartbeat: accepted rollouts and generating seconds since its last one. Both may be 0.
struct Heartbeat {
  WorkerId worker;
  double rollouts = 0, busy_s = 0;
  bool turned_away = false;  // the idle worker asked for work, and the learner had none for any worker
  // Seconds since its last heartbeat in which it wanted work and got none. If only a part of its capacity lacked work,
  // that share of the seconds counts.
  double without_work_s = 0;
};
// Bytes that the worker has received and forwarded since its process started.
struct TrafficMeasured {
  WorkerId worker;
  Bytes received, forwarded;
};
// The operator of the worker's machine told the worker to end. The worker submits its results and leaves.
struct Leaving {
  WorkerId worker;
};
// Answers Drain: the worker has submitted all its work.
struct Drained {
  WorkerId worker;
};
// The worker is gone for good: it was away too long, or was expelled.
struct Left {
  WorkerId worker;
  std::string why;
};
// The learner starts or stops waiting for a batch.
struct LearnerWaiting {
  bool now_waits = false;
};
// A step has ended. The time excludes waiting for a batch.
struct StepMeasured {
  Duration step_time{};
  std::optional<std::uint64_t> steps_left = {};  // of the run; absent: unknown
  // Rollouts that are ready for the next steps; absent: unknown, as for rollouts that an external client requests.
  std::optional<std::uint64_t> rollouts_waiting = {};
};
// A publication has reached the workers.
struct BroadcastMeasured {
  Duration broadcast_time{};
  Bytes payload{};
  std::optional<Duration> install_time = {};  // a worker's pause to install it
};
// The run's cost by the ledger, including traffic and earlier processes.
struct SpendingMeasured {
  double usd = 0;
};
// All offers that can be rented now.
struct OffersRefreshed {
  std::vector<FleetOffer> offers;
};
}  // namespace fleet
using FleetEvent =
    std::variant<fleet::Booked, fleet::BookingFailed, fleet::Recovered, fleet::Started, fleet::Running,
                 fleet::Cancelled, fleet::StartFailed, fleet::Found, fleet::Stopped, fleet::StopFailed, fleet::Exited,
                 fleet::Ending, fleet::PriceChanged, fleet::Joined, fleet::Heartbeat, fleet::TrafficMeasured,
                 fleet::Leaving, fleet::Drained, fleet::Left, fleet::ProviderTrouble, fleet::LearnerWaiting,
                 fleet::StepMeasured, fleet::BroadcastMeasured, fleet::SpendingMeasured, fleet::OffersRefreshed>;

// --- actions, carried out in order ---

namespace fleet {
// Writes the intent to rent this offer to the ledger, before the provider is asked. Booked or BookingFailed follows.
struct Book {
  std::string offer;
};
// Asks the provider for the instance. Started or StartFailed follows.
struct Start {
  Ticket ticket = 0;
  std::string offer;
};
// Asks the provider to drop a Start that it has not sent to its service yet. Cancelled follows if that succeeds.
struct CancelStart {
  Ticket ticket = 0;
};
// Asks the provider to end the instance. Stopped or StopFailed follows.
struct Stop {
  Ticket ticket = 0;
  InstanceId instance;
  std::string why;
};
// Asks the provider whether an instance of this ticket exists. Found follows if the listing succeeds.
struct FindInstance {
  Ticket ticket = 0;
};
// Writes the end of the rental to the ledger.
struct BookEnd {
  Ticket ticket = 0;
  std::string why;
  bool ran = true;                            // false: it never existed and costs nothing
  std::optional<double> rollouts_per_s = {};  // as measured
};
// Tells the learner that the worker will not come back, because its machine has ended.
struct GiveUp {
  WorkerId worker;
  std::string why;
};
// The worker gets no more work. Drained follows once it has submitted its results.
struct Drain {
  WorkerId worker;
  std::string why;
};
// Reports a decision or an observation, for the event log and the ledger.
struct Note {
  // Rentals: planned, replaced or added. Ends: released, lost, failed or stop_failed. Others:
  // - adopted: a machine of an earlier process is used; demoted: a host's offers count with its measured share.
  // - price and market: a machine's price or the offers have changed.
  // - budget: a budget allows no more machines.
  // - short: more machines are wanted, but no offer is left that may be rented.
  // - blocked, unblocked: a provider can rent nothing, or can rent again.
  // - faster: the learner could use more rollouts than the plan or the broadcast time allows.
  std::string what;
  std::string offer;  // "" if the note is about the whole fleet
  std::string why;
  Ticket ticket = 0;
  bool has_joined = false;  // of "lost": a worker on the machine had joined
};
}  // namespace fleet
using FleetAction = std::variant<fleet::Book, fleet::Start, fleet::Stop, fleet::FindInstance, fleet::BookEnd,
                                 fleet::GiveUp, fleet::Drain, fleet::CancelStart, fleet::Note>;

// Numbers of machines over the whole run.
struct MachineCounts {
  std::uint64_t started = 0, lost = 0, replaced = 0;
  std::uint64_t not_joined = 0;  // of `lost`: machines whose container ran, but whose worker did not join in time
};

// The state of the fleet, for status displays.
struct FleetStatus : FleetTotals, MachineCounts {
  double required_rollouts_per_s = 0;  // M*
  double target_rollouts_per_s = 0;    // M* with headroom
  double usd = 0;                      // cost of the run so far
  double idle_fraction = 0;            // share of its recent time for which the learner waited
  std::size_t queued = 0;              // of `joining`: the provider has not confirmed the rental
  std::size_t pulling = 0;  // of `joining`: the provider still pulls the image, so the container does not run
  Duration step_time{}, broadcast_time{}, install_time{};
  Bytes payload{};
  bool money_spent = false;  // the total budget is used up, so everything is returned
  bool exhausted = false;    // more machines are wanted, but no offer is left that may be rented
};

class FleetCore {
 public:
  // `offers`: the market. `wanted`: the plan's choice, which is rented first, whatever the measured target is.
  FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted);

  // Only differences of times matter. Time in which the process did not run (sleep, suspended machine, clock set)
  // counts against no machine. Unknown tickets and workers are ignored, because they belong to machines whose rental
  // has ended.
  std::vector<FleetAction> handle(const FleetEvent& event, TimePoint now);
  // Makes the decisions that are due. Call about every second.
  std::vector<FleetAction> tick(TimePoint now);
  // Ends the run: returns every machine and rents no more.
  std::vector<FleetAction> close(const std::string& why, TimePoint now);

  FleetStatus numbers() const;
  const FleetMachines& machines() const { return machines_; }
  const FleetRules& rules() const { return rules_; }
  // Checks the invariants that hold between two calls.
  void check() const;

 private:
  using Machine = FleetMachine;
  // Values of bool arguments: `ran` of erase_ended(), and `until_refresh` of record_offer_failure().
  static constexpr bool kRan = true, kNeverRan = false;
  static constexpr bool kUnavailableUntilRefresh = true, kAvailableAfterPause = false;
  static constexpr double kFullShare = 1;  // of the promised rate
  // Value of Shortfall::lost_rollouts_per_s if the lost rate is not known. The whole shortfall is then filled.
  static constexpr double kAnyCapacity = std::numeric_limits<double>::infinity();
  static constexpr double kSecondsPerHour = 3600;
  enum class Phase {
    kOpen,
    kMoneySpent,  // the total budget is used up: everything is returned
    kClosed,      // the run has ended
  };
  // A clock that runs only while this process runs. All times in the core are its times.
  struct ProcessTime {
    std::optional<TimePoint> latest_clock_time;  // of the caller's clock
    TimePoint now{};
    void advance_to(TimePoint clock_time) {
      if (latest_clock_time) now += std::clamp(clock_time - *latest_clock_time, Duration{}, rules::kTickGapMax);
      latest_clock_time = clock_time;
    }
  };
  // Results submitted by all workers together.
  struct Output {
    double rollouts = 0;
    Duration productive_time{};  // time in which any worker submitted results
    TimePoint last_result_at{};
    Duration next_stall_check{};  // the productive_time before which no worker can count as stalled
    void schedule_stall_check(Duration at) { next_stall_check = std::min(next_stall_check, at); }
  };
  // A capacity shortfall and the state of its repair.
  struct Shortfall {
    std::optional<TimePoint> since;  // absent: there is none, or a rental was made for it
    // Expected rate of the machines that were lost or not obtained, and are not replaced yet.
    double lost_rollouts_per_s = 0;
    bool exhausted = false;              // no offer could be rented at the last search
    TimePoint next_search_at{};          // after a search without a result
    std::deque<TimePoint> rental_times;  // in the last minute
    std::size_t rentals_in_last_minute(TimePoint now) {
      while (!rental_times.empty() && now - rental_times.front() >= std::chrono::minutes(1)) rental_times.pop_front();
      return rental_times.size();
    }
  };
  // Capacity that the learner does not need.
  struct Surplus {
    TimePoint since;
    double rollouts_per_s_min = 0;  // the smallest surplus since then
  };
  struct Spending {
    double usd = 0;
    TimePoint measured_at{};
  };
  // Actions for the caller, and notes that are written only once.
  struct Outbox {
    std::vector<FleetAction> actions;
    std::set<std::pair<std::string, std::string>> noted;  // by note_once(): Note::what and Note::offer
  };

  void on(const fleet::Booked& e);
  void on(const fleet::BookingFailed& e);
  void on(const fleet::Recovered& e);
  void on(const fleet::Started& e);
  void on(const fleet::Running& e);
  void on(const fleet::Cancelled& e);
  void on(const fleet::StartFailed& e);
  void on(const fleet::Found& e);
  void on(const fleet::Stopped& e);
  void on(const fleet::StopFailed& e);
  void on(const fleet::Exited& e);
  void on(const fleet::Ending& e);
  void on(const fleet::PriceChanged& e);
  void on(const fleet::Joined& e);
  void on(const fleet::Heartbeat& e);
  void on(const fleet::TrafficMeasured& e);
  void on(const fleet::Leaving& e);
  void on(const fleet::Drained& e);
  void on(const fleet::Left& e);
  void on(const fleet::ProviderTrouble& e);
  void on(const fleet::LearnerWaiting& e);
  void on(const fleet::StepMeasured& e);
  void on(const fleet::BroadcastMeasured& e);
  void on(const fleet::SpendingMeasured& e);
  void on(const fleet::OffersRefreshed& e);

  template <class Action>
  void emit(Action action) {
    outbox_.actions.emplace_back(std::move(action));
  }
  void change_state(Machine& machine, MachineState to);
  void stop(Machine& machine, const std::string& why);
  void request_stop(Machine& machine);
  void drain(Machine& machine, const std::string& why);
  void prepare_for_end(Machine& machine, const std::string& why, bool outbid);
  void erase_ended(Machine& machine, const std::string& why, bool ran);
  void count_as_lost(Machine& machine, const std::string& why);
  void mark_doubtful(Machine& machine);
  void request_listing(Machine& machine);
  void record_progress(Machine& machine);
  Duration schedule_retry(Machine& machine);  // returns the pause before it
  // Makes the offer unavailable for a pause, or until a refresh of the market contains it again.
  void record_offer_failure(const Machine& machine, bool until_refresh);
  void demote_host(const Machine& machine, double share);
  void note(std::string what, std::string offer, std::string why, Ticket ticket = 0);
  // Lets note_once() write a note of this kind again.
  void allow_note_again(const std::string& what) {
    std::erase_if(outbox_.noted, [&](const auto& entry) { return entry.first == what; });
  }
  void note_once(const std::string& what, const std::string& offer, const std::string& why);

  void update_target();
  void enforce_time_limits();
  void stop_stalled();
  void enforce_budgets();
  void rent_wanted();
  void fill_shortfall();
  double missing_rollouts_per_s() const;
  double missing_before_stock_is_used_up() const;
  double rent_cheapest(double missing_rollouts_per_s, double usd_per_hour_max, bool replaces);
  bool is_too_late_to_rent() const;
  void release_surplus();
  void rent(const std::string& offer, const std::string& what, const std::string& why, bool replaces);
  void start_queued();
  void set_boot_phase(Machine& machine, BootPhase phase);
  Duration boot_phase_limit(BootPhase phase) const;
  std::string lateness_text(BootPhase phase) const;
  std::vector<std::string> choose_offers(double missing_rollouts_per_s, double usd_per_hour_max);
  // Whether the budgets allow a fleet at this price, which includes the machines to be rented.
  bool is_affordable(double fleet_usd_per_hour) const;
  double usd_per_hour_max_without_loss() const;
  // How long it may take to return this many machines.
  static Duration reserve_time(std::size_t machines) {
    return rules::kReserveTime + static_cast<Duration::rep>(machines) * rules::kStopTime;
  }
  std::size_t rentals_allowed();  // now, by the limit per minute
  const FleetTotals& totals() const { return machines_.totals(traffic_scale()); }
  Duration step_time() const, broadcast_time() const;  // planned until there are enough measurements
  Duration install_time() const;
  CapacityTarget planned_target() const;
  Bytes payload() const;
  double traffic_scale() const;                    // measured traffic cost / planned
  double price_of(const FleetOffer& offer) const;  // $ per hour, traffic included
  double spent_usd() const;
  Duration idle_window() const;
  double idle_fraction() const;
  Duration use_window() const;
  std::optional<Duration> time_left() const;  // of the run; absent: unknown
  // The capacity with which the stock of finished rollouts would neither grow nor shrink. Absent until it was measured.
  std::optional<double> needed_rollouts_per_s() const;
  // The contribution of the stock if it is used up within this time, or by the end of the run if that is sooner.
  double stock_rollouts_per_s(Duration time) const;
  // The needed capacity with kSpareShare, less the stock's contribution. Absent while it is not known or the learner
  // waits.
  std::optional<double> sufficient_rollouts_per_s() const;
  double rollouts_per_s_for_last_steps() const;
  std::string numbers_text() const;

  FleetRules rules_;
  OfferBook offer_book_;
  FleetMachines machines_;
  std::vector<std::string> wanted_;  // offers of the plan's choice that are not rented yet
  // Cost of the plan's choice and its headroom, which is one machine at least: a fleet of two cannot grow by a tenth.
  double usd_per_hour_max_of_plan_ = 0;
  Phase phase_ = Phase::kOpen;
  ProcessTime time_;
  Outbox outbox_;
  RunPace pace_;
  CapacityTarget target_;
  Spending spending_;
  Output output_;
  Shortfall shortfall_;
  std::optional<Surplus> surplus_;  // absent: there is none
  MachineCounts counts_;
};

}  // namespace echoline::provisioner
