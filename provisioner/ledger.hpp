// The durable record of all rentals. A row is on disk before its instance is requested, so that none is lost.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// An intended row's instance is about to be requested, or its request is not answered yet. The row becomes running,
// failed or ended; a running row becomes ended or failed.
enum class InstanceState { kIntended, kRunning, kEnded, kFailed };
std::string_view to_string(InstanceState state);

// The price per hour from `from_unix_s` until the next price or the end.
struct LedgerPrice {
  double from_unix_s = 0, usd_per_hour = 0;
};

struct LedgerRow {
  std::int64_t id = 0;
  std::string run;
  std::string label;  // by which the provider knows the instance: Ledger::label_prefix() and the row's id
  std::string offer;
  std::string provider;
  std::string instance;  // the provider's id; "" before it runs
  std::string host;      // the provider's id of the physical machine; the same in later rentals
  std::string gpu;       // model of its GPUs
  int gpu_count = 1;
  std::string engine;  // Offer::engine; "" in a row of an earlier version
  InstanceState state = InstanceState::kIntended;
  double usd_per_hour = 0;          // rent of GPUs and storage, as far as stated; the newest of `prices`
  bool price_known = false;         // the offer states all prices, that of traffic included
  std::vector<LedgerPrice> prices;  // oldest first; the first one is from `intended_unix_s`
  std::optional<double> upload_usd_per_gb;
  std::optional<double> download_usd_per_gb;
  Bytes uploaded, downloaded;
  double intended_unix_s = 0;  // when the row was written, before the instance was requested
  std::optional<double> running_unix_s;
  std::optional<double> alive_unix_s;       // when the instance was last known to run
  std::optional<double> stop_asked_unix_s;  // when the provider was first asked to end the instance
  std::optional<double> ended_unix_s;
  std::optional<double> promised_rollouts_per_s, measured_rollouts_per_s;
  std::optional<BitRate> measured_up, measured_down;
  std::string note;  // why the instance ended or failed

  bool is_open() const { return state == InstanceState::kIntended || state == InstanceState::kRunning; }
  // The cost so far: each price times the hours of its interval, from `intended_unix_s` to the end, plus traffic. A row
  // that failed before it ran costs nothing. An intended row counts, because its instance may exist.
  double usd(double now_unix_s) const { return usd_rent(now_unix_s) + usd_traffic(); }
  double usd_rent(double now_unix_s) const;
  double usd_traffic() const;
  // The last sign of life. It is recorded as the instance's end if that came while no process of the run was watching.
  double last_known_unix_s() const { return alive_unix_s.value_or(running_unix_s.value_or(intended_unix_s)); }
};

// An instance's sign of life, with its traffic since the one before.
struct LedgerSignOfLife {
  std::int64_t row = 0;
  Bytes uploaded, downloaded;
};

// Measurements of a machine. An absent value keeps the earlier one.
struct LedgerMeasurement {
  std::optional<double> rollouts_per_s;
  std::optional<BitRate> up, down;
};

// The provider's own bill for an instance on a day (UTC), so far.
struct LedgerCharge {
  std::int64_t row = 0;
  double day_unix_s = 0;
  double usd = 0, usd_rent = 0, usd_traffic = 0;
};

// The credit left on a provider's account.
struct LedgerCredit {
  std::string provider;
  double usd = 0, unix_s = 0;
};

struct LedgerTotals {
  double usd = 0;
  double usd_per_hour = 0;   // sum over intended and running rows
  bool prices_known = true;  // for all rows that ran; false: `usd` is a lower bound
  std::size_t intended = 0, running = 0, ended = 0, failed = 0;
};

struct LedgerStateChange {
  std::int64_t row = 0;
  InstanceState state = InstanceState::kIntended;
  double unix_s = 0;
  std::string note;
};

// Why the fleet was changed, or why not.
struct LedgerDecision {
  double unix_s = 0;
  std::string what, why;  // "book", "12.3 of 14.0 rollouts/s for 30 s"
  std::string numbers;    // a JSON object
};

// The history of a machine over runs.
struct LedgerHost {
  std::string run, provider, host, gpu;
  int gpu_count = 1;
  std::string engine;  // LedgerRow::engine
  std::optional<double> promised_rollouts_per_s, measured_rollouts_per_s;
  std::optional<BitRate> up, down;
  double unix_s = 0;  // when it was measured, or when it ended
  double hours = 0;   // rented, as far as known
  bool lost = false;  // after its worker had joined, the instance ended without a stop request
};

// An SQLite file (WAL, synchronous FULL), which several runs may share. Use from one thread. The caller passes times as
// unix seconds. Every change is durable when the call returns.
class Ledger {
 public:
  // Opens or creates the file for `run`, and migrates an older one. kIo if it cannot be opened; kCorrupt if it is not a
  // ledger or is newer.
  static Result<Ledger> open(const std::filesystem::path& path, const std::string& run);
  Ledger(Ledger&&) noexcept;
  Ledger& operator=(Ledger&&) noexcept;
  ~Ledger();

  // The prefix of all labels of this run: its name and a random mark, so that no other run has it.
  const std::string& label_prefix() const;
  // The orphans: rows of all runs that were intended or running when the file was opened. Their instances may still be
  // rented. Call record_end() or record_failure() for each once the provider confirms that its instance has ended or
  // never existed.
  const std::vector<LedgerRow>& orphans() const;

  // Writes a row for an instance that is about to be requested; call before the request. Returns the new row. A bid
  // replaces the offer's price.
  Result<LedgerRow> record_intent(const Offer& offer, double now_unix_s,
                                  std::optional<double> bid_usd_per_hour = std::nullopt);
  // Books an instance with a label of this run as running: in the row that has the label and waits for its instance, or
  // in a new row. Returns the row. Changes nothing if the instance has been booked before.
  Result<LedgerRow> record_found_instance(const std::string& provider, const std::string& instance,
                                          const std::string& label, std::optional<double> usd_per_hour,
                                          double now_unix_s);
  // Errors of all functions below that take a row: kNotFound if it is unknown, kInvalid if its state does not allow the
  // change.
  Status record_start(std::int64_t row, const std::string& instance, double now_unix_s);
  Status record_end(std::int64_t row, const std::string& note, double now_unix_s);
  Status record_failure(std::int64_t row, const std::string& note, double now_unix_s);
  // Call before the provider is asked to end the instance. An instance that is missing after such a request does not
  // count as lost.
  Status record_stop_request(std::int64_t row, double now_unix_s);
  // Sets the price from now on.
  Status record_price(std::int64_t row, double usd_per_hour, double now_unix_s);
  Status record_measurement(std::int64_t row, const LedgerMeasurement& measure, double now_unix_s);
  // Adds the traffic, and records that the instances are alive; all or none.
  Status record_signs_of_life(std::span<const LedgerSignOfLife> signs, double now_unix_s);
  Status record_decision(const LedgerDecision& decision);
  // Replaces the charges of the same rows and days; all or none.
  Status record_charges(std::span<const LedgerCharge> charges, const std::optional<LedgerCredit>& credit,
                        double now_unix_s);

  // Entries of this run, oldest first, unless stated otherwise.
  Result<std::vector<LedgerRow>> rows() const;
  Result<std::vector<LedgerStateChange>> states() const;
  Result<std::vector<LedgerDecision>> decisions() const;
  Result<std::vector<LedgerCharge>> charges() const;
  Result<std::vector<LedgerCredit>> credits() const;  // of all runs, by provider
  Result<std::vector<LedgerHost>> hosts() const;      // of all runs, newest first
  Result<LedgerTotals> totals(double now_unix_s) const;

 private:
  struct Impl;
  explicit Ledger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Machines known to the ledgers of all runs below `folder` (FOLDER/RUN/ledger.sqlite), newest first. Skips unreadable
// ledgers, because the result is only advice.
std::vector<LedgerHost> known_hosts(const std::filesystem::path& folder);

}  // namespace echoline::provisioner
