#include "overlay/learner/catch_up.hpp"

namespace echoline::overlay {

std::optional<std::uint64_t> cheapest_way(const std::map<PublicationKey, std::uint64_t>& bytes_of,
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

}  // namespace echoline::overlay
