// The durable record of everything rented: a row is on disk before an instance is asked for, so none is forgotten.
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

// intended -> running -> ended | failed;  intended -> failed | ended.
enum class InstanceState { kIntended, kRunning, kEnded, kFailed };
std::string_view to_string(InstanceState state);

// What an hour costs from `from_unix_s` until the next price, or the end.
struct LedgerPrice {
  double from_unix_s = 0, usd_per_hour = 0;
};

struct LedgerRow {
  std::int64_t id = 0;
  std::string run;
  std::string label;  // Ledger::label_prefix() and the row's number: what the provider is told
  std::string offer;
  std::string provider;
  std::string instance;  // the provider's id; "" until running
  std::string host, gpu;
  int gpu_count = 1;
  InstanceState state = InstanceState::kIntended;
  double usd_per_hour = 0;          // gpu + storage, as far as they are stated; the newest of `prices`
  bool price_known = false;         // the offer states all of it, traffic included
  std::vector<LedgerPrice> prices;  // in the order they were noted, from the intention on
  std::optional<double> upload_usd_per_gb;
  std::optional<double> download_usd_per_gb;
  Bytes uploaded, downloaded;
  double intended_unix_s = 0;
  std::optional<double> running_unix_s;
  std::optional<double> alive_unix_s;       // last time it was known to run
  std::optional<double> stop_asked_unix_s;  // since when the provider is asked to end it
  std::optional<double> ended_unix_s;
  std::optional<double> promised_rollouts_per_s, measured_rollouts_per_s;
  std::optional<BitRate> measured_up, measured_down;
  std::string note;  // why it ended or failed

  bool open() const { return state == InstanceState::kIntended || state == InstanceState::kRunning; }
  // Cost so far: the hours of every price's interval, from the intention until the end, times that price; and traffic.
  // What failed before it ran costs nothing; what is still intended is counted, since it may exist.
  double usd(double now_unix_s) const { return usd_rent(now_unix_s) + usd_traffic(); }
  double usd_rent(double now_unix_s) const;
  double usd_traffic() const;
  // The last time that is known of it: what to end it at when the process that rented it is gone, and it with that.
  double last_known_unix_s() const { return alive_unix_s.value_or(running_unix_s.value_or(intended_unix_s)); }
};

// A sign of life of an instance, and its traffic since the last one.
struct LedgerSign {
  std::int64_t row = 0;
  Bytes uploaded, downloaded;
};

// What a machine has shown that it does; what is absent stays as it was noted before.
struct LedgerMeasure {
  std::optional<double> rollouts_per_s;
  std::optional<BitRate> up, down;
};

// What the service itself says that it charged for an instance on a day (UTC), so far.
struct LedgerCharge {
  std::int64_t row = 0;
  double day_unix_s = 0;
  double usd = 0, usd_rent = 0, usd_traffic = 0;
};

// What is left on the account of a provider.
struct LedgerCredit {
  std::string provider;
  double usd = 0, unix_s = 0;
};

struct LedgerTotals {
  double usd = 0;
  double usd_per_hour = 0;   // of what is intended or running now
  bool prices_known = true;  // of all that ran; otherwise `usd` is the least it can be
  std::size_t intended = 0, running = 0, ended = 0, failed = 0;
};

struct LedgerState {
  std::int64_t row = 0;
  InstanceState state = InstanceState::kIntended;
  double unix_s = 0;
  std::string note;
};

// Why the fleet was changed, or was not.
struct LedgerDecision {
  double unix_s = 0;
  std::string what, why;  // "book", "12.3 of 14.0 rollouts/s for 30 s"
  std::string numbers;    // a JSON object
};

// A machine as runs have known it.
struct LedgerHost {
  std::string run, provider, host, gpu;
  int gpu_count = 1;
  std::optional<double> promised_rollouts_per_s, measured_rollouts_per_s;
  std::optional<BitRate> up, down;
  double unix_s = 0;  // of the measurement, or of the end
  double hours = 0;   // rented, as far as is known
  bool lost = false;  // it ended although nobody asked it to, or never came to work
};

// One SQLite file (WAL, synchronous FULL) that several runs may share. Use from one thread. Times are unix seconds
// given by the caller. Every change is durable when the call returns.
class Ledger {
 public:
  // Opens or creates the file for `run`, and brings an older one up to date. kIo when it cannot be opened; kCorrupt
  // when it is no ledger or is newer.
  static Result<Ledger> open(const std::filesystem::path& path, const std::string& run);
  Ledger(Ledger&&) noexcept;
  Ledger& operator=(Ledger&&) noexcept;
  ~Ledger();

  // What the labels of this run's instances begin with, and of nobody else's: the run's name and a mark of this ledger.
  const std::string& label_prefix() const;
  // Rows of any run that were intended or running when the file was opened: perhaps still rented. Settle each with
  // ended() or failed() once the provider confirms.
  const std::vector<LedgerRow>& orphans() const;

  // Before the provider is asked. Returns the new row. With a bid, that is what it costs.
  Result<LedgerRow> intend(const Offer& offer, double now_unix_s,
                           std::optional<double> bid_usd_per_hour = std::nullopt);
  // An instance that carries a label of this run and that no row knows: the row it is booked under, running.
  Result<LedgerRow> found(const std::string& provider, const std::string& instance, const std::string& label,
                          std::optional<double> usd_per_hour, double now_unix_s);
  // Errors of these: kNotFound for an unknown row, kInvalid for a step the row's state does not allow.
  Status running(std::int64_t row, const std::string& instance, double now_unix_s);
  Status ended(std::int64_t row, const std::string& note, double now_unix_s);
  Status failed(std::int64_t row, const std::string& note, double now_unix_s);
  // Before the provider is asked to end it: an instance that is not there any more was then ended by that.
  Status stop_asked(std::int64_t row, double now_unix_s);
  // From now on it costs this much.
  Status priced(std::int64_t row, double usd_per_hour, double now_unix_s);
  Status measured(std::int64_t row, const LedgerMeasure& measure, double now_unix_s);
  // Books traffic, and that the instances run; all or none.
  Status alive(std::span<const LedgerSign> signs, double now_unix_s);
  Status decided(const LedgerDecision& decision);
  // Replaces what was noted of the same days; all or none.
  Status charged(std::span<const LedgerCharge> charges, const std::optional<LedgerCredit>& credit, double now_unix_s);

  // Rows of this run, oldest first.
  Result<std::vector<LedgerRow>> rows() const;
  Result<std::vector<LedgerState>> states() const;
  Result<std::vector<LedgerDecision>> decisions() const;
  Result<std::vector<LedgerCharge>> charges() const;
  Result<std::vector<LedgerCredit>> credits() const;
  // Of all runs in the file.
  Result<std::vector<LedgerHost>> hosts() const;
  Result<LedgerTotals> totals(double now_unix_s) const;

 private:
  struct Impl;
  explicit Ledger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// What the ledgers of all runs below `folder` (FOLDER/RUN/ledger.sqlite) know of machines, newest first. What cannot be
// read is left out: it is advice, not money.
std::vector<LedgerHost> known_hosts(const std::filesystem::path& folder);

}  // namespace echoline::provisioner
