// Releases everything that a run has rented, and does not believe it before a listing says so.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "provisioner/ledger.hpp"
#include "provisioner/provider.hpp"

namespace echoline::provisioner {

struct DownOptions {
  // Makes a provider by its name.
  std::function<Result<std::unique_ptr<Provider>>(const std::string& name)> provider;
  std::vector<std::string> providers;  // to look at beside those of the ledger's rows
  // Instances that the service does not know are gone, even if it knows none at all.
  bool absent_is_gone = false;
  Duration grace = std::chrono::seconds(5);
  Duration patience = std::chrono::minutes(10);  // with one provider
  std::function<void(Duration)> pause;           // lets time pass; absent: sleeps
};

struct DownReport {
  struct Line {
    std::string provider, instance, label, what;
  };
  std::vector<Line> released;
  std::vector<std::string> problems;  // "" when a complete listing shows that nothing is left
};

// Everything of this run that the ledger has as intended or running, and whatever carries its label without the ledger
// knowing: it gets a row first. Rows end when the provider confirms; intentions of which no complete listing knows
// anything are booked as failed. Twice does no harm. Errors are those of the ledger; the rest is in the report.
Result<DownReport> bring_down(Ledger& ledger, const Clock& clock, const DownOptions& options);

}  // namespace echoline::provisioner
