// Releases everything that a run has rented. Only providers' answers and complete listings count as proof of an end.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

struct DownOptions {
  std::function<Result<std::unique_ptr<Provider>>(const std::string& name)> provider;
  std::vector<std::string> providers;  // names of providers to check besides those of the ledger's rows
  // Reads a provider's bill; absent, or kNotFound: there is none. An account whose bill has one of the run's instances
  // is the account that rented them.
  std::function<Result<Bill>(const std::string& provider, double from_unix_s, double to_unix_s)> bill;
  // Treat instances that the service does not know as gone, even if it knows none at all.
  bool absent_is_gone = false;
  Duration grace = std::chrono::seconds(5);     // between the request to end an instance and a forced end
  Duration timeout = std::chrono::minutes(10);  // for the next answer of a provider
  std::function<void(Duration)> pause;          // waits; absent: sleeps
};

struct DownReport {
  struct Line {
    std::string provider, instance, label, what;
  };
  std::vector<Line> released;
  std::vector<std::string> problems;  // empty if complete listings show that nothing is left
};

// Releases everything that the ledger has as intended or running, and every instance with this run's label that the
// ledger lacks; such an instance gets a row first. Rows end when the provider confirms. An intended row whose
// instance a complete listing lacks is recorded as failed. Calling it twice does no harm. Returns the ledger's errors;
// all others are in the report.
Result<DownReport> bring_down(Ledger& ledger, const Clock& clock, const DownOptions& options);

// Whether a ledger gives this label to instances of `run` ("": of any run). Also true for the name made of such a
// label.
bool is_label_of_run(std::string_view label, std::string_view run);

// Releases every instance of options.providers with such a label, without a ledger. For a machine that has only
// the key, or after the loss of the ledger. The instances of living runs are released as well.
DownReport bring_down_labelled(const Clock& clock, const DownOptions& options, const std::string& run);

}  // namespace echoline::provisioner
