// The policies that workers may generate with. DeskLeases and RolloutDesk call it.
#include "learner/offered_policies.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

void OfferedPolicies::begin_publishing(Version version) { newest_ = std::max(newest_.value_or(version), version); }

void OfferedPolicies::finish_publishing(Version version, std::string digest) {
  begin_publishing(version);  // newest_ is never older than a published version
  digests_[version] = std::move(digest);
  // A version serves the next step, and staleness_budget_ steps after that. The loop ends at `version` or before.
  while (digests_.begin()->first.value + staleness_budget_ + 1 < version.value) digests_.erase(digests_.begin());
  unusable_reports_.erase(unusable_reports_.begin(), unusable_reports_.lower_bound(digests_.begin()->first));
}

Version OfferedPolicies::newest_published() const {
  ECHO_CHECK(!digests_.empty(), "no policy is published");
  return digests_.rbegin()->first;
}

const std::string* OfferedPolicies::digest_of(Version version) const {
  const auto digest = digests_.find(version);
  return digest == digests_.end() ? nullptr : &digest->second;
}

std::optional<OfferedPolicies::UnusableReport> OfferedPolicies::report_unusable(WorkerId worker,
                                                                                const std::string& detail) {
  const auto request = requested_versions_.find(worker);
  if (request == requested_versions_.end()) return std::nullopt;
  Reports& reports = unusable_reports_[request->second];
  reports.detail = detail;
  return UnusableReport{.version = request->second, .is_workers_first = reports.workers.insert(worker).second};
}

bool OfferedPolicies::check_unusable(Version version) {
  const auto it = unusable_reports_.find(version);
  if (it == unusable_reports_.end()) return false;
  Reports& reports = it->second;
  if (reports.is_notified) return true;
  // If fewer than kReportsNeeded workers ask for work, all of them must report it.
  if (reports.workers.size() < std::min(kReportsNeeded, requested_versions_.size())) return false;
  reports.is_notified = true;
  if (on_unusable_)
    on_unusable_(
        {.version = version, .workers = {reports.workers.begin(), reports.workers.end()}, .detail = reports.detail});
  return true;
}

bool OfferedPolicies::check_unusable_for(WorkerId worker, Version version) {
  if (check_unusable(version)) return true;
  const auto reports = unusable_reports_.find(version);
  return reports != unusable_reports_.end() && reports->second.workers.contains(worker);
}

std::string OfferedPolicies::latest_report_on(Version version) const {
  const auto reports = unusable_reports_.find(version);
  return reports == unusable_reports_.end() ? std::string() : reports->second.detail;
}

void OfferedPolicies::check() const {
  if (!digests_.empty())
    ECHO_CHECK(newest_ && digests_.rbegin()->first <= *newest_, "version {} is published and not offered",
               digests_.rbegin()->first);
  for (const auto& [version, reports] : unusable_reports_)
    ECHO_CHECK(!reports.workers.empty(), "version {} is blamed by no worker", version);
}

}  // namespace echoline::learner
