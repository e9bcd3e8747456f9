// Writes a store in an order that survives a crash between any two requests. Called by the learner's outbox.
#include "store/policy_writer.hpp"

#include <algorithm>
#include <set>

#include "base/log.hpp"
#include "overlay/trust/sha256.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = kPublishOperation;
constexpr double kMsPerSecond = 1e3;

std::string ready_text(std::string_view manifest) { return overlay::trust::sha256_hex(as_bytes(manifest)) + "\n"; }

}  // namespace

Result<std::unique_ptr<PolicyWriter>> PolicyWriter::open(ObjectStore& store, const overlay::trust::SigningKey& key,
                                                         WriterOptions options, const Clock& clock,
                                                         const Waiter& wait) {
  std::unique_ptr<PolicyWriter> writer(new PolicyWriter(store, key, std::move(options), clock));
  ECHO_TRY(writer->claim_prefix());
  const WriterOptions& kept = writer->options_;
  ECHO_ASSIGN(writer->lease_,
              PrefixLease::acquire(store, {.holder = kept.holder, .length = kept.settings.lease}, clock, wait));
  ECHO_TRY(writer->read_contents());
  ECHO_TRY(writer->remove_leftovers());
  return writer;
}

// The prefix belongs to the run whose description is stored first.
Status PolicyWriter::claim_prefix() {
  const std::string text = sign(RunDescription{.run_id = options_.run_id, .key = key_.public_key()}, key_);
  const Status stored = store_.put_if_absent(std::string(kRunKey), as_bytes(text));
  if (stored) return ok();
  if (stored.error().code != Code::kStale) return stored;
  ECHO_ASSIGN(const std::string found, store_.read(std::string(kRunKey), kManifestBytesMax));
  if (found == text) return ok();
  ECHO_ASSIGN(const RunDescription other, read_run_description(found));
  return fail(Code::kInvalid, kOperation,
              "the prefix holds run {} with key {}, not run {} with key {}: choose another prefix for each run",
              other.run_id, overlay::trust::to_hex(other.key), options_.run_id,
              overlay::trust::to_hex(key_.public_key()));
}

Status PolicyWriter::read_contents() {
  std::vector<ObjectInfo> objects;
  for (const char* const folder : {"snapshots/", "deltas/"}) {
    ECHO_ASSIGN(const auto listed, store_.list(folder));
    objects.insert(objects.end(), listed.begin(), listed.end());
  }
  // A list may be old, so it only says what to look for. Reads are never old.
  std::set<Contents::key_type> versions;
  for (const ObjectInfo& object : objects)
    if (const auto key = parse_publication_key(object.key)) versions.emplace(key->name, key->kind);
  std::optional<Latest> latest;
  if (const auto text = store_.read(std::string(kLatestKey), 2 * kManifestBytesMax)) {
    ECHO_ASSIGN(latest, read_latest(*text, verifier_));
    for (const Manifest* manifest : {&latest->newest, &latest->anchor})
      versions.emplace(manifest->name, manifest->kind);
  } else if (text.error().code != Code::kNotFound) {
    return text.error();
  }
  for (const auto& version : versions) ECHO_TRY(read_publication(version));
  if (latest) ECHO_TRY(read_chain(latest->newest));
  for (const auto& [key, manifest] : contents_) {
    epoch_ = std::max(epoch_, manifest.name.epoch);
    // A delta comes after the snapshot of its version in the map, so it wins.
    if (!newest_ || !(manifest.name < newest_->name)) newest_ = manifest;
  }
  if (!newest_) return ok();
  if (newest_->name.version > options_.resumed_at) {
    ++epoch_;
    log::info("the run goes on from version {}: the stored versions {} and later of epoch {} are void",
              options_.resumed_at, options_.resumed_at.value + 1, newest_->name.epoch);
  }
  return write_latest();
}

// Adds a publication to contents_ if it is complete, or can be completed.
Status PolicyWriter::read_publication(const Contents::key_type& version) {
  const auto& [name, kind] = version;
  const std::string key = manifest_key(kind, name);
  const auto text = store_.read(key, kManifestBytesMax);
  if (!text) return text.error().code == Code::kNotFound ? ok() : Status(text.error());
  const auto manifest = read_manifest(*text, verifier_, key);
  if (!manifest) {
    log::warn("the store has an object that is not this run's: {}", manifest.error().message());
    return ok();
  }
  ECHO_ASSIGN(const bool is_ready, is_marked_ready(*manifest));
  if (!is_ready) {
    ECHO_ASSIGN(const bool is_whole, has_whole_patch(*manifest));
    if (!is_whole) return ok();
    ECHO_TRY(complete(*manifest));
  }
  contents_.emplace(version, *manifest);
  return ok();
}

// Adds what an old list lacks of a version's history: prune() must not remove a base that it does not know to be one.
Status PolicyWriter::read_chain(const Manifest& newest) {
  for (VersionName name = newest.name;;) {
    const Contents::key_type delta{name, delta::PatchKind::kDelta};
    if (!contents_.count(delta)) ECHO_TRY(read_publication(delta));
    const auto found = contents_.find(delta);
    // The history begins here, by a snapshot.
    if (found == contents_.end()) return read_publication({name, delta::PatchKind::kSnapshot});
    name = *found->second.base;
  }
}

Result<bool> PolicyWriter::is_marked_ready(const Manifest& manifest) {
  const auto marker = store_.read(ready_key(manifest.kind, manifest.name), kManifestBytesMax);
  if (!marker && marker.error().code != Code::kNotFound) return marker.error();
  return marker.has_value();
}

Result<bool> PolicyWriter::has_whole_patch(const Manifest& manifest) {
  if (manifest.patch_bytes == 0) return false;
  const auto total = store_.get(manifest.patch_key(), manifest.patch_bytes - 1, [](auto) { return ok(); });
  if (!total && total.error().code != Code::kNotFound) return total.error();
  return total && *total == manifest.patch_bytes;
}

Status PolicyWriter::complete(const Manifest& manifest) {
  return store_.put(ready_key(manifest.kind, manifest.name), as_bytes(ready_text(sign(manifest, key_))));
}

std::optional<Manifest> PolicyWriter::find_anchor(const Manifest& of) const {
  for (VersionName name = of.name;;) {
    if (const auto snapshot = contents_.find({name, delta::PatchKind::kSnapshot}); snapshot != contents_.end())
      return snapshot->second;
    const auto delta = contents_.find({name, delta::PatchKind::kDelta});
    if (delta == contents_.end()) return std::nullopt;
    name = *delta->second.base;
  }
}

Status PolicyWriter::write_latest() {
  const auto anchor = find_anchor(*newest_);
  if (!anchor)  // a list was old
    return fail(Code::kUnavailable, kOperation, "the snapshot from which version {} is rebuilt is not listed yet",
                newest_->name.version);
  is_latest_due_ = true;
  ECHO_TRY(store_.put(std::string(kLatestKey), as_bytes(sign(*newest_, key_) + sign(*anchor, key_))));
  is_latest_due_ = false;
  return ok();
}

bool PolicyWriter::wants_anchor() const {
  if (!newest_) return false;
  std::uint32_t deltas = 0;
  for (VersionName name = newest_->name;; ++deltas) {
    if (contents_.count({name, delta::PatchKind::kSnapshot})) return deltas >= options_.settings.anchor_every;
    const auto delta = contents_.find({name, delta::PatchKind::kDelta});
    if (delta == contents_.end()) return true;
    name = *delta->second.base;
  }
}

Status PolicyWriter::publish(Version version, std::optional<Version> base, std::span<const std::byte> patch) {
  ECHO_ASSIGN(const delta::PatchInfo info, delta::inspect(patch));
  if (info.base.has_value() != base.has_value())
    return fail(Code::kInvalid, kOperation, "version {}: the patch is a {}", version, info.base ? "delta" : "snapshot");
  Manifest manifest{.run_id = options_.run_id,
                    .kind = info.kind,
                    .name = {.epoch = epoch_, .version = version},
                    .base = std::nullopt,
                    .base_digest = {},
                    .digest = info.result,
                    .state_bytes = info.state_bytes,
                    .patch_bytes = patch.size(),
                    .sha256 = {},
                    .term = lease_->term(),
                    .published_unix_ms = static_cast<std::uint64_t>(clock_.unix_seconds() * kMsPerSecond)};
  const bool continues = newest_ && newest_->name.epoch == epoch_;
  if (continues && newest_->name.version == version && newest_->digest == info.result && (base || !wants_anchor()))
    return is_latest_due_ ? write_latest() : ok();  // stored before a crash, or published again after a resume
  if (const auto stored = contents_.find({manifest.name, info.kind}); stored != contents_.end()) {
    if (stored->second.digest == info.result) return is_latest_due_ ? write_latest() : ok();
    return fail(Code::kStale, kOperation, "version {} is stored with another policy ({}, not {})", version,
                stored->second.digest.hex(), info.result.hex());
  }
  if (base) {
    if (!newest_ || newest_->name.version != *base || newest_->digest != *info.base)
      return fail(Code::kNotFound, kOperation, "version {} is a delta to version {}, which is not the store's newest",
                  version, *base);
    manifest.base = newest_->name;
    manifest.base_digest = *info.base;
  } else if (continues && version < newest_->name.version) {
    return fail(Code::kStale, kOperation, "a snapshot of version {} comes after version {}", version,
                newest_->name.version);
  }
  manifest.sha256 = overlay::trust::sha256_hex(patch);
  ECHO_TRY(lease_->check());
  ECHO_TRY(store_.put(manifest.patch_key(), patch));
  ECHO_TRY(lease_->check());
  ECHO_TRY(store_manifest(manifest));
  const Manifest& stored = contents_.at({manifest.name, manifest.kind});
  const bool is_anchor_of_newest = continues && newest_->name == stored.name && stored.is_snapshot();
  if (!is_anchor_of_newest) newest_ = stored;
  ECHO_TRY(write_latest());
  return prune();
}

// Stores manifest and ready marker, and adds the publication to contents_.
Status PolicyWriter::store_manifest(const Manifest& manifest) {
  const std::string text = sign(manifest, key_), key = manifest.key();
  Status stored = store_.put_if_absent(key, as_bytes(text));
  if (!stored && stored.error().code == Code::kStale) {
    ECHO_ASSIGN(const std::string found_text, store_.read(key, kManifestBytesMax));
    if (found_text != text) {
      const auto found = read_manifest(found_text, verifier_, key);
      ECHO_ASSIGN(const bool is_adopted, found ? adopt(*found, manifest) : Result<bool>(false));
      if (is_adopted) return ok();
      // An earlier term ended before its ready marker, and its patch is another one or not whole.
      ECHO_TRY(store_.remove(key));
      ECHO_TRY(store_.put_if_absent(key, as_bytes(text)));
    }
  } else if (!stored) {
    return stored;
  }
  ECHO_TRY(complete(manifest));
  contents_.insert_or_assign({manifest.name, manifest.kind}, manifest);
  return ok();
}

// Uses the manifest that is stored for the version instead of `wanted`, if it describes the same policy; false if it
// may be replaced.
Result<bool> PolicyWriter::adopt(const Manifest& found, const Manifest& wanted) {
  const bool is_same = found.digest == wanted.digest && found.base == wanted.base;
  ECHO_ASSIGN(const bool is_whole, has_whole_patch(found));
  if (is_same && is_whole) {
    ECHO_TRY(complete(found));
    contents_.insert_or_assign({found.name, found.kind}, found);
    return true;
  }
  ECHO_ASSIGN(const bool is_ready, is_marked_ready(found));
  if (is_ready || found.term > wanted.term)
    return fail(Code::kStale, kOperation, "version {} is stored with another policy (digest {}, term {})",
                found.name.version, found.digest.hex(), found.term);
  return false;
}

Status PolicyWriter::publish_files(const std::map<std::string, std::string>& files) {
  std::vector<StoredFile> list;
  for (const auto& [name, content] : files)
    list.push_back({.name = name, .bytes = content.size(), .sha256 = overlay::trust::sha256_hex(as_bytes(content))});
  const std::string text = sign(list, key_);
  const auto found = store_.read(std::string(kFilesKey), kFileListBytesMax);
  if (found && *found == text) return ok();
  if (!found && found.error().code != Code::kNotFound && found.error().code != Code::kExhausted) return found.error();
  // Reading its own list back, a learner finds names or sizes that readers would refuse.
  ECHO_TRY(read_file_list(text, verifier_));
  for (const StoredFile& file : list) ECHO_TRY(store_.put(file_key(file.sha256), as_bytes(files.at(file.name))));
  return store_.put(std::string(kFilesKey), as_bytes(text));
}

Status PolicyWriter::prune() {
  for (const auto& entry : entries_to_remove(contents_, options_.settings.retention)) {
    const auto& [name, kind] = entry;
    // In this order, so that a reader never finds a marker without a patch.
    ECHO_TRY(store_.remove(ready_key(kind, name)));
    ECHO_TRY(store_.remove(manifest_key(kind, name)));
    ECHO_TRY(store_.remove(contents_.at(entry).patch_key()));
    contents_.erase(entry);
  }
  return ok();
}

Status PolicyWriter::remove_leftovers() {
  for (const char* const folder : {"snapshots/", "deltas/"}) {
    ECHO_ASSIGN(const auto objects, store_.list(folder));
    for (const ObjectInfo& object : objects) {
      const auto key = parse_publication_key(object.key);
      if (!key || key->file == "manifest" || key->file == "ready") continue;
      const auto entry = contents_.find({key->name, key->kind});
      if (entry != contents_.end() && entry->second.patch_key() == object.key) continue;
      if (object.key >= patch_key(key->kind, key->name, lease_->term())) continue;
      // Also what an interrupted prune() has left, and a manifest whose patch is not whole.
      if (entry == contents_.end()) {
        ECHO_TRY(store_.remove(ready_key(key->kind, key->name)));
        ECHO_TRY(store_.remove(manifest_key(key->kind, key->name)));
      }
      ECHO_TRY(store_.remove(object.key));
    }
  }
  return ok();
}

}  // namespace echoline::store
