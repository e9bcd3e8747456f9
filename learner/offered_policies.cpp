#include "learner/offered_policies.hpp"

#include <algorithm>

#include "base/result.hpp"

namespace echoline::learner {

void OfferedPolicies::publishing(Version version) { newest_ = std::max(newest_.value_or(version), version); }

void OfferedPolicies::published(Version version, std::string digest) {
  publishing(version);
  digests_[version] = std::move(digest);
  while (digests_.begin()->first.value + staleness_budget_ + 1 < version.value) digests_.erase(digests_.begin());
  blamed_.erase(blamed_.begin(), blamed_.lower_bound(digests_.begin()->first));
}

Version OfferedPolicies::newest_published() const {
  ECHO_CHECK(!digests_.empty(), "no policy is published");
  return digests_.rbegin()->first;
}

const std::string* OfferedPolicies::digest_of(Version version) const {
  const auto found = digests_.find(version);
  return found == digests_.end() ? nullptr : &found->second;
}

std::optional<OfferedPolicies::Blamed> OfferedPolicies::blame(WorkerId worker, const std::string& detail) {
  const auto asked = asking_.find(worker);
  if (asked == asking_.end()) return std::nullopt;
  Blame& blame = blamed_[asked->second];
  blame.detail = detail;
  return Blamed{asked->second, blame.workers.insert(worker).second};
}

bool OfferedPolicies::is_unusable(Version version) {
  const auto found = blamed_.find(version);
  if (found == blamed_.end()) return false;
  Blame& blame = found->second;
  if (blame.told) return true;
  if (blame.workers.size() < std::min(kBlamesNeeded, asking_.size())) return false;
  blame.told = true;
  if (unusable_) unusable_({version, {blame.workers.begin(), blame.workers.end()}, blame.detail});
  return true;
}

bool OfferedPolicies::is_kept_from(WorkerId worker, Version version) {
  if (is_unusable(version)) return true;
  const auto found = blamed_.find(version);
  return found != blamed_.end() && found->second.workers.contains(worker);
}

std::string OfferedPolicies::detail_of(Version version) const {
  const auto found = blamed_.find(version);
  return found == blamed_.end() ? std::string() : found->second.detail;
}

void OfferedPolicies::check() const {
  if (!digests_.empty())
    ECHO_CHECK(newest_ && digests_.rbegin()->first <= *newest_, "version {} is published and not offered",
               digests_.rbegin()->first);
  for (const auto& [version, blame] : blamed_)
    ECHO_CHECK(!blame.workers.empty(), "version {} is blamed by no worker", version);
}

}  // namespace echoline::learner
