// The policies that workers may generate with: their digests, the version of each worker's latest request, and unusable
// versions. Private to learner/.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.hpp"

namespace echoline::learner {

// A policy that workers cannot generate with, because its log-probabilities are not finite. It gets no further leases.
struct PolicyUnusable {
  Version version;
  std::vector<WorkerId> workers;  // workers that reported it
  std::string detail;
};

// Pure. Version v is the policy after v learner steps.
class OfferedPolicies {
 public:
  // Number of workers that must report a version as unusable, if at least as many ask for work.
  static constexpr std::size_t kReportsNeeded = 2;

  // `on_unusable` is called once per version.
  OfferedPolicies(std::uint32_t staleness_budget, std::function<void(const PolicyUnusable&)> on_unusable)
      : staleness_budget_(staleness_budget), on_unusable_(std::move(on_unusable)) {}

  // Workers may have the version from now on.
  void begin_publishing(Version version);
  // Leases may be granted for the version from now on. Drops versions too old for the staleness budget.
  void finish_publishing(Version version, std::string digest);
  std::optional<Version> newest() const { return newest_; }  // the newest version that workers may have
  // The newest version that leases may be granted for. Aborts if none is published yet.
  Version newest_published() const;
  // Null for a version that no lease may name.
  const std::string* digest_of(Version version) const;

  void record_request(WorkerId worker, Version version) { requested_versions_[worker] = version; }
  void forget_worker(WorkerId worker) { requested_versions_.erase(worker); }
  // The version of each worker's latest request.
  const std::map<WorkerId, Version>& requested_versions() const { return requested_versions_; }

  struct UnusableReport {
    Version version;
    bool is_workers_first = false;  // the worker's first report on this version
  };
  // Records that the worker cannot generate with the version of its latest request. Absent without a request.
  std::optional<UnusableReport> report_unusable(WorkerId worker, const std::string& detail);
  // Returns whether kReportsNeeded workers have reported the version. The first time that they have, calls
  // `on_unusable`.
  bool check_unusable(Version version);
  bool check_unusable_for(WorkerId worker, Version version);  // unusable, or reported so by this worker
  std::string latest_report_on(Version version) const;        // the detail of the latest report

  void check() const;  // aborts if its parts disagree

 private:
  struct Reports {
    std::set<WorkerId> workers;
    std::string detail;        // of the latest report
    bool is_notified = false;  // whether `on_unusable` was called
  };
  const std::uint32_t staleness_budget_;
  const std::function<void(const PolicyUnusable&)> on_unusable_;
  std::optional<Version> newest_;
  std::map<Version, std::string> digests_;  // of published versions
  std::map<WorkerId, Version> requested_versions_;
  std::map<Version, Reports> unusable_reports_;
};

}  // namespace echoline::learner
