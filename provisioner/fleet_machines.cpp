// The indexes and totals of FleetMachines, which FleetCore changes.
#include "provisioner/fleet_machines.hpp"

#include <algorithm>
#include <array>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

using S = MachineState;

constexpr double kRateMin = 1e-12;  // rollouts/s; avoids a division by zero

// A set of states, with bit n for the state of value n.
constexpr unsigned state_bits(std::initializer_list<S> states) {
  unsigned all = 0;
  for (const S s : states) all |= 1u << static_cast<unsigned>(s);
  return all;
}
// The states that may follow each state.
constexpr std::array<unsigned, 7> kSuccessors{
    state_bits({S::kStarting}),                             // after kUnbooked
    state_bits({S::kBooting, S::kStopping, S::kDoubtful}),  // after kStarting
    state_bits({S::kWorking, S::kStopping}),                // after kBooting
    state_bits({S::kDraining, S::kStopping}),               // after kWorking
    state_bits({S::kStopping}),                             // after kDraining
    state_bits({}),                                         // after kStopping
    state_bits({S::kBooting, S::kStopping}),                // after kDoubtful
};

}  // namespace

std::string_view to_string(MachineState state) {
  constexpr std::array<std::string_view, 7> kNames{"unbooked", "starting", "booting", "working",
                                                   "draining", "stopping", "doubtful"};
  return kNames.at(static_cast<std::size_t>(state));
}

FleetMachine& FleetMachines::add(const FleetOffer& offer, double rate_share, MachineState state, TimePoint now,
                                 bool replaces_loss) {
  FleetMachine& machine = machines_[next_key_];
  machine.key = next_key_++;
  machine.offer = offer;
  machine.rate_share = rate_share;
  machine.state = state;
  machine.state_since = machine.requested_at = now;
  machine.replaces_loss = replaces_loss;
  by_offer_.emplace(offer.id, machine.key);
  not_working_.insert(machine.key);
  // sum() adds this machine last, too, so the rounding agrees.
  if (cached_totals_) count(cached_totals_->totals, machine, cached_totals_->traffic_scale);
  return machine;
}

void FleetMachines::set_ticket(FleetMachine& machine, Ticket ticket) {
  machine.ticket = ticket;
  by_ticket_[ticket] = &machine;
}

void FleetMachines::join(FleetMachine& machine, WorkerId worker) {
  leave(worker);  // because the worker may have joined for another offer before
  if (machine.worker) by_worker_.erase(*machine.worker);
  machine.worker = worker;
  machine.has_joined = true;
  by_worker_[worker] = &machine;
}

void FleetMachines::leave(WorkerId worker) {
  if (FleetMachine* machine = find(worker)) machine->worker.reset();
  by_worker_.erase(worker);
}

void FleetMachines::change_state(FleetMachine& machine, MachineState to, TimePoint now) {
  ECHO_CHECK((kSuccessors.at(static_cast<std::size_t>(machine.state)) & state_bits({to})) != 0, "{}: from {} to {}",
             machine.offer.id, to_string(machine.state), to_string(to));
  const bool needs_instance = to != S::kStarting && to != S::kDoubtful;
  ECHO_CHECK(!needs_instance || (machine.ticket != 0 && !machine.instance.text.empty()));
  if (to == S::kWorking) not_working_.erase(machine.key);
  if (machine.state == S::kWorking) not_working_.insert(machine.key);
  machine.state = to;
  machine.state_since = now;
  machine.retries = 0;
  machine.next_request_at = kNever;
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
    return machine.usd_per_hour(traffic_scale) / std::max(machine.rollouts_per_s(), kRateMin);
  };
  FleetMachine* dearest = nullptr;
  for (auto& [key, machine] : machines_)
    if (is_candidate(machine) && (dearest == nullptr || unit_cost(machine) > unit_cost(*dearest))) dearest = &machine;
  return dearest;
}

void FleetMachines::count(FleetTotals& totals, const FleetMachine& machine, double traffic_scale) {
  const double rate = machine.rollouts_per_s(), price = machine.usd_per_hour(traffic_scale);
  const bool is_working = machine.state == S::kWorking, is_counted = machine.counts_as_capacity();
  totals.usd_per_hour += price;
  if (is_counted) {
    totals.expected_rollouts_per_s += rate;
    totals.counted_usd_per_hour += price;
  } else {
    ++totals.stopping;
  }
  if (is_working) {
    ++totals.working;
    totals.working_rollouts_per_s += rate;
  } else if (is_counted) {
    ++totals.joining;
    totals.joining_beyond_losses += machine.replaces_loss ? 0 : 1;
  }
}

FleetTotals FleetMachines::sum(double traffic_scale) const {
  FleetTotals totals;
  for (const auto& [key, machine] : machines_) count(totals, machine, traffic_scale);
  return totals;
}

const FleetTotals& FleetMachines::totals(double traffic_scale) const {
  if (!cached_totals_ || cached_totals_->traffic_scale != traffic_scale)
    cached_totals_ = {.traffic_scale = traffic_scale, .totals = sum(traffic_scale)};
  return cached_totals_->totals;
}

void FleetMachines::check() const {
  std::size_t with_ticket = 0, with_worker = 0, not_working_count = 0;
  for (const auto& [key, machine] : machines_) {
    ECHO_CHECK(machine.key == key && by_offer_.contains({machine.offer.id, key}), "{}", machine.offer.id);
    ECHO_CHECK(machine.ticket != 0 || machine.state == S::kUnbooked, "{} is {} without a ticket", machine.offer.id,
               to_string(machine.state));
    ECHO_CHECK(machine.ticket == 0 || find(machine.ticket) == &machine, "ticket {}", machine.ticket);
    ECHO_CHECK(!machine.worker || find(*machine.worker) == &machine, "worker {}", *machine.worker);
    ECHO_CHECK(not_working_.contains(key) == (machine.state != S::kWorking), "{}", machine.offer.id);
    ECHO_CHECK(!machine.unwanted || machine.state != S::kWorking, "{} is unwanted and works", machine.offer.id);
    with_ticket += machine.ticket != 0 ? 1 : 0;
    with_worker += machine.worker ? 1 : 0;
    not_working_count += machine.state != S::kWorking ? 1 : 0;
  }
  ECHO_CHECK(by_offer_.size() == machines_.size() && by_ticket_.size() == with_ticket &&
             by_worker_.size() == with_worker && not_working_.size() == not_working_count);
  ECHO_CHECK(!cached_totals_ || cached_totals_->totals == sum(cached_totals_->traffic_scale),
             "the totals are not those of the machines");
}

}  // namespace echoline::provisioner
