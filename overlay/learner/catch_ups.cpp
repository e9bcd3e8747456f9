// Chooses the next publication to make for late workers. Called by LearnerCore.
#include "overlay/learner/catch_ups.hpp"

namespace echoline::overlay {

std::optional<std::uint64_t> cheapest_path_bytes(const std::map<PublicationKey, std::uint64_t>& bytes_of,
                                                 std::optional<Version> position, Version target, bool full_only) {
  std::map<Version, std::uint64_t> best;
  if (position && !full_only) best[*position] = 0;
  for (const auto& [key, bytes] : bytes_of) {  // ascending versions, so a base is settled before its deltas
    std::uint64_t cost = bytes;
    if (full_only && (!key.full() || key.version < target)) continue;
    if (key.base) {
      const auto from = best.find(*key.base);
      if (from == best.end()) continue;
      cost += from->second;
    }
    const auto [it, added] = best.try_emplace(key.version, cost);
    if (!added) it->second = std::min(it->second, cost);
  }
  std::optional<std::uint64_t> least;
  for (auto it = best.lower_bound(target); it != best.end(); ++it)
    if (!least || it->second < *least) least = it->second;
  return least;
}

bool CatchUps::want(std::optional<Version> from) {
  if (from && !wanted_.contains(from) && wanted_.size() >= kWantedMax) return false;
  wanted_.insert(from);
  return true;
}

void CatchUps::begun(const PublicationId& id) {
  if (phase_ == Phase::kIdle) return;  // the application made it without a request
  phase_ = Phase::kBegun;
  id_ = id;
}

std::optional<PublicationKey> CatchUps::next(std::optional<Version> newest, const PublicationStore& store,
                                             std::vector<Version>& given_up) {
  if (phase_ == Phase::kBegun) {
    const StoredPublication* made = store.find(id_);
    if (made && !made->complete) return std::nullopt;
    phase_ = Phase::kIdle;
    if (asked_.base && !(made && made->key().base == asked_.base)) given_up.push_back(*asked_.base);
  }
  if (phase_ != Phase::kIdle || !newest) return std::nullopt;
  for (const std::optional<Version>& from : std::set(wanted_)) {
    const PublicationKey key{*newest, from};
    const bool stored = store.find(key) != nullptr;
    // A snapshot of this version is on its way. If it is too old for a worker, that of the next version is requested.
    if (stored && key.full()) continue;
    wanted_.erase(from);
    if (from && (stored || *from >= *newest)) {
      given_up.push_back(*from);
      continue;
    }
    asked_ = key;
    phase_ = Phase::kAsked;
    return key;
  }
  return std::nullopt;
}

}  // namespace echoline::overlay
