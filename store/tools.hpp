// Tools for a store: checking it, taking a version out of it, removing old versions.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "store/lease.hpp"
#include "store/policy_reader.hpp"

namespace echoline::store {

struct ToolOptions {
  unsigned threads = 1;
  std::filesystem::path folder;  // for patches while they are read
  std::function<void(const Manifest&)> begins = [](const Manifest&) {};
};

// Rebuilds a version in memory; its digest is verified.
Result<delta::OwnedState> rebuild(PolicyReader& reader, const Manifest& target, const ToolOptions& options);

struct VerifyReport {
  std::uint64_t snapshots = 0, deltas = 0, patch_bytes = 0;  // that are in order
  std::vector<std::string> damaged;                          // the key of a manifest, and what is wrong
};
// Fetches each snapshot and delta, oldest first, and rebuilds each version. Needs memory for one policy, two while a
// snapshot is decoded.
Result<VerifyReport> verify(PolicyReader& reader, const ToolOptions& options);

// The entries that the rules do not keep, newest first. Removes them unless `only_list`, with the lease of the prefix:
// kUnavailable while a learner publishes, which removes old versions by its own rules.
Result<std::vector<Manifest>> prune(ObjectStore& store, PolicyReader& reader, const RetentionRules& rules,
                                    bool only_list, const Clock& clock, const Waiter& wait);

}  // namespace echoline::store
