// The machines of a simulated run: the production fleet core with a simulated market, provider and ledger. Private to
// sim/.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <vector>

#include "sim/run_scenario.hpp"

namespace echoline::sim {

class RunFleet {
 public:
  struct Hooks {
    std::function<void(provisioner::Ticket, std::size_t offer, double joins_s)>
        booting;                                     // joins_s absent: it never joins
    std::function<void(provisioner::Ticket)> ended;  // the machine is gone, for any reason
    std::function<void(WorkerId)> drain;
  };
  RunFleet(const RunScenario& scenario, const provisioner::FleetRules& rules, const std::vector<std::size_t>& wanted,
           Hooks hooks, RunResult& result);

  void tick(double now);
  void hear(const provisioner::FleetEvent& event, double now);
  void close(const std::string& why, double now);
  provisioner::FleetNumbers numbers() const { return core_->numbers(); }
  bool empty() const { return core_->machines().empty(); }
  // Total cost so far.
  double usd(double now) const;
  double usd_per_hour() const { return rent_per_hour_; }
  SimMachine& machine(provisioner::Ticket ticket) { return result_.machines[static_cast<std::size_t>(ticket) - 1]; }
  std::size_t offer_of(provisioner::Ticket ticket) const { return offers_[static_cast<std::size_t>(ticket) - 1]; }
  // The machine was taken away or has died.
  void taken(provisioner::Ticket ticket, bool outbid, double now);
  void traffic(provisioner::Ticket ticket, double bytes_in, double bytes_forwarded);

 private:
  struct Answer {
    double at_s = 0;
    std::uint64_t sequence = 0;
    provisioner::FleetEvent event;
    friend bool operator>(const Answer& a, const Answer& b) {
      return a.at_s != b.at_s ? a.at_s > b.at_s : a.sequence > b.sequence;
    }
  };
  void carry_out(const std::vector<provisioner::FleetAction>& actions);
  void act(const provisioner::fleet::Book& book);
  void act(const provisioner::fleet::Start& start);
  void act(const provisioner::fleet::Stop& stop);
  void act(const provisioner::fleet::Look& look);
  void act(const provisioner::fleet::BookEnd& end);
  void act(const provisioner::fleet::GiveUp&) {}
  void act(const provisioner::fleet::Drain& drain);
  void act(const provisioner::fleet::Note& note);
  void answer(double after_s, provisioner::FleetEvent event);
  void settle_rent(double now);
  // The cheapest available offers, up to a search's limit.
  std::vector<provisioner::FleetOffer> page() const;

  const RunScenario& scenario_;
  Hooks hooks_;
  RunResult& result_;
  Draws draws_;
  std::vector<provisioner::FleetOffer> lots_;  // by offer index
  std::vector<double> rent_;                   // true $ per hour
  std::vector<std::size_t> order_;             // offers, cheapest per rollout first
  std::vector<double> back_s_;                 // by offer: when it is available again; kNeverS: rented
  std::map<std::string, std::size_t, std::less<>> index_;
  std::optional<provisioner::FleetCore> core_;
  std::vector<std::size_t> offers_;  // by ticket
  std::vector<bool> open_, gone_;    // by ticket: it costs; its provider no longer has it
  std::priority_queue<Answer, std::vector<Answer>, std::greater<>> answers_;
  std::uint64_t sequence_ = 0;
  double now_ = 0, rent_per_hour_ = 0, settled_s_ = 0, refreshed_s_ = 0;
};

}  // namespace echoline::sim
