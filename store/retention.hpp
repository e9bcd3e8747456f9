// Which stored versions are removed.
#pragma once
#include <map>
#include <utility>
#include <vector>

#include "store/manifest.hpp"
#include "store/settings.hpp"

namespace echoline::store {

// All complete snapshots and deltas of a store, oldest version first.
using Contents = std::map<std::pair<VersionName, delta::PatchKind>, Manifest>;

// The entries to remove, newest first: an interrupted removal leaves no delta without its base. Keeps the newest deltas
// and anchors (snapshots) by the rules, the newest version, and the chain of each: the snapshot and deltas from which
// it is rebuilt. If such a chain has a gap, because a list was old, nothing is removed. Pure.
std::vector<Contents::key_type> entries_to_remove(const Contents& contents, const RetentionRules& rules);

}  // namespace echoline::store
