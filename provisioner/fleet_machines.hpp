// The machines of a fleet that are requested, rented or being released, indexed by key, offer, ticket and worker, with
// their totals. Private to provisioner/. Pure.
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

// The parts of an offer that the core needs.
struct FleetOffer {
  std::string id;
  std::string provider;
  std::string host;                 // the machine's name; "" if not stated
  double rollouts_per_s = 0;        // promised
  double usd_per_hour = 0;          // rent
  double traffic_usd_per_hour = 0;  // planned cost of receiving and sending policies
  std::string owner = {};           // of the machine; "" if not stated
  std::uint64_t gpus = ~0ull;       // which GPUs of the machine; offers that share one are never rented together
  double upload_usd_per_gb = 0, download_usd_per_gb = 0;
  double all_usd_per_hour() const { return usd_per_hour + traffic_usd_per_hour; }
};

enum class MachineState {
  kAsked,     // waits for its row in the ledger
  kStarting,  // the provider was asked to start it
  kBooting,   // it runs, but its worker has not joined
  kWorking,
  kDraining,  // it gets no more work and submits its results
  kStopping,  // the provider was asked to end it
  kDoubtful,  // it may exist; the provider is asked
};
std::string_view to_string(MachineState state);

struct FleetMachine {
  std::uint64_t key = 0;  // of FleetMachines::all()
  FleetOffer offer;
  Ticket ticket = 0;
  InstanceId instance;
  MachineState state = MachineState::kAsked;
  double share = 1;             // measured / promised rate of its host so far; 1 without a demotion
  TimePoint state_since;        // when the state began
  TimePoint requested_at;       // when it was requested
  TimePoint next_try = kNever;  // of the pending request
  int tries = 0;
  bool answered = true;   // the provider has answered the request to start it
  bool adopt = false;     // of an earlier process: use it if it exists
  bool unwanted = false;  // stop it as soon as that is possible
  std::optional<WorkerId> worker;
  std::string why;  // of the stop
  struct Sample {
    TimePoint at;
    double rollouts = 0, busy_s = 0;
  };
  std::deque<Sample> samples;
  std::optional<double> measured;  // rollouts/s, from `samples`
  double unfinished_s = 0;         // time spent on work that it has not submitted yet
  // The fleet's output at this machine's last progress: a result, a part of its first policy, or a request for work
  // that could not be granted.
  double rollouts_at_progress = 0;
  Duration worked_at_progress{};
  Bytes received_at_progress{};  // of its first policy
  struct Traffic {
    TimePoint at;
    Bytes received, forwarded;
  };
  std::deque<Traffic> traffic;  // from its first rollouts on, so that the traffic of joining does not count
  std::optional<double> traffic_usd_per_hour;  // from `traffic`

  // Rollouts/s, measured or promised. Keeps the last measurement of a silent worker; stall detection judges silence.
  double rate() const { return measured.value_or(share * offer.rollouts_per_s); }
  // $ per hour with traffic; planned traffic costs are multiplied by the scale until they are measured.
  double price(double traffic_scale) const {
    return offer.usd_per_hour + traffic_usd_per_hour.value_or(offer.traffic_usd_per_hour * traffic_scale);
  }
  // Whether it works or may come to work.
  bool counts_as_capacity() const {
    return !unwanted && state != MachineState::kStopping && state != MachineState::kDraining;
  }
};

struct FleetTotals {
  double expected_rollouts_per_s = 0;                 // of machines that count
  double working_rollouts_per_s = 0;                  // of working ones, measured or promised
  double usd_per_hour = 0, counted_usd_per_hour = 0;  // of all machines that may cost; of machines that count
  std::size_t working = 0, joining = 0, stopping = 0;
  friend bool operator==(const FleetTotals&, const FleetTotals&) = default;
};

class FleetMachines {
 public:
  // Adds a requested machine or (`state` kDoubtful) one that may exist.
  FleetMachine& add(const FleetOffer& offer, double share, MachineState state, TimePoint now);
  void book(FleetMachine& machine, Ticket ticket);
  void join(FleetMachine& machine, WorkerId worker);
  void leave(WorkerId worker);
  // Moves to another state; a state that may not follow is a bug.
  void move(FleetMachine& machine, MachineState to, TimePoint now);
  void erase(const FleetMachine& machine);
  // Call after changing a machine's rate, price, or whether it counts.
  void invalidate_totals() { totals_.reset(); }

  // Null if there is none. If several machines have this offer, returns the oldest.
  FleetMachine* find(Ticket ticket) { return lookup(by_ticket_, ticket); }
  FleetMachine* find(WorkerId worker) { return lookup(by_worker_, worker); }
  FleetMachine* find(const std::string& offer) { return const_cast<FleetMachine*>(std::as_const(*this).find(offer)); }
  const FleetMachine* find(Ticket ticket) const { return lookup(by_ticket_, ticket); }
  const FleetMachine* find(WorkerId worker) const { return lookup(by_worker_, worker); }
  const FleetMachine* find(const std::string& offer) const;
  FleetMachine& at(std::uint64_t key) { return machines_.at(key); }
  // The accepted machine with the highest cost per rollout; null if none.
  FleetMachine* find_most_expensive(double traffic_scale, const std::function<bool(const FleetMachine&)>& is_candidate);

  const std::map<std::uint64_t, FleetMachine>& all() const { return machines_; }
  std::map<std::uint64_t, FleetMachine>& all() { return machines_; }
  const std::set<std::uint64_t>& not_working() const { return not_working_; }
  bool empty() const { return machines_.empty(); }
  std::size_t size() const { return machines_.size(); }
  // Cached until the next change, because a fleet of ten thousand is asked several times per tick.
  const FleetTotals& totals(double traffic_scale) const;
  // Checks that indexes and totals agree with the machines.
  void check() const;

 private:
  template <class Index, class Key>
  static FleetMachine* lookup(const Index& index, Key key) {
    const auto it = index.find(key);
    return it == index.end() ? nullptr : it->second;
  }
  static void count(FleetTotals& totals, const FleetMachine& machine, double traffic_scale);
  FleetTotals sum(double traffic_scale) const;

  std::map<std::uint64_t, FleetMachine> machines_;            // by an increasing number
  std::set<std::pair<std::string, std::uint64_t>> by_offer_;  // by offer id
  std::unordered_map<Ticket, FleetMachine*> by_ticket_;
  std::unordered_map<WorkerId, FleetMachine*> by_worker_;
  std::set<std::uint64_t> not_working_;
  std::uint64_t next_ = 1;
  mutable std::optional<std::pair<double, FleetTotals>> totals_;  // with the traffic scale
};

}  // namespace echoline::provisioner
