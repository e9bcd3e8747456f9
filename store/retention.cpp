// The rule of retention, for PolicyWriter.
#include "store/retention.hpp"

#include <set>

namespace echoline::store {

std::vector<Contents::key_type> entries_to_remove(const Contents& contents, const RetentionRules& rules) {
  std::set<Contents::key_type> kept;
  std::uint64_t deltas = 0, anchors = 0;
  for (auto entry = contents.rbegin(); entry != contents.rend(); ++entry) {
    const Manifest& manifest = entry->second;
    std::uint64_t& count = manifest.is_snapshot() ? anchors : deltas;
    const std::uint64_t count_max = manifest.is_snapshot() ? rules.anchors_kept : rules.deltas_kept;
    if (count >= count_max && entry != contents.rbegin()) continue;
    ++count;
    kept.insert(entry->first);
    for (const Manifest* needs = &manifest; !needs->is_snapshot();) {
      auto base = contents.find({*needs->base, delta::PatchKind::kSnapshot});
      if (base == contents.end()) base = contents.find({*needs->base, delta::PatchKind::kDelta});
      if (base == contents.end()) return {};
      if (!kept.insert(base->first).second && !base->second.is_snapshot()) break;  // its chain was followed before
      needs = &base->second;
    }
  }
  std::vector<Contents::key_type> removed;
  for (auto entry = contents.rbegin(); entry != contents.rend(); ++entry)
    if (!kept.count(entry->first)) removed.push_back(entry->first);
  return removed;
}

}  // namespace echoline::store
