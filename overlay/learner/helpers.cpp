// Chooses a helper for a late worker. Called by LearnerCore (learner_publications.cpp).
#include "overlay/learner/helpers.hpp"

#include <tuple>

namespace echoline::overlay {

std::optional<WorkerId> Helpers::helper_of(WorkerId worker) const {
  const auto it = workers_.find(worker);
  return it == workers_.end() ? std::nullopt : it->second.helper;
}

std::size_t Helpers::helped_count(WorkerId helper) const {
  const auto it = helped_.find(helper);
  return it == helped_.end() ? 0 : it->second;
}

Helpers::Choice Helpers::choose(WorkerId worker, std::span<const Candidate> candidates, double cost_max) const {
  const auto record = workers_.find(worker);
  Choice choice;
  std::optional<std::tuple<bool, std::uint64_t, std::size_t, WorkerId>> best_rank;  // the least rank wins
  for (const Candidate& candidate : candidates) {
    const std::size_t helped_now = helped_count(candidate.id);
    const std::uint64_t cost = candidate.bytes * (1 + helped_now);
    if (record != workers_.end() && record->second.tried.contains(candidate.id)) continue;
    if (static_cast<double>(cost) > cost_max) continue;
    choice.some_candidate_full |= helped_now >= kHelpedMax;
    if (helped_now >= kHelpedMax) continue;
    const auto rank = std::tuple(candidate.failed, cost, candidate.children + helped_now, candidate.id);
    if (best_rank && rank >= *best_rank) continue;
    best_rank = rank;
    choice.helper = candidate.id;
  }
  return choice;
}

void Helpers::begin(WorkerId worker, WorkerId helper) {
  end(worker);
  Record& record = workers_[worker];
  record.helper = helper;
  ++helped_[helper];
  if (helper == kLearnerId)
    record.tried.clear();
  else
    record.tried.insert(helper);
}

void Helpers::end(WorkerId worker) {
  const auto it = workers_.find(worker);
  if (it == workers_.end() || !it->second.helper) return;
  const auto helped = helped_.find(*std::exchange(it->second.helper, std::nullopt));
  if (--helped->second == 0) helped_.erase(helped);
}

void Helpers::on_installed(WorkerId worker) {
  end(worker);
  if (const auto it = workers_.find(worker); it != workers_.end()) it->second.tried.clear();
}

bool Helpers::reserve_budget(WorkerId worker, Version target, const HelpBudget::Request& request, TimePoint now) {
  auto& budgeted_version = workers_[worker].budgeted_version;
  if (budgeted_version >= target) return true;
  if (!budget_.begin(request, now)) return false;
  budgeted_version = target;
  return true;
}

void Helpers::forget(WorkerId worker) {
  end(worker);
  workers_.erase(worker);
}

void Helpers::check() const {
  std::map<WorkerId, std::size_t> helped;
  for (const auto& [id, record] : workers_)
    if (record.helper) ++helped[*record.helper];
  ECHO_CHECK(helped == helped_, "the number of helped workers does not match the workers' records");
}

}  // namespace echoline::overlay
