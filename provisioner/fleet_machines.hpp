// The machines of a fleet: those that are rented, asked for or being let go, found by key, offer, ticket and worker,
// and what they come to. Private to provisioner/. Pure.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"
#include "provisioner/provider.hpp"

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

enum class MachineState {
  kAsked,     // the ledger is to book it
  kStarting,  // the provider was asked
  kBooting,   // it runs, and its worker has not joined
  kWorking,
  kDraining,  // it gets no more work, and hands in its results
  kStopping,  // the provider was asked to end it
  kDoubtful,  // it may exist: the provider is asked whether it does
};
std::string_view to_string(MachineState state);

struct FleetMachine {
  std::uint64_t key = 0;  // of FleetMachines::all()
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
  // The fleet's output at the last sign of progress: a result, a part of its first policy, or a request for work that
  // could not be granted.
  double rollouts_then = 0;
  Duration worked_then{};
  Bytes received_then{};  // of that policy
  struct Traffic {
    TimePoint at;
    Bytes received, forwarded;
  };
  std::deque<Traffic> traffic;                 // from its first rollouts on: what it took to join is over by then
  std::optional<double> traffic_usd_per_hour;  // of it

  // Rollouts/s, measured or promised. A silent worker counts with its last measurement: presence is judged elsewhere.
  double rate() const { return measured.value_or(share * offer.rollouts_per_s); }
  // $ an hour, traffic included, which costs so many times what was planned until it has been measured.
  double price(double traffic_scale) const {
    return offer.usd_per_hour + traffic_usd_per_hour.value_or(offer.traffic_usd_per_hour * traffic_scale);
  }
  // Whether it works, or may come to work.
  bool counts() const { return !unwanted && state != MachineState::kStopping && state != MachineState::kDraining; }
};

struct FleetTotals {
  double expected_rollouts_per_s = 0;                 // of the machines that count
  double working_rollouts_per_s = 0;                  // of workers, measured or promised
  double usd_per_hour = 0, counted_usd_per_hour = 0;  // of all that is or may be rented; of the machines that count
  std::size_t working = 0, joining = 0, stopping = 0;
  friend bool operator==(const FleetTotals&, const FleetTotals&) = default;
};

class FleetMachines {
 public:
  // A machine that is wanted, or (`state` kDoubtful) may be there.
  FleetMachine& add(const FleetOffer& offer, double share, MachineState state, TimePoint now);
  void book(FleetMachine& machine, Ticket ticket);
  void join(FleetMachine& machine, WorkerId worker);
  void leave(WorkerId worker);
  // To another state that may follow; everything else is a bug.
  void move(FleetMachine& machine, MachineState to, TimePoint now);
  void erase(const FleetMachine& machine);
  // The caller has changed a machine's rate, its price, or whether it counts.
  void changed() { totals_.reset(); }

  // Null: there is none. If several machines have one offer, this is the oldest.
  FleetMachine* of(Ticket ticket) { return found(by_ticket_, ticket); }
  FleetMachine* of(WorkerId worker) { return found(by_worker_, worker); }
  FleetMachine* of(const std::string& offer) { return const_cast<FleetMachine*>(std::as_const(*this).of(offer)); }
  const FleetMachine* of(Ticket ticket) const { return found(by_ticket_, ticket); }
  const FleetMachine* of(WorkerId worker) const { return found(by_worker_, worker); }
  const FleetMachine* of(const std::string& offer) const;
  FleetMachine& at(std::uint64_t key) { return machines_.at(key); }
  // The one that costs most per rollout of those that may be meant; null: none.
  FleetMachine* dearest(double traffic_scale, const std::function<bool(const FleetMachine&)>& meant);

  const std::map<std::uint64_t, FleetMachine>& all() const { return machines_; }
  std::map<std::uint64_t, FleetMachine>& all() { return machines_; }
  const std::set<std::uint64_t>& not_working() const { return not_working_; }
  bool empty() const { return machines_.empty(); }
  std::size_t size() const { return machines_.size(); }
  // Worked out once for each change: a fleet of ten thousand is asked several times a tick.
  const FleetTotals& totals(double traffic_scale) const;
  // The indexes and the totals are those of the machines.
  void check() const;

 private:
  template <class Index, class Key>
  static FleetMachine* found(const Index& index, Key key) {
    const auto it = index.find(key);
    return it == index.end() ? nullptr : it->second;
  }
  static void count(FleetTotals& totals, const FleetMachine& machine, double traffic_scale);
  FleetTotals sum(double traffic_scale) const;

  std::map<std::uint64_t, FleetMachine> machines_;            // by a number of their own, which grows
  std::set<std::pair<std::string, std::uint64_t>> by_offer_;  // the offers' ids
  std::unordered_map<Ticket, FleetMachine*> by_ticket_;
  std::unordered_map<WorkerId, FleetMachine*> by_worker_;
  std::set<std::uint64_t> not_working_;
  std::uint64_t next_ = 1;
  mutable std::optional<std::pair<double, FleetTotals>> totals_;  // with the scale of traffic
};

}  // namespace echoline::provisioner
