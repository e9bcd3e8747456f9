// The run's ledger, with the measurements and ends of machines that it does not have yet. Private to fleet_driver.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "provisioner/fleet_core.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/links.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

inline void log_error(const Status& status) {
  if (!status) log::error("{}", status.error().message());
}

// A worker's counters at the time `at`, as FleetDriver::on_heartbeat() receives them.
struct WorkerTraffic {
  WorkerId worker;
  Bytes received, forwarded, delivered;
  TimePoint at;
};

// The newest data of a rental. "Booked" values are those that the ledger has.
struct MachineRecord {
  std::string label;                            // kept after the rental's end
  Bytes received, forwarded;                    // the worker's counters
  Bytes received_unbooked, forwarded_unbooked;  // the part of this traffic that is not in the ledger yet
  std::optional<double> rollouts_per_s_booked;
  LinkMeter up_meter, down_meter;  // speeds of the worker's links
  std::optional<BitRate> up_booked, down_booked;
  std::optional<double> last_known_unix_s;  // of an earlier process's machine: its last sign of life
  bool is_running = false;                  // this process knows that its instance is rented
  void add_traffic(const WorkerTraffic& traffic);
};

class FleetBooks {
 public:
  FleetBooks(Ledger ledger, const Clock& clock) : ledger_(std::move(ledger)), clock_(clock) {}
  Ledger& ledger() { return ledger_; }
  MachineRecord& record(Ticket ticket) { return records_[ticket]; }
  // Books the intent to rent the offer. Returns the new row's number.
  Result<Ticket> book(const Offer& offer);
  // `row`: of a machine that an earlier process of the run rented.
  void add_earlier(const LedgerRow& row);
  // Books an instance that has a label of this run but no row. Logs an error.
  Result<LedgerRow> book_unknown(const std::string& provider, const InstanceInfo& info);
  void book_signs_of_life(const FleetMachines& machines);
  bool are_signs_of_life_due() const { return clock_.now() >= next_signs_of_life_at_; }
  // The next book_ends() books the end. Returns whether the instance ended while no process of the run watched it. The
  // time of its end is then its last sign of life, else now.
  bool end(const fleet::BookEnd& end);
  void book_ends();  // tries again with the ends that could not be booked before

 private:
  struct UnbookedEnd {
    fleet::BookEnd end;
    double unix_s = 0;
  };
  Ledger ledger_;
  const Clock& clock_;
  std::map<Ticket, MachineRecord> records_;
  std::vector<UnbookedEnd> unbooked_ends_;
  TimePoint next_signs_of_life_at_{};
};

}  // namespace echoline::provisioner
