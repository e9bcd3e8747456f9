// The machines of a fleet that are requested, rented or being released, indexed by key, offer, ticket and worker, with
// their totals. Private to provisioner/. No I/O and no clock.
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
  std::string host;                 // name of the physical machine; "" if not stated
  double rollouts_per_s = 0;        // promised
  double usd_per_hour = 0;          // rent
  double traffic_usd_per_hour = 0;  // planned cost of receiving and sending policies
  std::string owner = {};           // of the host; "" if not stated
  std::uint64_t gpus = ~0ull;       // the host's GPUs, as bits; offers that share one are never rented together
  double upload_usd_per_gb = 0, download_usd_per_gb = 0;
  double all_usd_per_hour() const { return usd_per_hour + traffic_usd_per_hour; }
};

enum class MachineState {
  kUnbooked,  // it waits for its turn at the provider, then for its row in the ledger
  kStarting,  // the provider was asked to start it
  kBooting,   // it is rented, but its worker has not joined
  kWorking,
  kDraining,  // it gets no more work and submits its results
  kStopping,  // the provider was asked to end it
  kDoubtful,  // it may exist; the provider is asked
};
std::string_view to_string(MachineState state);

// The part of kBooting that a machine has reached.
enum class BootPhase {
  kPulling,        // the container does not run yet, for at most FleetSettings::pull_limit()
  kContainerRuns,  // the worker has not joined, for at most FleetSettings::boot_limit()
  kUnreported,     // all of kBooting if the provider reports no phases, for at most FleetSettings::join_timeout
};

struct FleetMachine {
  std::uint64_t key = 0;  // its key in FleetMachines::all()
  FleetOffer offer;
  Ticket ticket = 0;
  InstanceId instance;
  MachineState state = MachineState::kUnbooked;
  // Measured / promised rate of its host, as known when it was rented; 1 unless the host was found to be slow.
  double rate_share = 1;
  TimePoint state_since;
  TimePoint requested_at;                         // when the ledger was asked for its row
  bool is_queued = false;                         // kUnbooked: the ledger has not been asked yet
  BootPhase boot_phase = BootPhase::kUnreported;  // set when kBooting begins
  TimePoint boot_phase_since;
  TimePoint next_request_at = kNever;  // when the pending request to the provider is repeated
  int retries = 0;                     // repeated requests in this state
  bool awaits_start_answer = false;    // the provider was asked to start it and has not answered
  bool adopt = false;                  // rented by an earlier process: use it if it exists
  bool unwanted = false;               // stop it as soon as that is possible
  bool replaces_loss = false;          // rented because another machine was lost
  std::optional<WorkerId> worker;
  bool has_joined = false;  // a worker on it has joined
  std::string why;          // why it is stopped
  // Submissions from this time until the next sample.
  struct Sample {
    TimePoint at;
    double rollouts = 0, busy_s = 0;  // busy_s: seconds of generating
  };
  std::deque<Sample> samples;
  bool has_results = false;                       // its worker has submitted rollouts
  std::optional<double> measured_rollouts_per_s;  // measured from `samples`
  double unsubmitted_busy_s = 0;                  // seconds of generating since the last submission
  TimePoint last_heartbeat_at{};                  // its unused capacity is counted up to this time
  // The whole fleet's output (FleetCore::Output) at this machine's last progress. Progress is a result, a part of the
  // first policy, or a request for work that could not be granted.
  double fleet_rollouts_at_progress = 0;
  Duration productive_time_at_progress{};
  Bytes received_at_progress{};  // how much of its first policy it had received
  struct Traffic {
    TimePoint at;
    Bytes received, forwarded;
  };
  std::deque<Traffic> traffic;  // since its first rollouts, so that the traffic of joining does not count
  std::optional<double> traffic_usd_per_hour;  // what `traffic` costs

  // The promised rate, or the known share of it.
  double expected_rollouts_per_s() const { return rate_share * offer.rollouts_per_s; }
  // Measured or expected. A silent worker keeps its last measurement, because stall detection handles silence.
  double rollouts_per_s() const { return measured_rollouts_per_s.value_or(expected_rollouts_per_s()); }
  // With traffic. `traffic_scale`: factor for the planned traffic cost, which counts until the cost is measured.
  double usd_per_hour(double traffic_scale) const {
    return offer.usd_per_hour + traffic_usd_per_hour.value_or(offer.traffic_usd_per_hour * traffic_scale);
  }
  // Whether the machine works or may come to work.
  bool counts_as_capacity() const {
    return !unwanted && state != MachineState::kStopping && state != MachineState::kDraining;
  }
};

// Sums over all present machines. Rates are FleetMachine::rollouts_per_s().
struct FleetTotals {
  double expected_rollouts_per_s = 0;  // of machines that count as capacity
  double working_rollouts_per_s = 0;   // of working machines
  double usd_per_hour = 0;             // of all machines
  double counted_usd_per_hour = 0;     // of machines that count as capacity
  std::size_t working = 0;
  std::size_t joining = 0;                // machines that count as capacity and do not work yet
  std::size_t joining_beyond_losses = 0;  // of `joining`: those that replace no lost machine
  std::size_t stopping = 0;               // machines that do not count as capacity
  friend bool operator==(const FleetTotals&, const FleetTotals&) = default;
};

class FleetMachines {
 public:
  // `state`: kUnbooked for a machine to be rented, kDoubtful for one that may exist.
  FleetMachine& add(const FleetOffer& offer, double rate_share, MachineState state, TimePoint now,
                    bool replaces_loss = false);
  void set_ticket(FleetMachine& machine, Ticket ticket);
  void join(FleetMachine& machine, WorkerId worker);
  void leave(WorkerId worker);
  // Changes the state. It is a bug if `to` may not follow the present state.
  void change_state(FleetMachine& machine, MachineState to, TimePoint now);
  void erase(const FleetMachine& machine);
  // Call after changing a machine's rate, price, or whether it counts.
  void invalidate_totals() { cached_totals_.reset(); }

  // Null if there is none. If several machines have this offer, returns the oldest.
  FleetMachine* find(Ticket ticket) { return lookup(by_ticket_, ticket); }
  FleetMachine* find(WorkerId worker) { return lookup(by_worker_, worker); }
  FleetMachine* find(const std::string& offer) { return const_cast<FleetMachine*>(std::as_const(*this).find(offer)); }
  const FleetMachine* find(Ticket ticket) const { return lookup(by_ticket_, ticket); }
  const FleetMachine* find(WorkerId worker) const { return lookup(by_worker_, worker); }
  const FleetMachine* find(const std::string& offer) const;
  FleetMachine& at(std::uint64_t key) { return machines_.at(key); }
  // The candidate with the highest cost per rollout; null if there is none.
  FleetMachine* find_most_expensive(double traffic_scale, const std::function<bool(const FleetMachine&)>& is_candidate);

  const std::map<std::uint64_t, FleetMachine>& all() const { return machines_; }
  std::map<std::uint64_t, FleetMachine>& all() { return machines_; }
  const std::set<std::uint64_t>& not_working() const { return not_working_; }  // keys of machines not in kWorking
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

  std::map<std::uint64_t, FleetMachine> machines_;            // by key; a later machine has a greater one
  std::set<std::pair<std::string, std::uint64_t>> by_offer_;  // offer id and key, because an offer can be rented again
  std::unordered_map<Ticket, FleetMachine*> by_ticket_;
  std::unordered_map<WorkerId, FleetMachine*> by_worker_;
  std::set<std::uint64_t> not_working_;
  std::uint64_t next_key_ = 1;
  struct CachedTotals {
    double traffic_scale = 1;
    FleetTotals totals;
  };
  mutable std::optional<CachedTotals> cached_totals_;
};

}  // namespace echoline::provisioner
