// The parts of a simulated market (sim/market.hpp), by the owner of their state. Private to market*.cpp.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "provisioner/fleet_core.hpp"

namespace echoline::sim {

constexpr Duration kTickInterval = std::chrono::seconds(5);
constexpr Duration kBootMax = std::chrono::minutes(4);  // after a rental, until the worker must have joined
constexpr Duration kAwayMax = std::chrono::minutes(2);  // silence after which the learner gives a worker up

struct MarketDraws : Random {
  using Random::Random;
  bool chance(double probability) { return uniform() < probability; }
  double real_between(double low, double high) { return low + (high - low) * uniform(); }
  Duration time_between(Duration low, Duration high) { return Duration(between(low.count(), high.count())); }
};

struct MarketHost {  // an offer and its true properties
  provisioner::FleetOffer offer;
  double honesty = 1;  // true rate, as a share of the promised one
  double refusal_probability = 0;
  bool never_joins = false;
};

struct RentalRow {  // of the ledger, which survives a restart of the learner
  std::string offer;
  provisioner::InstanceId instance;
  double usd_per_hour = 0;
  Duration booked_at{};
  std::optional<Duration> ended_at;
  bool start_requested = false;
  bool ran = true;  // false: it never existed, so it costs nothing
  double usd(Duration now) const {
    return ran ? usd_per_hour * echoline::seconds(ended_at.value_or(now) - booked_at) / 3600 : 0;
  }
};

struct MarketInstance {  // a rented machine at the provider
  provisioner::Ticket ticket = 0;
  std::size_t host = 0;  // index in MarketScenario::hosts
  double usd_per_hour = 0;
  // Duration::max(): never. At `ends_at` the provider takes the machine back.
  Duration boots_at{}, hung_since{Duration::max()}, ends_at{Duration::max()};
  std::optional<Duration> drains_since;
  bool joined = false, dead = false, outbid = false;
  bool watched = false;  // the learner process knows the instance, so it is notified of the instance's end
  // The learner requested its stop; the core was told that its worker left; its worker has finished its work.
  bool stop_requested = false, has_left = false, drained = false;
  WorkerId worker;             // its number is the ticket's
  double unsent_rollouts = 0;  // generated, but not yet a whole group
};

struct PendingCall {  // takes effect at the provider at time `at`
  Duration at;
  provisioner::Ticket ticket = 0;
  std::size_t host = 0;  // of a start: index in MarketScenario::hosts
};
struct Answer {  // reaches the learner at time `at`
  Duration at;
  provisioner::FleetEvent event;
};

// Offer "o7" is that of MarketScenario::hosts[7].
inline std::size_t host_index(const std::string& offer) {
  return static_cast<std::size_t>(std::stoul(offer.substr(1)));
}
inline provisioner::InstanceId instance_id(provisioner::Ticket ticket) { return {fmt::format("cloud:{}", ticket)}; }

// Removes and returns the items whose time has come.
template <class T>
std::vector<T> remove_due(std::vector<T>& all, Duration now) {
  std::vector<T> due;
  for (T& item : all)
    if (item.at <= now) due.push_back(item);
  std::erase_if(all, [&](const T& item) { return item.at <= now; });
  return due;
}

// The market, as drawn before the run.
struct MarketScenario {
  bool without_trouble = false;  // no faults at all; the fleet must then rent exactly what it planned
  provisioner::FleetRules rules;
  std::vector<MarketHost> hosts;
  std::vector<std::string> wanted_offers;
  double crash_probability = 0;  // of the learner, at each action
  Duration true_step_time{};
  std::string text;  // describes the market
  const MarketHost& host_of(const std::string& offer) const { return hosts[host_index(offer)]; }
};
// `queue_draws`: for the limit of start requests under way (MarketProvider::queue_draws).
MarketScenario draw_scenario(MarketDraws& draws, MarketDraws& queue_draws);

// The instances of the provider, and the requests and answers under way between it and the learner.
struct MarketProvider {
  explicit MarketProvider(const MarketDraws& draws) : queue_draws(draws) {}
  // For the queue in which start requests wait. A separate source of randomness, so that the queue's draws do not
  // change the other draws of a seed.
  MarketDraws queue_draws;
  std::map<provisioner::Ticket, MarketInstance> instances;
  std::vector<PendingCall> starts, stops, searches;
  std::vector<Answer> answers;
  Duration outage_until{-std::chrono::hours(1)};  // before the start: no outage yet

  MarketInstance* find(provisioner::Ticket ticket) {
    const auto it = instances.find(ticket);
    return it == instances.end() ? nullptr : &it->second;
  }
  void answer(Duration at, provisioner::FleetEvent event) { answers.push_back({at, std::move(event)}); }
  // Forgets the start request and its answer. False: no such request waits, or (in half of the cases) it has left the
  // queue.
  bool cancel_start(provisioner::Ticket ticket) {
    if (!queue_draws.below(2)) return false;
    if (std::erase_if(starts, [&](const PendingCall& call) { return call.ticket == ticket; }) == 0) return false;
    std::erase_if(answers, [&](const Answer& answer) {
      const auto* started = std::get_if<provisioner::fleet::Started>(&answer.event);
      const auto* failed = std::get_if<provisioner::fleet::StartFailed>(&answer.event);
      return (started && started->ticket == ticket) || (failed && failed->ticket == ticket);
    });
    return true;
  }
  // The learner's process has died: nothing that it knew of the instances is left.
  void forget_learner() {
    answers.clear();
    for (auto& [id, instance] : instances) {
      instance.watched = instance.has_left = instance.joined = instance.stop_requested = instance.drained = false;
      instance.drains_since.reset();
    }
  }
  void check() const {
    for (const auto& [ticket, instance] : instances)
      ECHO_CHECK(instance.ticket == ticket && instance.worker.value == static_cast<std::uint64_t>(ticket));
    for (const PendingCall& start : starts)
      ECHO_CHECK(!instances.contains(start.ticket), "{} starts twice", start.ticket);
  }
};

// The true cost of the fleet, to compare with the ledger.
class MarketSpending {
 public:
  void note_stop_request(provisioner::Ticket ticket, Duration now) { stop_requested_at_.try_emplace(ticket, now); }
  void add(provisioner::Ticket ticket, double usd, Duration now) {
    usd_ += usd;
    usd_by_ticket_[ticket] += usd;
    // The core keeps money in reserve for kReserveTime after a stop request. If the provider takes longer to end the
    // machine, the further costs are the provider's fault.
    const auto request = stop_requested_at_.find(ticket);
    if (request != stop_requested_at_.end() && now - request->second > provisioner::rules::kReserveTime)
      unavoidable_usd_ += usd;
  }
  double usd() const { return usd_; }
  double avoidable_usd() const { return usd_ - unavoidable_usd_; }
  double usd_of(provisioner::Ticket ticket) { return usd_by_ticket_[ticket]; }
  void check() const {
    double sum = 0;
    for (const auto& [ticket, usd] : usd_by_ticket_) sum += usd;
    ECHO_CHECK(std::abs(sum - usd_) <= 1e-6 * (1 + usd_) && unavoidable_usd_ <= usd_, "${} of ${}", sum, usd_);
  }

  Duration price_rose_at{-std::chrono::hours(1)};  // before the start: not yet
  bool overspending_reported = false;

 private:
  double usd_ = 0, unavoidable_usd_ = 0;
  std::map<provisioner::Ticket, double> usd_by_ticket_;
  std::map<provisioner::Ticket, Duration> stop_requested_at_;  // first request
};

// The learner's training; only numbers of rollouts are simulated.
struct MarketTraining {
  double stock_rollouts = 0;  // generated and not yet trained on
  Duration trains_until{};    // end of the step in training; zero: none
  int steps = 0;
  std::optional<bool> waiting_reported;  // last fleet::LearnerWaiting sent to the current core
  void check() const { ECHO_CHECK(stock_rollouts >= 0); }
};

// When capacity must be restored: some time after the trouble, and after the last host found slower than promised.
struct Restoration {
  std::set<std::size_t> deceivers;  // such hosts
  Duration last_deceiver_at{};
  bool slowness_reported = false;
  void record_deceiver(std::size_t host, Duration now) {
    if (deceivers.insert(host).second) last_deceiver_at = now;
  }
};

}  // namespace echoline::sim
