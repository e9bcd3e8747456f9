// What is rented, watched and let go: the fleet of one run as a pure core. Events and times in, actions out; it has no
// clock, thread, ledger or provider. provisioner/fleet_driver carries its actions out, sim/market tries to break it.
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
  LearnerPace pace;           // as planned; T until it has been measured
  Duration broadcast_time{};  // T_b, until it has been measured
  Bytes payload{};            // of a publication, until it has been measured; 0: what traffic costs stays as planned
  Bytes snapshot{};           // what a newcomer has to receive before it can hand in anything; 0: nothing
  double group_size = 1;      // rollouts that one worker generates as a unit
  // Of these count: headroom, workers_max, per_host_max, join_timeout, away_max (in which others hand in results, and a
  // worker none), replace_lost (at once; otherwise a loss waits like any shortfall), and the two budgets. Without
  // usd_per_hour_max the fleet may cost whatever the plan costs; but a learner that turns out faster than planned is
  // then not given more than that.
  FleetSettings fleet;
};

// The same in every run; docs/provisioning.md gives the reasons.
namespace rules {
inline constexpr double kDeadband = 0.05;       // of the target: what is missing less is not missing
inline constexpr double kReleaseMargin = 0.25;  // of the target: what is above it less is not too much
inline constexpr double kFeltIdle = 0.05;       // share of its time that a learner waits before a shortfall counts
inline constexpr Duration kWindow = std::chrono::seconds(60);     // of a worker's measured throughput
inline constexpr Duration kSustained = std::chrono::seconds(30);  // of a shortfall, before something is rented
inline constexpr Duration kSurplus = std::chrono::minutes(5);     // of a surplus, before something is let go
inline constexpr Duration kWaitWindow = std::chrono::minutes(1);  // in which waiting is measured; three steps if longer
inline constexpr Duration kAnswer = std::chrono::seconds(60);     // of a provider, before it is asked again
inline constexpr Duration kRetryMin = std::chrono::seconds(5), kRetryMax = std::chrono::minutes(1);
inline constexpr std::size_t kRentalsPerMinute = 4;  // or a quarter of machines_max, whichever is more
inline constexpr double kLied = 0.7;  // who does less than this of what was promised is taken at what it did
inline constexpr std::uint64_t kArrivalParts =
    8;  // of a snapshot: a newcomer that has received another one is not stalled
inline constexpr Duration kDrain =
    std::chrono::minutes(2);  // for handing in what was begun, before a machine is let go
inline constexpr Duration kTrafficWindow =
    std::chrono::minutes(5);                                   // of a worker's measured traffic; five periods if longer
inline constexpr Duration kReserve = std::chrono::minutes(3);  // of the total budget, kept for giving everything back
inline constexpr Duration kStepMax =
    std::chrono::seconds(5);  // more time than this between two ticks was not lived through
}  // namespace rules

// --- events ---

namespace fleet {
// The intent is on disk; answers Book.
struct Booked {
  std::string offer;
  Ticket ticket = 0;
};
// It cannot be written: nothing is rented without a row.
struct BookingFailed {
  std::string offer, why;
};
// Booked by an earlier process and not ended. It may exist.
struct Recovered {
  Ticket ticket = 0;
  FleetOffer offer;
  InstanceId instance;  // empty: the provider never said
  bool adopt = true;    // it is used if it is there; otherwise it is stopped
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
// Answers Look: what the provider lists under this ticket; absent: nothing.
struct Found {
  Ticket ticket = 0;
  std::optional<InstanceId> instance;
  bool certain = false;  // what is not there now will not come to be either
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
  bool still_rented = false;  // it works no more and still costs
};
// Its provider will take it back in a moment: an Exited follows.
struct Ending {
  Ticket ticket = 0;
  std::string why;
  bool outbid = false;
};
struct PriceChanged {
  Ticket ticket = 0;
  double usd_per_hour = 0;
};
// A worker that calls itself by an offer has joined, or come back.
struct Joined {
  WorkerId worker;
  std::string offer;
};
// Its heartbeat: rollouts that were accepted and seconds that it generated, since the last one. Both may be 0.
struct Beat {
  WorkerId worker;
  double rollouts = 0, busy_s = 0;
  bool turned_away = false;  // it asked for work, had none, and there was none for anybody
};
// The bytes that it has received and forwarded since its process started.
struct Moved {
  WorkerId worker;
  Bytes received, forwarded;
};
// It was told to end, by whoever runs its machine: it hands in what it has, and goes.
struct Leaving {
  WorkerId worker;
};
// Answers Drain: it has handed in all that it had work for.
struct Drained {
  WorkerId worker;
};
struct Left {  // gone for good: away for too long, or expelled
  WorkerId worker;
  std::string why;
};
// The learner waits for a batch, or has one.
struct Waiting {
  bool now_waits = false;
};
// A step has ended; its time without waiting.
struct StepMeasured {
  Duration step_time{};
};
struct BroadcastMeasured {
  Duration broadcast_time{};
  Bytes payload{};
};
// What the ledger says the run has cost, traffic and earlier processes included.
struct Spent {
  double usd = 0;
};
// All that can be rented now.
struct OffersRefreshed {
  std::vector<FleetOffer> offers;
};
}  // namespace fleet
using FleetEvent =
    std::variant<fleet::Booked, fleet::BookingFailed, fleet::Recovered, fleet::Started, fleet::StartFailed,
                 fleet::Found, fleet::Stopped, fleet::StopFailed, fleet::Exited, fleet::Ending, fleet::PriceChanged,
                 fleet::Joined, fleet::Beat, fleet::Moved, fleet::Leaving, fleet::Drained, fleet::Left, fleet::Waiting,
                 fleet::StepMeasured, fleet::BroadcastMeasured, fleet::Spent, fleet::OffersRefreshed>;

// --- actions, to be carried out in order ---

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
// Ask the provider whether an instance of this ticket exists.
struct Look {
  Ticket ticket = 0;
};
struct BookEnd {
  Ticket ticket = 0;
  std::string why;
  bool ran = true;                            // false: it never existed, and costs nothing
  std::optional<double> rollouts_per_s = {};  // as measured
};
// The worker's machine has ended: nobody needs to wait for it.
struct GiveUp {
  WorkerId worker;
  std::string why;
};
// It is to get no more work; answers Drained once it has handed in what it has.
struct Drain {
  WorkerId worker;
  std::string why;
};
// A decision, with the numbers it was made by.
struct Note {
  std::string what;   // planned, replaced, added, released, lost, failed, demoted, adopted, price, budget, short,
                      // faster, market, stop_failed
  std::string offer;  // "" where it is about the fleet
  std::string why;
  Ticket ticket = 0;
};
}  // namespace fleet
using FleetAction = std::variant<fleet::Book, fleet::Start, fleet::Stop, fleet::Look, fleet::BookEnd, fleet::GiveUp,
                                 fleet::Drain, fleet::Note>;

// Of the whole run, so far.
struct FleetCounts {
  std::uint64_t started = 0, lost = 0, replaced = 0;
};

// How the fleet stands, for those who watch.
struct FleetNumbers : FleetTotals, FleetCounts {
  double required_rollouts_per_s = 0;  // M*
  double target_rollouts_per_s = 0;    // with headroom
  double usd = 0;
  double idle_fraction = 0;  // of the learner, lately
  Duration step_time{}, broadcast_time{};
  Bytes payload{};
  bool money_spent = false;  // the total budget is used up: everything is given back
  bool exhausted = false;    // more is wanted, and there is nothing that may be rented
};

class FleetCore {
 public:
  // `offers`: the market. `wanted`: what the plan chose, rented first, whatever the measured target is.
  FleetCore(FleetRules rules, const std::vector<FleetOffer>& offers, std::vector<std::string> wanted);

  // Times never matter by themselves: what a process did not live through (it slept, its machine was suspended, its
  // clock was set) is nobody's fault. Unknown tickets and workers are ignored: they are of a past that was settled.
  std::vector<FleetAction> handle(const FleetEvent& event, TimePoint now);
  // Due decisions; call at least every second or so.
  std::vector<FleetAction> tick(TimePoint now);
  // The run has ended: everything is given back, and nothing is rented any more.
  std::vector<FleetAction> close(const std::string& why, TimePoint now);

  FleetNumbers numbers() const;
  const FleetMachines& machines() const { return machines_; }
  const FleetRules& rules() const { return rules_; }
  // What holds between two calls; a bug otherwise.
  void check() const;

 private:
  using Machine = FleetMachine;
  enum class Phase {
    kOpen,
    kMoneySpent,  // the total budget is used up: everything is given back
    kClosed,      // the run has ended
  };
  // Time that was lived through, on a timeline of its own.
  struct Lived {
    std::optional<TimePoint> told;  // the latest time that was told
    TimePoint now{};
    void pass(TimePoint told_now) {
      if (told) now += std::clamp(told_now - *told, Duration{}, rules::kStepMax);
      told = told_now;
    }
  };
  // What all workers together have handed in.
  struct Output {
    double rollouts = 0;
    Duration worked{};  // time in which somebody handed in something
    TimePoint last_at{};
  };
  // What is missing, and what is done about it.
  struct Shortfall {
    std::optional<TimePoint> since;
    bool loss_to_replace = false;
    bool exhausted = false;         // there was nothing to rent
    TimePoint look_again{};         // then
    std::deque<TimePoint> rentals;  // of the last minute
    std::size_t rented_lately(TimePoint now) {
      while (!rentals.empty() && now - rentals.front() >= std::chrono::minutes(1)) rentals.pop_front();
      return rentals.size();
    }
  };
  struct Spending {
    double usd = 0;
    TimePoint at{};
  };
  // Actions to be carried out, and what has been said once already.
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
  void on(const fleet::Beat& e);
  void on(const fleet::Moved& e);
  void on(const fleet::Leaving& e);
  void on(const fleet::Drained& e);
  void on(const fleet::Left& e);
  void on(const fleet::Waiting& e);
  void on(const fleet::StepMeasured& e);
  void on(const fleet::BroadcastMeasured& e);
  void on(const fleet::Spent& e);
  void on(const fleet::OffersRefreshed& e);

  template <class Action>
  void act(Action action) {
    out_.actions.emplace_back(std::move(action));
  }
  void move(Machine& machine, MachineState to);
  void stop(Machine& machine, const std::string& why);
  void ask_to_stop(Machine& machine);
  void drain(Machine& machine, const std::string& why);
  void ends_soon(Machine& machine, const std::string& why, bool outbid);
  void forget(Machine& machine, const std::string& why, bool ran);
  void lose(Machine& machine, const std::string& what, const std::string& why);
  void doubt(Machine& machine);
  void look(Machine& machine);
  void progressed(Machine& machine);
  Duration put_off(Machine& machine);
  void blame(const Machine& machine, bool refused);
  void demote(const Machine& machine, double share);
  void note(std::string what, std::string offer, std::string why, Ticket ticket = 0);
  void unsay(const std::string& what) {
    std::erase_if(out_.noted, [&](const auto& said) { return said.first == what; });
  }
  void note_once(const std::string& what, const std::string& key, const std::string& why);

  void retarget();
  void mind_time_limits();
  void mind_stalled();
  void mind_budgets();
  void rent_wanted();
  void mind_shortfall();
  void mind_surplus();
  void rent(const std::string& offer, const std::string& what, const std::string& why, bool replaces);
  std::vector<std::string> choose(double missing);
  bool affordable(double usd_per_hour) const;  // of all that would be rented then
  std::size_t rentals_allowed();
  const FleetTotals& totals() const { return machines_.totals(traffic_scale()); }
  Duration step_time() const, broadcast_time() const;  // as planned until enough were measured
  Bytes payload() const;
  double traffic_scale() const;                    // what traffic costs, as measured, against the plan
  double price_of(const FleetOffer& offer) const;  // an hour, traffic included
  double spent() const;
  double idle() const;
  std::string numbers_text() const;

  FleetRules rules_;
  OfferBook book_;
  FleetMachines machines_;
  std::vector<std::string> wanted_;
  Phase phase_ = Phase::kOpen;
  Lived time_;
  Outbox out_;
  LateMedian<Duration> step_times_, broadcast_times_;
  LateMedian<Bytes> payloads_;
  IdleMeter waiting_;
  CapacityTarget target_;
  Spending spending_;
  Output output_;
  Duration stalled_from_{};  // of Output::worked: no worker counts as stalled before
  Shortfall shortfall_;
  std::optional<TimePoint> above_since_;
  FleetCounts counts_;
};

}  // namespace echoline::provisioner
