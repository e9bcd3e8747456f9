// Finds and fetches versions, for replicas and the verbs.
#include "store/policy_reader.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "base/files.hpp"
#include "delta/mapped_file.hpp"
#include "delta/pending_file.hpp"
#include "overlay/trust/sha256.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "read store";
constexpr std::size_t kPathStepsMax = 100'000;

}  // namespace

Result<std::unique_ptr<PolicyReader>> PolicyReader::open(ObjectStore& store,
                                                         std::optional<overlay::trust::PublicKey> key) {
  const auto text = store.read(std::string(kRunKey), kManifestBytesMax);
  if (!text && text.error().code == Code::kNotFound)
    return fail(Code::kNotFound, kOperation, "the prefix holds no policies: no learner has published to it ({})",
                text.error().detail);
  if (!text) return text.error();
  ECHO_ASSIGN(RunDescription run, read_run_description(*text));
  if (key && *key != run.key)
    return fail(Code::kInvalid, kOperation, "the store belongs to the run with key {}, expected {}",
                overlay::trust::to_hex(run.key), overlay::trust::to_hex(*key));
  return std::unique_ptr<PolicyReader>(new PolicyReader(store, std::move(run)));
}

Result<Latest> PolicyReader::latest() {
  const auto text = store_.read(std::string(kLatestKey), 2 * kManifestBytesMax);
  if (!text && text.error().code == Code::kNotFound)
    return fail(Code::kNotFound, kOperation, "run {} has not published a version yet", run_.run_id);
  if (!text) return text.error();
  return read_latest(*text, verifier_);
}

Result<Manifest> PolicyReader::read(delta::PatchKind kind, const VersionName& name) {
  const std::string key = manifest_key(kind, name);
  ECHO_ASSIGN(const std::string text, store_.read(key, kManifestBytesMax));
  ECHO_ASSIGN(Manifest manifest, read_manifest(text, verifier_, key));
  if (manifest.kind != kind || manifest.name != name)
    return fail(Code::kCorrupt, kOperation, "{}: the manifest of another version, {}", key, manifest.key());
  return manifest;
}

Result<Contents> PolicyReader::contents() {
  Contents found;
  for (const char* const folder : {"snapshots/", "deltas/"}) {
    ECHO_ASSIGN(const auto objects, store_.list(folder));
    for (const ObjectInfo& object : objects) {
      const auto key = parse_publication_key(object.key);
      if (!key || key->file != "ready") continue;
      auto manifest = read(key->kind, key->name);
      if (!manifest && manifest.error().code == Code::kNotFound) continue;  // removed meanwhile
      if (!manifest) return manifest.error();
      found.emplace(std::pair(key->name, key->kind), std::move(*manifest));
    }
  }
  const auto newest = latest();
  if (!newest && newest.error().code == Code::kNotFound) return found;
  if (!newest) return newest.error();
  found.emplace(std::pair(newest->anchor.name, newest->anchor.kind), newest->anchor);
  ECHO_TRY(add_history(newest->newest, found));
  return found;
}

Status PolicyReader::add_history(const Manifest& newest, Contents& contents) {
  for (VersionName name = newest.name;;) {
    auto entry = contents.find({name, delta::PatchKind::kDelta});
    if (entry == contents.end()) {
      auto delta = read(delta::PatchKind::kDelta, name);
      if (!delta && delta.error().code == Code::kNotFound) break;
      if (!delta) return delta.error();
      entry = contents.emplace(std::pair(name, delta::PatchKind::kDelta), std::move(*delta)).first;
    }
    name = *entry->second.base;
  }
  return ok();
}

Result<Manifest> PolicyReader::find(Version version) {
  std::vector<VersionName> with_it;
  std::set<Version> all;
  for (const char* const folder : {"snapshots/", "deltas/"}) {
    ECHO_ASSIGN(const auto objects, store_.list(folder));
    for (const ObjectInfo& object : objects) {
      const auto key = parse_publication_key(object.key);
      if (!key || key->file != "ready") continue;
      all.insert(key->name.version);
      if (key->name.version == version) with_it.push_back(key->name);
    }
  }
  ECHO_ASSIGN(const Latest newest, latest());
  if (newest.newest.name.version == version) return newest.newest;
  if (with_it.empty())
    return fail(Code::kNotFound, kOperation, "version {} is not in the store{}", version,
                all.empty()
                    ? std::string()
                    : fmt::format(", which has {} versions from {} to {}", all.size(), *all.begin(), *all.rbegin()));
  const VersionName name = *std::max_element(with_it.begin(), with_it.end());
  auto manifest = read(delta::PatchKind::kDelta, name);
  if (!manifest && manifest.error().code == Code::kNotFound) return read(delta::PatchKind::kSnapshot, name);
  return manifest;
}

Result<std::vector<StoredFile>> PolicyReader::files() {
  const auto text = store_.read(std::string(kFilesKey), kFileListBytesMax);
  if (!text && text.error().code == Code::kNotFound) return std::vector<StoredFile>();
  if (!text) return text.error();
  return read_file_list(*text, verifier_);
}

Result<std::string> PolicyReader::file(const StoredFile& file) {
  ECHO_ASSIGN(std::string content, store_.read(file_key(file.sha256), kFileBytesMax));
  if (overlay::trust::sha256_hex(as_bytes(content)) != file.sha256)
    return fail(Code::kCorrupt, kOperation, "{}: the stored file has another SHA-256 than {}", file.name, file.sha256);
  return content;
}

Result<std::vector<Manifest>> PolicyReader::path_to(const Manifest& target, const std::optional<HeldVersion>& held,
                                                    const std::optional<Manifest>& anchor,
                                                    const std::set<VersionName>& avoided) {
  if (held && held->name == target.name && held->digest == target.digest) return std::vector<Manifest>();
  std::vector<Manifest> deltas;  // from `target` backwards
  std::uint64_t bytes = 0;
  std::optional<std::vector<Manifest>> best;
  std::uint64_t best_bytes = 0;
  const auto keep_if_cheaper = [&](const Manifest* snapshot) {
    const std::uint64_t total = bytes + (snapshot ? snapshot->patch_bytes : 0);
    if (best && best_bytes <= total) return;
    best.emplace();
    if (snapshot) best->push_back(*snapshot);
    best->insert(best->end(), deltas.rbegin(), deltas.rend());
    best_bytes = total;
  };
  VersionName at = target.name;
  std::optional<Error> gap;
  while (deltas.size() < kPathStepsMax) {
    // A snapshot of the version that is reached?
    const bool knows_anchor = anchor && anchor->name == at;
    // Between two anchors the newest known one is the cheapest, so only it and what comes before are looked for.
    const bool may_have_snapshot = !anchor || !(anchor->name < at);
    if (!avoided.count(at) && may_have_snapshot) {
      auto snapshot = knows_anchor ? Result<Manifest>(*anchor) : read(delta::PatchKind::kSnapshot, at);
      if (snapshot)
        keep_if_cheaper(&*snapshot);
      else if (snapshot.error().code != Code::kNotFound && snapshot.error().code != Code::kCorrupt)
        return snapshot.error();
    }
    // Going on pays only towards what the reader has, or if there is no way yet.
    if (best && (!held || !(held->name < at) || bytes >= best_bytes)) break;
    auto delta =
        at == target.name && !target.is_snapshot() ? Result<Manifest>(target) : read(delta::PatchKind::kDelta, at);
    if (!delta && delta.error().code != Code::kNotFound && delta.error().code != Code::kCorrupt) return delta.error();
    if (!delta) {
      gap = delta.error();
      break;
    }
    bytes += delta->patch_bytes;
    deltas.push_back(*delta);
    at = *delta->base;
    if (held && held->name == at && held->digest == delta->base_digest) {
      keep_if_cheaper(nullptr);
      break;
    }
  }
  if (best) return std::move(*best);
  return fail(Code::kNotFound, kOperation, "no way to version {}: neither a snapshot nor deltas lead to it{}",
              target.name.version, gap ? " (" + gap->detail + ")" : "");
}

Status PolicyReader::download(const Manifest& manifest, const std::filesystem::path& path) {
  constexpr std::string_view kFetch = "fetch policy";
  {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    if (file.get() < 0) return os_error(kFetch, path);
    const off_t end = ::lseek(file.get(), 0, SEEK_END);
    if (end < 0) return os_error(kFetch, path);
    std::uint64_t at = static_cast<std::uint64_t>(end);
    if (at > manifest.patch_bytes) {
      if (::ftruncate(file.get(), 0) != 0) return os_error(kFetch, path);
      at = 0;
    }
    const auto append = [&](std::span<const std::byte> bytes) -> Status {
      if (at + bytes.size() > manifest.patch_bytes)
        return fail(Code::kCorrupt, kFetch, "{}: longer than the {} bytes of its manifest", manifest.patch_key(),
                    manifest.patch_bytes);
      ECHO_TRY(delta::write_all_at(file.get(), bytes, at, kFetch, path));
      at += bytes.size();
      return ok();
    };
    Status fetched;
    if (at < manifest.patch_bytes)
      if (auto total = store_.get(manifest.patch_key(), at, append); !total) fetched = std::move(total).error();
    const bool is_wrong = !fetched && (fetched.error().code == Code::kStale || fetched.error().code == Code::kCorrupt);
    if (is_wrong) ::unlink(path.c_str());
    ECHO_TRY(fetched);
    if (::fsync(file.get()) != 0) return os_error(kFetch, path);
  }
  ECHO_ASSIGN(const auto patch, delta::MappedFile::open(path, kFetch));
  const std::string found =
      patch.bytes().size() == manifest.patch_bytes ? overlay::trust::sha256_hex(patch.bytes()) : "another size";
  if (found == manifest.sha256) return ok();
  ::unlink(path.c_str());
  return fail(Code::kCorrupt, kFetch, "{}: expected {} bytes with SHA-256 {}, found {} bytes with {}",
              manifest.patch_key(), manifest.patch_bytes, manifest.sha256, patch.bytes().size(), found);
}

}  // namespace echoline::store
