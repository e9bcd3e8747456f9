// The work of `echoline store`, except for replicas.
#include "store/tools.hpp"

#include "delta/mapped_file.hpp"
#include "delta/patch.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "rebuild policy";
const std::string kPruneHolder(32, '0');  // of the lease while old versions are removed

// Applies one patch to `state`.
Status apply(PolicyReader& reader, const Manifest& manifest, const ToolOptions& options,
             std::optional<delta::OwnedState>& state) {
  options.begins(manifest);
  const std::filesystem::path file = options.folder / "patch";
  std::error_code ignored;
  std::filesystem::remove(file, ignored);
  ECHO_TRY(reader.download(manifest, file));
  ECHO_ASSIGN(const auto patch, delta::MappedFile::open(file, kOperation));
  const delta::DecodeOptions decode{.threads = options.threads};
  if (manifest.is_snapshot()) {
    state.reset();
    ECHO_ASSIGN(state, delta::decode_snapshot(patch.bytes(), decode));
  } else {
    if (!state) return fail(Code::kNotFound, kOperation, "{}: its base is missing or damaged", manifest.key());
    ECHO_TRY(delta::apply_delta(patch.bytes(), *state, decode));
  }
  const delta::Digest found = state->digest(options.threads);
  if (found == manifest.digest) return ok();
  return fail(Code::kCorrupt, kOperation, "{}: the weights have digest {}, the manifest says {}", manifest.key(),
              found.hex(), manifest.digest.hex());
}

}  // namespace

Result<delta::OwnedState> rebuild(PolicyReader& reader, const Manifest& target, const ToolOptions& options) {
  std::set<VersionName> avoided;
  for (;;) {
    ECHO_ASSIGN(const auto path, reader.path_to(target, std::nullopt, std::nullopt, avoided));
    std::optional<delta::OwnedState> state;
    Status applied;
    for (const Manifest& manifest : path) {
      applied = apply(reader, manifest, options, state);
      if (!applied) break;
    }
    if (applied) return std::move(*state);
    if (applied.error().code != Code::kCorrupt) return applied.error();
    avoided.insert(path.front().name);  // an earlier snapshot may lead there
  }
}

Result<VerifyReport> verify(PolicyReader& reader, const ToolOptions& options) {
  ECHO_ASSIGN(const Contents contents, reader.contents());
  VerifyReport report;
  std::optional<delta::OwnedState> state;
  std::optional<VersionName> at;  // the version of `state`
  // An error that says nothing about the objects, such as a service that does not answer, ends the check.
  const auto check = [&](const Manifest& patch) -> Status {
    const bool lacks_base = !patch.is_snapshot() && at != patch.base;
    const Status applied = lacks_base ? Status(fail(Code::kNotFound, kOperation, "its base is missing or damaged"))
                                      : apply(reader, patch, options, state);
    if (applied) {
      ++(patch.is_snapshot() ? report.snapshots : report.deltas);
      report.patch_bytes += patch.patch_bytes;
      at = patch.name;
      return ok();
    }
    const Code code = applied.error().code;
    if (code == Code::kUnavailable || code == Code::kCancelled || code == Code::kIo || code == Code::kExhausted)
      return applied;
    report.damaged.push_back(patch.key() + ": " + applied.error().message());
    if (!lacks_base) at.reset();
    return ok();
  };
  for (auto entry = contents.begin(); entry != contents.end(); ++entry) {
    const Manifest& manifest = entry->second;
    const auto next = std::next(entry);
    const bool has_both = next != contents.end() && next->second.name == manifest.name;
    // The delta first, while the version before it is in memory.
    if (has_both && at == next->second.base) {
      ECHO_TRY(check(next->second));
      ECHO_TRY(check(manifest));
      entry = next;
    } else {
      ECHO_TRY(check(manifest));
    }
  }
  return report;
}

Result<std::vector<Manifest>> prune(ObjectStore& store, PolicyReader& reader, const RetentionRules& rules,
                                    bool only_list, const Clock& clock, const Waiter& wait) {
  std::unique_ptr<PrefixLease> lease;
  if (!only_list) {
    ECHO_ASSIGN(lease, PrefixLease::acquire(store, {.holder = kPruneHolder}, clock, wait));
  }
  ECHO_ASSIGN(const Contents contents, reader.contents());
  std::vector<Manifest> removed;
  for (const auto& entry : entries_to_remove(contents, rules)) {
    const Manifest& manifest = contents.at(entry);
    if (lease) {
      ECHO_TRY(lease->check());
      ECHO_TRY(store.remove(ready_key(manifest.kind, manifest.name)));
      ECHO_TRY(store.remove(manifest.key()));
      ECHO_TRY(store.remove(manifest.patch_key()));
    }
    removed.push_back(manifest);
  }
  if (lease) ECHO_TRY(lease->end());
  return removed;
}

}  // namespace echoline::store
