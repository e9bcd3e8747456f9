// Decides what a run rents, watches and releases: its fleet as a pure core. It takes events with their times and
// returns actions; it has no clock, thread, ledger or provider. provisioner/fleet_driver carries out the actions;
// sim/market tests it under faults.
#pragma once
#include <algorithm>
#include <deque>
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
  LearnerPace pace;           // as planned; T until it is measured
  Duration broadcast_time{};  // T_b, until it is measured
  Bytes payload{};            // of a publication, until it is measured; 0: keep the planned traffic costs
  Bytes snapshot{};           // received by a worker before it can submit anything; 0: nothing
  double group_size = 1;      // rollouts that a worker generates as a unit
  // The core uses headroom, workers_max, per_host_max, join_timeout, away_max, replace_lost and the two budgets. A
  // worker is stalled if others submit results for away_max and it submits none. With replace_lost, a lost machine is
  // replaced at once; otherwise a loss counts as a shortfall. Without usd_per_hour_max the fleet may cost as much as
  // the plan; a learner faster than planned then gets no more machines.
  FleetSettings fleet;
};

// Constants of every run; docs/provisioning.md gives the reasons.
namespace rules {
inline constexpr double kDeadband = 0.05;       // of the target; a smaller shortfall is ignored
inline constexpr double kReleaseMargin = 0.25;  // of the target; a smaller surplus is ignored
// Share of its time for which the learner must wait before a shortfall counts.
inline constexpr double kIdleShareMin = 0.05;
inline constexpr Duration kThroughputWindow = std::chrono::seconds(60);  // for a worker's measured throughput
inline constexpr Duration kShortfallMin = std::chrono::seconds(30);      // of a shortfall before a machine is rented
inline constexpr Duration kSurplusMin = std::chrono::minutes(5);         // of a surplus before a machine is released
// The window for the learner's idle share; three steps if that is longer.
inline constexpr Duration kIdleWindow = std::chrono::minutes(1);
inline constexpr Duration kAnswerTimeout = std::chrono::seconds(60);  // before a provider is asked again
inline constexpr Duration kRetryMin = std::chrono::seconds(5), kRetryMax = std::chrono::minutes(1);
inline constexpr std::size_t kRentalsPerMinute = 4;  // or a quarter of machines_max, whichever is more
inline constexpr double kDemotionShare = 0.7;  // a worker below this share of its promise counts with its measured rate
// A new worker makes progress with each of these parts of a snapshot that it receives.
inline constexpr std::uint64_t kSnapshotParts = 8;
// A worker may submit unfinished work for this time before its machine is released.
inline constexpr Duration kDrainTimeout = std::chrono::minutes(2);
// The window for a worker's measured traffic; five publication periods if that is longer.
inline constexpr Duration kTrafficWindow = std::chrono::minutes(5);
// The rent of this time is reserved in the total budget, to pay until everything is returned.
inline constexpr Duration kReserveTime = std::chrono::minutes(3);
// How long a run that has trained its last step keeps its machines, so that each can install the last policy.
inline constexpr Duration kFinalInstallWait = std::chrono::seconds(30);
// Longer gaps between two ticks do not count as time that passed: the process did not run.
inline constexpr Duration kTickGapMax = std::chrono::seconds(5);
}  // namespace rules

// --- events ---

namespace fleet {
// The intent is on disk. Answers Book.
struct Booked {
  std::string offer;
  Ticket ticket = 0;
};
// The intent cannot be written, so nothing is rented.
struct BookingFailed {
  std::string offer, why;
};
// Booked by an earlier process and not ended. It may exist.
struct Recovered {
  Ticket ticket = 0;
  FleetOffer offer;
  InstanceId instance;  // empty: the provider never reported it
  bool adopt = true;    // use it if it exists; false: stop it
};
struct Started {
  Ticket ticket = 0;
  InstanceId instance;
  std::optional<double> usd_per_hour;
};
struct StartFailed {
  Ticket ticket = 0;
  std::string why;
  bool retryable = false, perhaps_rented = false;
};
// Answers FindInstance: the instance that the provider lists under this ticket, if any.
struct Found {
  Ticket ticket = 0;
  std::optional<InstanceId> instance;
  bool certain = false;  // an instance that is missing now will not appear later
};
struct Stopped {
  Ticket ticket = 0;
};
struct StopFailed {
  Ticket ticket = 0;
  std::string why;
};
struct Exited {
  Ticket ticket = 0;
  std::string why;
  bool outbid = false;
  bool still_rented = false;  // it does not work any more but still costs
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
// A worker that names this offer has joined or come back.
struct Joined {
  WorkerId worker;
  std::string offer;
};
// A worker's heartbeat: accepted rollouts and generating seconds since its last one. Both may be 0.
struct Heartbeat {
  WorkerId worker;
  double rollouts = 0, busy_s = 0;
  bool turned_away = false;  // it asked for work, held none, and none was available for any worker
};
// Bytes that the worker has received and forwarded since its process started.
struct TrafficMeasured {
  WorkerId worker;
  Bytes received, forwarded;
};
// The operator of its machine told the worker to end: it submits its results and leaves.
struct Leaving {
  WorkerId worker;
};
// Answers Drain: the worker has submitted all its work.
struct Drained {
  WorkerId worker;
};
struct Left {  // gone for good: away too long, or expelled
  WorkerId worker;
  std::string why;
};
// The learner starts or stops waiting for a batch.
struct LearnerWaiting {
  bool now_waits = false;
};
// A step has ended. The time excludes waiting.
struct StepMeasured {
  Duration step_time{};
};
struct BroadcastMeasured {
  Duration broadcast_time{};
  Bytes payload{};
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
    std::variant<fleet::Booked, fleet::BookingFailed, fleet::Recovered, fleet::Started, fleet::StartFailed,
                 fleet::Found, fleet::Stopped, fleet::StopFailed, fleet::Exited, fleet::Ending, fleet::PriceChanged,
                 fleet::Joined, fleet::Heartbeat, fleet::TrafficMeasured, fleet::Leaving, fleet::Drained, fleet::Left,
                 fleet::LearnerWaiting, fleet::StepMeasured, fleet::BroadcastMeasured, fleet::SpendingMeasured,
                 fleet::OffersRefreshed>;

// --- actions, carried out in order ---

namespace fleet {
struct Book {
  std::string offer;
};
struct Start {
  Ticket ticket = 0;
  std::string offer;
};
struct Stop {
  Ticket ticket = 0;
  InstanceId instance;
  std::string why;
};
// Asks the provider whether an instance of this ticket exists.
struct FindInstance {
  Ticket ticket = 0;
};
struct BookEnd {
  Ticket ticket = 0;
  std::string why;
  bool ran = true;                            // false: it never existed and costs nothing
  std::optional<double> rollouts_per_s = {};  // as measured
};
// The worker's machine has ended, so the learner need not wait for the worker.
struct GiveUp {
  WorkerId worker;
  std::string why;
};
// The worker gets no more work. Drained follows once it has submitted its results.
struct Drain {
  WorkerId worker;
  std::string why;
};
// A decision and its figures.
struct Note {
  // planned, replaced, added, released, lost, failed, demoted, adopted, price, budget, short, faster, market or
  // stop_failed
  std::string what;
  std::string offer;  // "" if it is about the fleet
  std::string why;
  Ticket ticket = 0;
};
}  // namespace fleet
using FleetAction = std::variant<fleet::Book, fleet::Start, fleet::Stop, fleet::FindInstance, fleet::BookEnd,
                                 fleet::GiveUp, fleet::Drain, fleet::Note>;

// Totals over the run.
struct FleetCounts {
  std::uint64_t started = 0, lost = 0, replaced = 0;
};

// The state of the fleet, for status displays.
struct FleetNumbers : FleetTotals, FleetCounts {
  double required_rollouts_per_s = 0;  // M*
  double target_rollouts_per_s = 0;    // with headroom
  double usd = 0;
  double idle_fraction = 0;  // of the learner's recent time
  Duration step_time{}, broadcast_time{};
  Bytes payload{};
  bool money_spent = false;  // the total budget is used up, so everything is returned
  bool exhausted = false;    // more machines are wanted but no offer may be rented
};

class FleetCore {
 public:
  // `offers`: the market. `wanted`: the plan's choice, rented first whatever the measured target.
  FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted);

  // Times matter only relative to each other. Time in which the process did not run (sleep, suspended machine, clock
  // set) counts against no machine. Unknown tickets and workers are ignored: they belong to settled machines.
  std::vector<FleetAction> handle(const FleetEvent& event, TimePoint now);
  // Makes the decisions that are due. Call about every second.
  std::vector<FleetAction> tick(TimePoint now);
  // Ends the run: returns every machine and rents no more.
  std::vector<FleetAction> close(const std::string& why, TimePoint now);

  FleetNumbers numbers() const;
  const FleetMachines& machines() const { return machines_; }
  const FleetRules& rules() const { return rules_; }
  // Checks the invariants between two calls.
  void check() const;

 private:
  using Machine = FleetMachine;
  enum class Phase {
    kOpen,
    kMoneySpent,  // the total budget is used up: everything is returned
    kClosed,      // the run has ended
  };
  // The time in which this process ran, on its own timeline.
  struct ProcessTime {
    std::optional<TimePoint> clock;  // latest time of the caller's clock
    TimePoint now{};
    void advance_to(TimePoint clock_now) {
      if (clock) now += std::clamp(clock_now - *clock, Duration{}, rules::kTickGapMax);
      clock = clock_now;
    }
  };
  // Results submitted by all workers together.
  struct Output {
    double rollouts = 0;
    Duration worked{};  // time in which any worker submitted results
    TimePoint last_at{};
  };
  // A capacity shortfall and the state of its repair.
  struct Shortfall {
    std::optional<TimePoint> since;
    bool loss_to_replace = false;
    bool exhausted = false;         // no offer could be rented
    TimePoint next_search{};        // when exhausted
    std::deque<TimePoint> rentals;  // in the last minute
    std::size_t rentals_in_last_minute(TimePoint now) {
      while (!rentals.empty() && now - rentals.front() >= std::chrono::minutes(1)) rentals.pop_front();
      return rentals.size();
    }
  };
  struct Spending {
    double usd = 0;
    TimePoint at{};
  };
  // Actions for the caller, and notes that are written only once.
  struct Outbox {
    std::vector<FleetAction> actions;
    std::set<std::pair<std::string, std::string>> noted;
  };

  void on(const fleet::Booked& e);
  void on(const fleet::BookingFailed& e);
  void on(const fleet::Recovered& e);
  void on(const fleet::Started& e);
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
  void on(const fleet::LearnerWaiting& e);
  void on(const fleet::StepMeasured& e);
  void on(const fleet::BroadcastMeasured& e);
  void on(const fleet::SpendingMeasured& e);
  void on(const fleet::OffersRefreshed& e);

  template <class Action>
  void act(Action action) {
    out_.actions.emplace_back(std::move(action));
  }
  void move(Machine& machine, MachineState to);
  void stop(Machine& machine, const std::string& why);
  void request_stop(Machine& machine);
  void drain(Machine& machine, const std::string& why);
  void prepare_for_end(Machine& machine, const std::string& why, bool outbid);
  void forget(Machine& machine, const std::string& why, bool ran);
  void count_as_lost(Machine& machine, const std::string& what, const std::string& why);
  void mark_doubtful(Machine& machine);
  void request_listing(Machine& machine);
  void record_progress(Machine& machine);
  Duration schedule_retry(Machine& machine);
  void record_offer_failure(const Machine& machine, bool refused);
  void demote_host(const Machine& machine, double share);
  void note(std::string what, std::string offer, std::string why, Ticket ticket = 0);
  void allow_note_again(const std::string& what) {
    std::erase_if(out_.noted, [&](const auto& entry) { return entry.first == what; });
  }
  void note_once(const std::string& what, const std::string& key, const std::string& why);

  void retarget();
  void enforce_time_limits();
  void stop_stalled();
  void enforce_budgets();
  void rent_wanted();
  void fill_shortfall();
  void release_surplus();
  void rent(const std::string& offer, const std::string& what, const std::string& why, bool replaces);
  std::vector<std::string> choose_offers(double missing);
  bool affordable(double usd_per_hour) const;  // total of all machines after the rental
  std::size_t rentals_allowed();
  const FleetTotals& totals() const { return machines_.totals(traffic_scale()); }
  Duration step_time() const, broadcast_time() const;  // as planned until enough was measured
  Bytes payload() const;
  double traffic_scale() const;                    // measured traffic cost / planned
  double price_of(const FleetOffer& offer) const;  // per hour, traffic included
  double spent() const;
  double idle_fraction() const;
  std::string numbers_text() const;

  FleetRules rules_;
  OfferBook book_;
  FleetMachines machines_;
  std::vector<std::string> wanted_;
  Phase phase_ = Phase::kOpen;
  ProcessTime time_;
  Outbox out_;
  MedianMeter<Duration> step_times_, broadcast_times_;
  MedianMeter<Bytes> payloads_;
  IdleMeter waiting_;
  CapacityTarget target_;
  Spending spending_;
  Output output_;
  Duration stalled_from_{};  // in terms of Output::worked: no worker counts as stalled before
  Shortfall shortfall_;
  std::optional<TimePoint> above_since_;
  FleetCounts counts_;
};

}  // namespace echoline::provisioner
