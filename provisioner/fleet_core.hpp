// What is rented, watched and let go: the fleet of one run as a pure core. Events and times in, actions out; it has no
// clock, thread, ledger or provider. provisioner/fleet_driver carries its actions out, sim/market tries to break it.
#pragma once
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"
#include "provisioner/capacity.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/provider.hpp"
#include "provisioner/settings.hpp"

namespace echoline::provisioner {

// An offer as the core needs it.
struct FleetOffer {
  std::string id;
  std::string provider;
  std::string host;                 // the machine; "" when not stated
  double rollouts_per_s = 0;        // as promised
  double usd_per_hour = 0;          // the rent
  double traffic_usd_per_hour = 0;  // what sending and receiving policies will cost beside it, as planned
  std::string owner = {};           // of the machine; "" when not stated
  std::uint64_t gpus = ~0ull;       // which of the machine's: offers that share one are never rented together
  double upload_usd_per_gb = 0, download_usd_per_gb = 0;
  double all_usd_per_hour() const { return usd_per_hour + traffic_usd_per_hour; }
};

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
inline constexpr std::size_t kPaceSamples = 15;      // the median of so many measured T and T_b counts
inline constexpr std::size_t kPaceSamplesMin = 5;
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

// asked: the ledger is to book it; starting: the provider was asked; booting: it runs, its worker has not joined;
// working; draining: it gets no more work and hands in what it has; stopping: asked to end; doubtful: nobody knows
// whether it exists.
enum class MachineState { kAsked, kStarting, kBooting, kWorking, kDraining, kStopping, kDoubtful };
std::string_view to_string(MachineState state);

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

// How the fleet stands, for those who watch.
struct FleetNumbers {
  double required_rollouts_per_s = 0;  // M*
  double target_rollouts_per_s = 0;    // with headroom
  double working_rollouts_per_s = 0;   // of workers, measured or promised
  double expected_rollouts_per_s = 0;  // with those that are on their way
  double usd_per_hour = 0;             // of all that is or may be rented
  double usd = 0;
  double idle_fraction = 0;  // of the learner, lately
  Duration step_time{}, broadcast_time{};
  Bytes payload{};
  std::size_t working = 0, joining = 0, stopping = 0;
  std::uint64_t started = 0, lost = 0, replaced = 0;
  bool money_spent = false;  // the total budget is used up: everything is given back
  bool exhausted = false;    // more is wanted, and there is nothing that may be rented
};

class FleetCore {
 public:
  struct Machine {
    std::uint64_t key = 0;  // of machines()
    FleetOffer offer;
    Ticket ticket = 0;
    InstanceId instance;
    MachineState state = MachineState::kAsked;
    double share = 1;             // of what its offer promises that its host has kept before
    TimePoint since;              // of the state
    TimePoint asked;              // when it was wanted
    TimePoint next_try = kNever;  // of what it waits for
    int tries = 0;
    bool answered = true;   // the provider has said what came of starting it
    bool adopt = false;     // of an earlier process: it is used if it is there
    bool unwanted = false;  // to be stopped as soon as that can be asked for
    std::optional<WorkerId> worker;
    std::string why;  // it is stopped
    struct Sample {
      TimePoint at;
      double rollouts = 0, busy_s = 0;
    };
    std::deque<Sample> samples;
    std::optional<double> measured;  // rollouts/s, of them
    double unfinished_s = 0;         // worked on what it has not handed in yet
    // Of the whole fleet, when it last handed in something, or was seen to receive its first policy, or to ask for work
    // that nobody could be given.
    double rollouts_then = 0;
    Duration worked_then{};
    Bytes received_then{};  // of that policy
    struct Traffic {
      TimePoint at;
      Bytes received, forwarded;
    };
    std::deque<Traffic> traffic;                 // from its first rollouts on: what it took to join is over by then
    std::optional<double> traffic_usd_per_hour;  // of it
  };

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
  bool empty() const { return machines_.empty(); }
  // By an offer that is rented, asked for or being let go; null otherwise.
  const Machine* machine_of(const std::string& offer) const;
  const Machine* machine_of(Ticket ticket) const;
  std::optional<Ticket> ticket_of(WorkerId worker) const;
  const std::map<std::uint64_t, Machine>& machines() const { return machines_; }
  const FleetRules& rules() const { return rules_; }

 private:
  struct Entry {  // of the book of offers
    FleetOffer offer;
    TimePoint not_before{};  // it failed
    int failures = 0;
    bool refused = false;  // it is not to be had, until it is offered again
  };

  void pass(TimePoint now);
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

  Machine* of(Ticket ticket);
  Machine* of(WorkerId worker);
  Machine* rented_as(const std::string& offer);
  Machine& add(const FleetOffer& offer);
  void erase(const Machine& machine);
  // The one that costs most per rollout of those that may be meant; null: none.
  Machine* dearest(const std::function<bool(const Machine&)>& meant);
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
    std::erase_if(noted_, [&](const auto& said) { return said.first == what; });
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
  std::vector<std::string> choose(double missing) const;
  bool affordable(double usd_per_hour) const;  // of all that would be rented then
  std::size_t rentals_allowed() const;
  double rate_of(const Machine& machine) const;
  bool counts(const Machine& machine) const;
  double expected() const;
  double working() const;  // rollouts/s of those that work
  double share_of(const FleetOffer& offer) const;
  Duration step_time() const, broadcast_time() const;  // as planned until enough were measured
  Bytes payload() const;
  double traffic_scale() const;                    // what traffic costs, as measured, against the plan
  double price_of(const FleetOffer& offer) const;  // an hour, traffic included
  double price_of(const Machine& machine) const { return price_of(machine, traffic_scale()); }
  static double price_of(const Machine& machine, double traffic_scale);
  double usd_per_hour() const;
  double spent() const;
  double idle() const;
  std::string numbers_text() const;
  bool available(const Entry& entry) const;
  static std::string host_of(const FleetOffer& offer) {
    return offer.host.empty() ? offer.provider + "/offer " + offer.id : offer.provider + "/" + offer.host;
  }

  FleetRules rules_;
  std::map<std::string, Entry, std::less<>> book_;
  std::map<std::string, double> shares_;  // by host_of(): what it keeps of its promises
  std::vector<std::string> wanted_;
  std::map<std::uint64_t, Machine> machines_;                 // by a number of their own, which grows
  std::set<std::pair<std::string, std::uint64_t>> by_offer_;  // the offers' ids
  std::map<Ticket, std::uint64_t> by_ticket_;
  std::map<WorkerId, std::uint64_t> by_worker_;
  std::uint64_t next_ = 1;
  std::vector<FleetAction> actions_;

  std::optional<TimePoint> told_;  // the latest time that was told
  TimePoint now_{};                // lived through, on a timeline of its own
  std::deque<Duration> steps_, broadcasts_;
  std::deque<Bytes> payloads_;
  CapacityTarget target_;
  struct Stretch {
    TimePoint from, to;
    bool waiting = false;
  };
  std::deque<Stretch> stretches_;
  double spent_usd_ = 0;
  TimePoint spent_at_{};
  double rollouts_ = 0;  // of the whole fleet
  Duration worked_{};    // time in which somebody handed in something
  TimePoint last_rollouts_at_{};
  std::deque<TimePoint> rentals_;
  std::optional<TimePoint> below_since_, above_since_;
  TimePoint look_again_{};  // there was nothing to rent
  bool loss_to_replace_ = false, closed_ = false, money_spent_ = false, exhausted_ = false;
  std::set<std::pair<std::string, std::string>> noted_;
  std::uint64_t started_ = 0, lost_ = 0, replaced_ = 0;
};

}  // namespace echoline::provisioner
