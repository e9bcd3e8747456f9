// The indexes and totals of FleetMachines, which FleetCore changes.
#include "provisioner/fleet_machines.hpp"

#include <algorithm>
#include <array>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

using S = MachineState;

// The states that may follow each state, as bits.
constexpr unsigned bits(std::initializer_list<S> states) {
  unsigned all = 0;
  for (const S s : states) all |= 1u << static_cast<unsigned>(s);
  return all;
}
constexpr std::array<unsigned, 7> kSuccessors{
    bits({S::kStarting}),                             // after kAsked
    bits({S::kBooting, S::kStopping, S::kDoubtful}),  // kStarting
    bits({S::kWorking, S::kStopping}),                // kBooting
    bits({S::kDraining, S::kStopping}),               // kWorking
    bits({S::kStopping}),                             // kDraining
    bits({}),                                         // kStopping
    bits({S::kBooting, S::kStopping}),                // kDoubtful
};

}  // namespace

std::string_view to_string(MachineState state) {
  constexpr std::array<std::string_view, 7> kNames{"asked",    "starting", "booting", "working",
                                                   "draining", "stopping", "doubtful"};
  return kNames.at(static_cast<std::size_t>(state));
}

FleetMachine& FleetMachines::add(const FleetOffer& offer, double share, MachineState state, TimePoint now) {
  FleetMachine& machine = machines_[next_];
  machine.key = next_++;
  machine.offer = offer;
  machine.share = share;
  machine.state = state;
  machine.state_since = machine.requested_at = now;
  by_offer_.emplace(offer.id, machine.key);
  not_working_.insert(machine.key);
  if (totals_) count(totals_->second, machine, totals_->first);  // added last, as in sum(), so that rounding agrees
  return machine;
}

void FleetMachines::book(FleetMachine& machine, Ticket ticket) {
  machine.ticket = ticket;
  by_ticket_[ticket] = &machine;
}

void FleetMachines::join(FleetMachine& machine, WorkerId worker) {
  leave(worker);  // it may have joined for another offer before
  if (machine.worker) by_worker_.erase(*machine.worker);
  machine.worker = worker;
  by_worker_[worker] = &machine;
}

void FleetMachines::leave(WorkerId worker) {
  if (FleetMachine* machine = find(worker)) machine->worker.reset();
  by_worker_.erase(worker);
}

void FleetMachines::move(FleetMachine& machine, MachineState to, TimePoint now) {
  ECHO_CHECK((kSuccessors.at(static_cast<std::size_t>(machine.state)) & bits({to})) != 0, "{}: from {} to {}",
             machine.offer.id, to_string(machine.state), to_string(to));
  ECHO_CHECK(to == S::kStarting || machine.ticket != 0 || to == S::kDoubtful);
  ECHO_CHECK(to == S::kStarting || to == S::kDoubtful || !machine.instance.text.empty());
  if (to == S::kWorking) not_working_.erase(machine.key);
  if (machine.state == S::kWorking) not_working_.insert(machine.key);
  machine.state = to;
  machine.state_since = now;
  machine.tries = 0;
  machine.next_try = kNever;
  invalidate_totals();
}

void FleetMachines::erase(const FleetMachine& machine) {
  const std::uint64_t key = machine.key;
  if (machine.worker) by_worker_.erase(*machine.worker);
  if (find(machine.ticket) == &machine) by_ticket_.erase(machine.ticket);
  by_offer_.erase({machine.offer.id, key});
  not_working_.erase(key);
  machines_.erase(key);
  invalidate_totals();
}

const FleetMachine* FleetMachines::find(const std::string& offer) const {
  const auto it = by_offer_.lower_bound({offer, 0});
  return it == by_offer_.end() || it->first != offer ? nullptr : &machines_.at(it->second);
}

FleetMachine* FleetMachines::find_most_expensive(double traffic_scale,
                                                 const std::function<bool(const FleetMachine&)>& is_candidate) {
  const auto unit_cost = [&](const FleetMachine& machine) {
    return machine.price(traffic_scale) / std::max(machine.rate(), 1e-12);
  };
  FleetMachine* found = nullptr;
  for (auto& [key, machine] : machines_)
    if (is_candidate(machine) && (found == nullptr || unit_cost(machine) > unit_cost(*found))) found = &machine;
  return found;
}

void FleetMachines::count(FleetTotals& totals, const FleetMachine& machine, double traffic_scale) {
  const double rate = machine.rate(), price = machine.price(traffic_scale);
  const bool works = machine.state == S::kWorking, counts = machine.counts_as_capacity();
  totals.usd_per_hour += price;
  if (counts) totals.expected_rollouts_per_s += rate, totals.counted_usd_per_hour += price;
  if (works) totals.working_rollouts_per_s += rate, ++totals.working;
  if (!works && counts) ++totals.joining;
  if (!counts) ++totals.stopping;
}

FleetTotals FleetMachines::sum(double traffic_scale) const {
  FleetTotals totals;
  for (const auto& [key, machine] : machines_) count(totals, machine, traffic_scale);
  return totals;
}

const FleetTotals& FleetMachines::totals(double traffic_scale) const {
  if (!totals_ || totals_->first != traffic_scale) totals_.emplace(traffic_scale, sum(traffic_scale));
  return totals_->second;
}

void FleetMachines::check() const {
  std::size_t booked = 0, joined = 0, idle = 0;
  for (const auto& [key, machine] : machines_) {
    ECHO_CHECK(machine.key == key && by_offer_.contains({machine.offer.id, key}), "{}", machine.offer.id);
    ECHO_CHECK(machine.ticket != 0 || machine.state == S::kAsked, "{} is {} without a ticket", machine.offer.id,
               to_string(machine.state));
    ECHO_CHECK(machine.ticket == 0 || find(machine.ticket) == &machine, "ticket {}", machine.ticket);
    ECHO_CHECK(!machine.worker || find(*machine.worker) == &machine, "worker {}", *machine.worker);
    ECHO_CHECK(not_working_.contains(key) == (machine.state != S::kWorking), "{}", machine.offer.id);
    ECHO_CHECK(!machine.unwanted || machine.state != S::kWorking, "{} is unwanted and works", machine.offer.id);
    booked += machine.ticket != 0 ? 1 : 0;
    joined += machine.worker ? 1 : 0;
    idle += machine.state != S::kWorking ? 1 : 0;
  }
  ECHO_CHECK(by_offer_.size() == machines_.size() && by_ticket_.size() == booked && by_worker_.size() == joined &&
             not_working_.size() == idle);
  ECHO_CHECK(!totals_ || totals_->second == sum(totals_->first), "the totals are not those of the machines");
}

}  // namespace echoline::provisioner
