// Releases the instances of a run, provider by provider; `echoline down` calls it.
#include "provisioner/down.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

namespace echoline::provisioner {
namespace {

constexpr Duration kPause = std::chrono::milliseconds(20);
constexpr int kRoundsMax = 5;
constexpr double kRecentS = 60;  // an instance intended this recently may be missing from listings
constexpr Duration kListRetry = std::chrono::seconds(10);
constexpr Ticket kListing = -1, kAccount = -2;

// Releases the run's instances of one provider.
class ProviderRelease {
 public:
  ProviderRelease(Ledger& ledger, const Clock& clock, const DownOptions& options, std::string name, DownReport& report)
      : ledger_(ledger), clock_(clock), options_(options), name_(std::move(name)), report_(report) {}

  Status run() {
    ECHO_ASSIGN(std::vector<LedgerRow> rows, open_rows());
    auto made = options_.provider(name_);
    if (!made) {
      if (!rows.empty()) add_problem(made.error().message());
      return ok();
    }
    provider_ = std::move(*made);
    deadline_ = clock_.now() + options_.timeout;
    for (int round = 0; round < kRoundsMax;) {
      const std::optional<Listed> listed = list(kListing, ledger_.label_prefix());
      if (!listed) return ok();
      for (const InstanceInfo& info : listed->instances) {
        seen_any_ = true;
        ECHO_TRY(ledger_.record_found_instance(name_, info.instance.text, info.label, info.usd_per_hour,
                                               clock_.unix_seconds()));
      }
      ECHO_ASSIGN(rows, open_rows());
      if (!listed->complete) add_problem(listed->error ? listed->error->message() : "the listing is incomplete");
      if (std::none_of(rows.begin(), rows.end(), [](const LedgerRow& row) { return !row.instance.empty(); })) {
        if (!listed->complete) return ok();
        if (!is_any_recent(rows)) return book_never_rented(rows);
        wait(kListRetry);
        continue;
      }
      ++round;
      const std::size_t before = report_.problems.size();
      ECHO_TRY(stop_all(rows));
      if (report_.problems.size() > before || !listed->complete) return ok();
    }
    add_problem("instances keep appearing under this run's label; is its learner still alive?");
    return ok();
  }

 private:
  void add_problem(const std::string& what) { report_.problems.push_back(fmt::format("{}: {}", name_, what)); }

  Result<std::vector<LedgerRow>> open_rows() const {
    ECHO_ASSIGN(std::vector<LedgerRow> rows, ledger_.rows());
    std::erase_if(rows, [&](const LedgerRow& row) { return !row.is_open() || row.provider != name_; });
    return rows;
  }

  void wait(Duration d) const {
    if (options_.pause)
      options_.pause(d);
    else
      std::this_thread::sleep_for(d);
  }

  // Polls until `take` returns true for an event. False after the timeout.
  template <class Take>
  bool poll_until(Take&& take) {
    while (clock_.now() < deadline_) {
      bool enough = false;
      for (const ProviderEvent& event : provider_->poll(clock_.now())) enough = take(event) || enough;
      if (enough) return true;
      wait(kPause);
    }
    add_problem(fmt::format("no answer within {}; run `echoline down` again", to_text(options_.timeout)));
    return false;
  }

  std::optional<Listed> list(Ticket ticket, const std::string& prefix) {
    std::optional<Listed> answer;
    provider_->list(ticket, prefix);
    poll_until([&](const ProviderEvent& event) {
      if (const auto* listed = std::get_if<Listed>(&event); listed && listed->ticket == ticket) answer = *listed;
      return answer.has_value();
    });
    return answer;
  }

  bool is_any_recent(const std::vector<LedgerRow>& rows) const {
    return std::any_of(rows.begin(), rows.end(), [&](const LedgerRow& row) {
      const double age = clock_.unix_seconds() - row.intended_unix_s;
      return age >= 0 && age < kRecentS;
    });
  }

  Status stop_all(const std::vector<LedgerRow>& rows) {
    std::map<Ticket, const LedgerRow*> waiting;
    std::vector<const LedgerRow*> absent;
    for (const LedgerRow& row : rows) {
      if (row.instance.empty()) continue;
      ECHO_TRY(ledger_.record_stop_request(row.id, clock_.unix_seconds()));
      waiting[row.id] = &row;
      provider_->stop(row.id, {row.instance}, options_.grace);
    }
    Status booked = ok();
    poll_until([&](const ProviderEvent& event) {
      if (const auto* stopped = std::get_if<Stopped>(&event)) {
        const auto it = waiting.find(stopped->ticket);
        if (it == waiting.end()) return false;
        if (stopped->absent && !it->second->stop_asked_unix_s) {
          absent.push_back(it->second);
        } else {
          seen_any_ = seen_any_ || !stopped->absent;
          if (const Status status = end(*it->second, stopped->how); !status) booked = status;
        }
        waiting.erase(it);
      } else if (const auto* failed = std::get_if<StopFailed>(&event)) {
        if (waiting.erase(failed->ticket) > 0)
          add_problem(fmt::format("{} may still be rented: {}", failed->instance.text, failed->error.message()));
      }
      return waiting.empty();
    });
    ECHO_TRY(booked);
    if (absent.empty()) return ok();
    // The service does not know them, although nothing asked it to end them. If it knows any other instance of this run
    // or account, they are gone; otherwise it may be the wrong account.
    if (!options_.absent_is_gone && !seen_any_) {
      const std::optional<Listed> account = list(kAccount, "");
      if (!account || !account->complete || account->instances.empty()) {
        add_problem(fmt::format(
            "the service knows none of the {} instances that the ledger has as running, and no others: is this "
            "the key of the account that rented them? If they are gone, add --gone",
            absent.size()));
        return ok();
      }
    }
    for (const LedgerRow* row : absent) ECHO_TRY(end(*row, "gone before a request to stop it"));
    return ok();
  }

  Status end(const LedgerRow& row, const std::string& how) {
    report_.released.push_back({name_, row.instance, row.label, how});
    return ledger_.record_end(row.id, how, clock_.unix_seconds());
  }

  // Call if a complete listing shows none of the rows' instances.
  Status book_never_rented(const std::vector<LedgerRow>& rows) {
    for (const LedgerRow& row : rows) {
      report_.released.push_back({name_, "", row.label, "was never rented"});
      ECHO_TRY(ledger_.record_failure(row.id, "requested, but not in a complete listing", clock_.unix_seconds()));
    }
    return ok();
  }

  Ledger& ledger_;
  const Clock& clock_;
  const DownOptions& options_;
  std::string name_;
  DownReport& report_;
  std::unique_ptr<Provider> provider_;
  TimePoint deadline_{};
  bool seen_any_ = false;  // the service has shown an instance of this run
};

}  // namespace

Result<DownReport> bring_down(Ledger& ledger, const Clock& clock, const DownOptions& options) {
  std::set<std::string> names(options.providers.begin(), options.providers.end());
  ECHO_ASSIGN(const std::vector<LedgerRow> rows, ledger.rows());
  for (const LedgerRow& row : rows)
    if (row.is_open()) names.insert(row.provider);
  DownReport report;
  for (const std::string& name : names) {
    ProviderRelease release(ledger, clock, options, name, report);
    ECHO_TRY(release.run());
  }
  return report;
}

}  // namespace echoline::provisioner
