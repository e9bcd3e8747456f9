// Chooses the next publication to make for late workers. Called by LearnerCore.
#include "overlay/learner/catch_ups.hpp"

namespace echoline::overlay {

std::optional<std::uint64_t> cheapest_path_bytes(const std::map<PublicationKey, std::uint64_t>& bytes_of,
                                                 std::optional<Version> position, Version target, bool full_only) {
  std::map<Version, std::uint64_t> least_cost;  // bytes of the cheapest path, by version that it reaches
  if (position && !full_only) least_cost[*position] = 0;
  for (const auto& [key, bytes] : bytes_of) {  // ascending versions, so a base is settled before its deltas
    std::uint64_t cost = bytes;
    if (full_only && (!key.full() || key.version < target)) continue;
    if (key.base) {
      const auto base_cost = least_cost.find(*key.base);
      if (base_cost == least_cost.end()) continue;
      cost += base_cost->second;
    }
    const auto [it, added] = least_cost.try_emplace(key.version, cost);
    if (!added) it->second = std::min(it->second, cost);
  }
  std::optional<std::uint64_t> least_to_target;
  for (auto it = least_cost.lower_bound(target); it != least_cost.end(); ++it)
    if (!least_to_target || it->second < *least_to_target) least_to_target = it->second;
  return least_to_target;
}

bool CatchUps::enqueue(std::optional<Version> from) {
  // The snapshot (absent `from`) always has room, because it serves every worker.
  if (from && !wanted_.contains(from) && wanted_.size() >= kWantedMax) return false;
  wanted_.insert(from);
  return true;
}

void CatchUps::on_begun(const PublicationId& id) {
  if (phase_ == Phase::kIdle) return;  // the application made it without a request
  phase_ = Phase::kBeingMade;
  id_being_made_ = id;
}

std::optional<PublicationKey> CatchUps::next(std::optional<Version> newest, const PublicationStore& store,
                                             std::vector<Version>& given_up) {
  if (phase_ == Phase::kBeingMade) {
    const StoredPublication* publication = store.find(id_being_made_);
    if (publication && !publication->complete) return std::nullopt;
    phase_ = Phase::kIdle;
    // The application may have made a snapshot instead of the requested delta, or the publication was dropped.
    const bool was_made = publication && publication->key().base == requested_key_.base;
    if (requested_key_.base && !was_made) given_up.push_back(*requested_key_.base);
  }
  if (phase_ != Phase::kIdle || !newest) return std::nullopt;
  for (const std::optional<Version>& from : std::set(wanted_)) {  // a copy, because the loop erases
    const PublicationKey key{*newest, from};
    const bool stored = store.find(key) != nullptr;
    // A snapshot of this version is on its way. If it is too old for a worker, that of the next version is requested.
    if (stored && key.full()) continue;
    wanted_.erase(from);
    if (from && (stored || *from >= *newest)) {
      given_up.push_back(*from);
      continue;
    }
    requested_key_ = key;
    phase_ = Phase::kRequested;
    return key;
  }
  return std::nullopt;
}

}  // namespace echoline::overlay
