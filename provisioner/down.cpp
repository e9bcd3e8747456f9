// Releases the instances of a run, provider by provider; `echoline down` calls it.
#include "provisioner/down.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "provisioner/providers/command.hpp"

namespace echoline::provisioner {
namespace {

constexpr Duration kPollInterval = std::chrono::milliseconds(20);
constexpr int kStopRoundsMax = 5;      // a round: a listing, and stops of the instances that it shows
constexpr double kRecentSeconds = 60;  // a listing may lack an instance that was requested less long ago
constexpr Duration kListingRetryPause = std::chrono::seconds(10);
// Tickets of listings, of the instances with the run's label and of all instances. Tickets of stops are not negative.
constexpr Ticket kRunListing = -1, kAccountListing = -2;

void wait_for(const DownOptions& options, Duration pause) {
  if (options.pause)
    options.pause(pause);
  else
    std::this_thread::sleep_for(pause);
}

// Releases the run's instances of one provider.
class ProviderRelease {
 public:
  ProviderRelease(Ledger& ledger, const Clock& clock, const DownOptions& options, std::string name, DownReport& report)
      : ledger_(ledger), clock_(clock), options_(options), name_(std::move(name)), report_(report) {}

  Status run() {
    ECHO_ASSIGN(std::vector<LedgerRow> rows, open_rows());
    auto provider = options_.provider(name_);
    if (!provider) {
      // Without rows, the run never used this provider, so the user may lack a key for it.
      if (!rows.empty()) add_problem(provider.error().message());
      return ok();
    }
    provider_ = std::move(*provider);
    deadline_ = clock_.now() + options_.timeout;
    for (int round = 0; round < kStopRoundsMax;) {
      const std::optional<Listed> listed = list(kRunListing, ledger_.label_prefix());
      if (!listed) return ok();
      for (const InstanceInfo& info : listed->instances) {
        knows_run_ = true;
        // Changes nothing for an instance that the ledger has.
        ECHO_TRY(ledger_.record_found_instance(name_, info.instance.text, info.label, info.usd_per_hour,
                                               clock_.unix_seconds()));
      }
      ECHO_ASSIGN(rows, open_rows());
      if (!listed->complete) add_problem(listed->error ? listed->error->message() : "the listing is incomplete");
      if (listed->error && listed->error->code == Code::kInvalid) return ok();  // the key is refused, for stops as well
      const bool has_instances =
          std::any_of(rows.begin(), rows.end(), [](const LedgerRow& row) { return !row.instance.empty(); });
      if (!has_instances) {
        if (!listed->complete) return ok();
        if (!is_any_recent(rows)) return book_never_rented(rows);
        wait(kListingRetryPause);
        continue;  // nothing was stopped, so this is no round; the rows cease to be recent, so the loop ends
      }
      ++round;
      const std::size_t problems_before = report_.problems.size();
      ECHO_TRY(stop_all(rows));
      if (report_.problems.size() > problems_before || !listed->complete) return ok();
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

  void wait(Duration pause) const { wait_for(options_, pause); }

  // Polls until `handle` returns true for an event, or until the timeout, which is a problem.
  template <class Handle>
  void poll_until(Handle&& handle) {
    while (clock_.now() < deadline_) {
      bool is_done = false;
      for (const ProviderEvent& event : provider_->poll(clock_.now())) {
        deadline_ = clock_.now() + options_.timeout;  // every event starts the timeout again
        if (handle(event)) is_done = true;
      }
      if (is_done) return;
      wait(kPollInterval);
    }
    add_problem(fmt::format("no answer within {}; run `echoline down` again", to_text(options_.timeout)));
  }

  // Absent after the timeout.
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
      const double age_s = clock_.unix_seconds() - row.intended_unix_s;
      return age_s >= 0 && age_s < kRecentSeconds;
    });
  }

  Status stop_all(const std::vector<LedgerRow>& rows) {
    std::map<Ticket, const LedgerRow*> unanswered;
    std::vector<const LedgerRow*> unknown_rows;  // rows whose instances the service does not know
    for (const LedgerRow& row : rows) {
      if (row.instance.empty()) continue;
      ECHO_TRY(ledger_.record_stop_request(row.id, clock_.unix_seconds()));
      unanswered[row.id] = &row;
      provider_->stop(row.id, {row.instance}, options_.grace);
    }
    Status booked = ok();
    poll_until([&](const ProviderEvent& event) {
      if (const auto* stopped = std::get_if<Stopped>(&event)) {
        const auto it = unanswered.find(stopped->ticket);
        if (it == unanswered.end()) return false;
        const LedgerRow& row = *it->second;
        unanswered.erase(it);
        // The row was read before the present request was recorded, so it has the time of an earlier request.
        const std::optional<double> earlier_stop_unix_s = row.stop_asked_unix_s;
        if (stopped->absent && !earlier_stop_unix_s) {
          unknown_rows.push_back(&row);
        } else {
          if (!stopped->absent) knows_run_ = true;
          // An absent instance has ended by the earlier request, but not before its last sign of life.
          const double end_unix_s =
              stopped->absent ? std::max(row.last_known_unix_s(), *earlier_stop_unix_s) : clock_.unix_seconds();
          if (const Status status = end(row, stopped->how, end_unix_s); !status) booked = status;
        }
      } else if (const auto* failed = std::get_if<StopFailed>(&event)) {
        if (unanswered.erase(failed->ticket) > 0)
          add_problem(fmt::format("{} may still be rented: {}", failed->instance.text, failed->error.message()));
      }
      return unanswered.empty();
    });
    ECHO_TRY(booked);
    if (unknown_rows.empty()) return ok();
    // The service does not know these instances, although no request ended them. If it knows another instance of this
    // run or account, they have ended. Otherwise the key may belong to another account.
    if (!options_.absent_is_gone && !knows_run_) {
      const std::optional<Listed> account = list(kAccountListing, /*prefix=*/"");
      const bool knows_any = account && account->complete && !account->instances.empty();
      if (!knows_any && !is_any_billed(unknown_rows)) {
        add_problem(fmt::format(
            "the service knows none of the {} instances that the ledger has as running, and no others: is this "
            "the key of the account that rented them? If they are gone, add --gone",
            unknown_rows.size()));
        return ok();
      }
    }
    // They ended while no process of the run watched them, perhaps days ago.
    for (const LedgerRow* row : unknown_rows)
      ECHO_TRY(end(*row, "gone before a request to stop it", row->last_known_unix_s()));
    return ok();
  }

  Status end(const LedgerRow& row, const std::string& how, double unix_s) {
    report_.released.push_back({.provider = name_, .instance = row.instance, .label = row.label, .what = how});
    return ledger_.record_end(row.id, how, unix_s);
  }

  bool is_any_billed(const std::vector<const LedgerRow*>& rows) const {
    if (!options_.bill) return false;
    double from_unix_s = clock_.unix_seconds();
    for (const LedgerRow* row : rows) from_unix_s = std::min(from_unix_s, row->intended_unix_s);
    const Result<Bill> bill = options_.bill(name_, from_unix_s, clock_.unix_seconds());
    return bill && std::any_of(bill->charges.begin(), bill->charges.end(), [&](const Charge& charge) {
             return std::any_of(rows.begin(), rows.end(),
                                [&](const LedgerRow* row) { return row->instance == charge.instance.text; });
           });
  }

  // Requires that a complete listing shows none of the rows' instances.
  Status book_never_rented(const std::vector<LedgerRow>& rows) {
    for (const LedgerRow& row : rows) {
      report_.released.push_back({.provider = name_, .instance = "", .label = row.label, .what = "was never rented"});
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
  bool knows_run_ = false;  // the service has shown an instance of this run, so the key is right
};

// Releases the instances of one provider that have a label of `run`, or of any run if `run` is empty.
class LabelRelease {
 public:
  LabelRelease(const Clock& clock, const DownOptions& options, std::string name, std::string run, DownReport& report)
      : clock_(clock), options_(options), name_(std::move(name)), run_(std::move(run)), report_(report) {}

  void run() {
    auto provider = options_.provider(name_);
    if (!provider) return add_problem(provider.error().message());
    provider_ = std::move(*provider);
    for (int round = 0; round < kStopRoundsMax; ++round) {
      const std::optional<Listed> listed = list();
      if (!listed) return;
      std::map<Ticket, InstanceInfo> unanswered;
      for (const InstanceInfo& info : listed->instances)
        if (is_label_of_run(info.label, run_)) unanswered[static_cast<Ticket>(unanswered.size())] = info;
      if (!listed->complete) add_problem(listed->error ? listed->error->message() : "the listing is incomplete");
      if (unanswered.empty()) return;
      const std::size_t problems_before = report_.problems.size();
      stop_all(std::move(unanswered));
      if (report_.problems.size() > problems_before || !listed->complete) return;
    }
    add_problem("instances keep appearing; is a learner still alive?");
  }

 private:
  void add_problem(const std::string& what) { report_.problems.push_back(fmt::format("{}: {}", name_, what)); }

  std::optional<Listed> list() {
    std::optional<Listed> answer;
    provider_->list(kAccountListing, /*label_prefix=*/"");
    poll_until([&](const ProviderEvent& event) {
      if (const auto* listed = std::get_if<Listed>(&event)) answer = *listed;
      return answer.has_value();
    });
    return answer;
  }

  void stop_all(std::map<Ticket, InstanceInfo> unanswered) {
    for (const auto& [ticket, info] : unanswered) provider_->stop(ticket, info.instance, options_.grace);
    poll_until([&](const ProviderEvent& event) {
      if (const auto* stopped = std::get_if<Stopped>(&event)) {
        const auto it = unanswered.find(stopped->ticket);
        if (it == unanswered.end()) return false;
        report_.released.push_back(
            {.provider = name_, .instance = it->second.instance.text, .label = it->second.label, .what = stopped->how});
        unanswered.erase(it);
      } else if (const auto* failed = std::get_if<StopFailed>(&event)) {
        if (unanswered.erase(failed->ticket) > 0)
          add_problem(fmt::format("{} may still be rented: {}", failed->instance.text, failed->error.message()));
      }
      return unanswered.empty();
    });
  }

  // As in ProviderRelease.
  template <class Handle>
  void poll_until(Handle&& handle) {
    TimePoint deadline = clock_.now() + options_.timeout;
    while (clock_.now() < deadline) {
      bool is_done = false;
      for (const ProviderEvent& event : provider_->poll(clock_.now())) {
        deadline = clock_.now() + options_.timeout;
        if (handle(event)) is_done = true;
      }
      if (is_done) return;
      wait_for(options_, kPollInterval);
    }
    add_problem(fmt::format("no answer within {}; run the command again", to_text(options_.timeout)));
  }

  const Clock& clock_;
  const DownOptions& options_;
  const std::string name_, run_;
  DownReport& report_;
  std::unique_ptr<Provider> provider_;
};

}  // namespace

bool is_label_of_run(std::string_view label, std::string_view run) {
  // A label is "RUN.MARK/ROW": MARK is eight hexadecimal digits, ROW the decimal number of a ledger row. An instance
  // name made from a label has '-' instead of '.' and '/'.
  constexpr std::size_t kMarkDigits = 8;
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t row_begin = label.size();
  while (row_begin > 0 && is_digit(label[row_begin - 1])) --row_begin;
  // Before the row, a label has at least one character of the run's name, the mark and two separators.
  constexpr std::size_t kRowBeginMin = 1 + kMarkDigits + 2;
  if (row_begin == label.size() || row_begin < kRowBeginMin) return false;
  const char row_separator = label[row_begin - 1];
  const std::string_view before_row = label.substr(0, row_begin - 1);
  const std::string_view mark = before_row.substr(before_row.size() - kMarkDigits);
  const char mark_separator = before_row[before_row.size() - kMarkDigits - 1];
  const bool is_label = row_separator == '/' && mark_separator == '.';
  const bool is_name = row_separator == '-' && mark_separator == '-';
  if (!is_label && !is_name) return false;
  if (!std::all_of(mark.begin(), mark.end(), [&](char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); }))
    return false;
  const std::string_view name = before_row.substr(0, before_row.size() - kMarkDigits - 1);
  return run.empty() || name == run || (is_name && name == instance_name_of_label(run));
}

DownReport bring_down_labelled(const Clock& clock, const DownOptions& options, const std::string& run) {
  DownReport report;
  for (const std::string& name : options.providers) LabelRelease(clock, options, name, run, report).run();
  return report;
}

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
