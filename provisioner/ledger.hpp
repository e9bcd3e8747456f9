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

struct LedgerRow {
  std::int64_t id = 0;
  std::string run;
  std::string label;  // "<run>/<row>": what the provider is told
  std::string offer;
  std::string provider;
  std::string instance;  // the provider's id; "" until running
  InstanceState state = InstanceState::kIntended;
  double usd_per_hour = 0;   // gpu + storage, as far as the offer states them
  bool price_known = false;  // the offer states all of it, traffic included
  std::optional<double> upload_usd_per_gb;
  std::optional<double> download_usd_per_gb;
  Bytes uploaded, downloaded;
  double intended_unix_s = 0;
  std::optional<double> running_unix_s;
  std::optional<double> alive_unix_s;  // last time it was known to run
  std::optional<double> ended_unix_s;
  std::string note;  // why it ended or failed

  // Cost so far: hours since intended (until ended) * usd_per_hour + GB * $/GB. What failed before it ran costs
  // nothing; what is still intended is counted, since it may exist.
  double usd(double now_unix_s) const;
  // The last time that is known of it: what to end it at when the process that rented it is gone, and it with that.
  double last_known_unix_s() const { return alive_unix_s.value_or(running_unix_s.value_or(intended_unix_s)); }
};

// A sign of life of an instance, and its traffic since the last one.
struct LedgerSign {
  std::int64_t row = 0;
  Bytes uploaded, downloaded;
};

struct LedgerTotals {
  double usd = 0;
  double usd_per_hour = 0;     // of what is intended or running now
  bool prices_known = true;    // of all that ran; otherwise `usd` is the least it can be
  std::size_t intended = 0, running = 0, ended = 0, failed = 0;
};

// One SQLite file (WAL, synchronous FULL) that several runs may share. Use from one thread. Times are unix seconds
// given by the caller. Every change is durable when the call returns.
class Ledger {
 public:
  // Opens or creates the file for `run`. kIo when it cannot be opened; kCorrupt when it is no ledger or is newer.
  static Result<Ledger> open(const std::filesystem::path& path, const std::string& run);
  Ledger(Ledger&&) noexcept;
  Ledger& operator=(Ledger&&) noexcept;
  ~Ledger();

  // Rows of any run that were intended or running when the file was opened: perhaps still rented. Settle each with
  // ended() or failed() once the provider confirms.
  const std::vector<LedgerRow>& orphans() const;

  // Before the provider is asked. Returns the new row.
  Result<LedgerRow> intend(const Offer& offer, double now_unix_s);
  // Errors of these: kNotFound for an unknown row, kInvalid for a step the row's state does not allow.
  Status running(std::int64_t row, const std::string& instance, double now_unix_s);
  Status ended(std::int64_t row, const std::string& note, double now_unix_s);
  Status failed(std::int64_t row, const std::string& note, double now_unix_s);
  // Books traffic, and that the instances run; all or none.
  Status alive(std::span<const LedgerSign> signs, double now_unix_s);

  // Rows of this run, oldest first.
  Result<std::vector<LedgerRow>> rows() const;
  Result<LedgerTotals> totals(double now_unix_s) const;

 private:
  struct Impl;
  explicit Ledger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::provisioner
