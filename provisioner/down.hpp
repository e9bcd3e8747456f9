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
  // Reads a provider's bill; absent, or kNotFound: there is none. If the bill has one of the run's instances, the key
  // is that of the account that rented all of them.
  std::function<Result<Bill>(const std::string& provider, double from_unix_s, double to_unix_s)> bill;
  // Treat instances that the service does not know as ended, even if it knows no instance at all.
  bool absent_is_gone = false;
  Duration grace = std::chrono::seconds(5);     // between the request to end an instance and a forced end
  Duration timeout = std::chrono::minutes(10);  // for the next answer of a provider
  std::function<void(Duration)> pause;          // waits; absent: sleeps
};

struct DownReport {
  struct Line {
    std::string provider, instance, label;
    std::string what;  // how it ended
  };
  std::vector<Line> released;
  std::vector<std::string> problems;  // empty if complete listings show that nothing is left
};

// Releases all instances that the ledger has as intended or running, and all instances with this run's label. An
// instance without a row in the ledger gets one first. A row ends when the provider confirms the end of its instance. A
// row without an instance is recorded as failed if a complete listing shows no instance with its label. Idempotent.
// Returns the ledger's errors; all others are in the report.
Result<DownReport> bring_down(Ledger& ledger, const Clock& clock, const DownOptions& options);

// Whether a ledger gives this label to instances of `run` ("": of any run). Also true for the name of an instance that
// a provider makes of such a label (instance_name_of_label()).
bool is_label_of_run(std::string_view label, std::string_view run);

// Releases every instance of options.providers for whose label is_label_of_run() is true, without a ledger: for use
// after the loss of the ledger, or on a computer that has only the key. Releases the instances of living runs as well.
DownReport bring_down_labelled(const Clock& clock, const DownOptions& options, const std::string& run);

}  // namespace echoline::provisioner
