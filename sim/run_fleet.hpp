// The machines of a simulated run: the real fleet core, which decides what to rent, with a simulated market, provider
// and ledger. Private to sim/.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <vector>

#include "sim/run_scenario.hpp"

namespace echoline::sim {

inline constexpr double kNeverS = 1e18;  // after all events of a run

class RunFleet {
 public:
  struct Hooks {
    // A machine has been rented. `joins_s`: when its worker joins, or kNeverS.
    std::function<void(provisioner::Ticket, std::size_t offer, double joins_s)> on_booting;
    std::function<void(provisioner::Ticket)> on_returned;  // the machine has ended at the fleet core's request
    std::function<void(WorkerId)> on_drain;                // the worker takes no new work and ends what it has
  };
  RunFleet(const RunScenario& scenario, const provisioner::FleetRules& rules, const std::vector<std::size_t>& wanted,
           Hooks hooks, RunResult& result);

  void tick(double now_s);
  void handle(const provisioner::FleetEvent& event, double now_s);
  // Rents nothing more and returns all machines.
  void close(const std::string& why, double now_s);
  provisioner::FleetStatus numbers() const { return core_->numbers(); }
  bool empty() const { return core_->machines().empty(); }        // nothing is rented
  double usd(double now_s) const;                                 // total cost so far, with the learner
  double usd_per_hour() const { return rent_usd_per_hour_sum_; }  // of all machines, without the learner
  // Tickets are counted from 1, in the order of result_.machines and rentals_.
  SimMachine& machine(provisioner::Ticket ticket) { return result_.machines[static_cast<std::size_t>(ticket) - 1]; }
  // Reports to the fleet core that the machine has died, or was taken away because another customer offered more
  // (`outbid`).
  void lose_machine(provisioner::Ticket ticket, bool outbid, double now_s);
  void record_traffic(provisioner::Ticket ticket, double bytes_in, double bytes_forwarded);
  void check() const;  // aborts if the sum of rents disagrees with the rentals

 private:
  struct MarketOffer {
    provisioner::FleetOffer listed;  // as the core sees it
    double usd_per_hour = 0;         // true rent
    double available_from_s = 0;     // when it is available again; kNeverS: rented
  };
  struct Rental {
    std::size_t offer = 0;
    bool is_paid = true;   // its end is not booked, so it costs
    bool is_gone = false;  // the provider has no such machine
  };
  struct Answer {  // of the provider or ledger, to one of the core's actions
    double at_s = 0;
    std::uint64_t sequence = 0;  // order of answers at the same time
    provisioner::FleetEvent event;
    friend bool operator>(const Answer& a, const Answer& b) {
      return a.at_s != b.at_s ? a.at_s > b.at_s : a.sequence > b.sequence;
    }
  };
  void carry_out(const std::vector<provisioner::FleetAction>& actions);
  void perform(const provisioner::fleet::Book& book);
  void perform(const provisioner::fleet::Start& start);
  void perform(const provisioner::fleet::Stop& stop);
  void perform(const provisioner::fleet::FindInstance& search);
  void perform(const provisioner::fleet::BookEnd& end);
  void perform(const provisioner::fleet::GiveUp&) {}       // only informs the learner about a worker
  void perform(const provisioner::fleet::CancelStart&) {}  // here, no start waits to be sent
  void perform(const provisioner::fleet::Drain& drain);
  void perform(const provisioner::fleet::Note& note);
  void answer(double after_s, provisioner::FleetEvent event);
  // Adds the rent since the last call to the result. Needed before each change of rent_usd_per_hour_sum_.
  void settle_rent(double now_s);
  Rental& rental(provisioner::Ticket ticket) { return rentals_[static_cast<std::size_t>(ticket) - 1]; }
  // The cheapest available offers, as many as a search returns.
  std::vector<provisioner::FleetOffer> search_result() const;

  const RunScenario& scenario_;
  Hooks hooks_;
  RunResult& result_;
  Draws draws_;  // refusals, boot times, machines that never join
  std::vector<MarketOffer> offers_;
  std::vector<std::size_t> cheapest_first_;                      // indices of offers_, cheapest per rollout first
  std::map<std::string, std::size_t, std::less<>> index_by_id_;  // of offers_
  std::optional<provisioner::FleetCore> core_;
  std::vector<Rental> rentals_;  // by ticket
  std::priority_queue<Answer, std::vector<Answer>, std::greater<>> answers_;
  std::uint64_t next_sequence_ = 0;
  double now_s_ = 0, rent_usd_per_hour_sum_ = 0;  // $ per hour of all machines that cost
  double settled_s_ = 0, searched_s_ = 0;         // times of the last settle_rent() and the last search
};

}  // namespace echoline::sim
