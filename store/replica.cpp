// Installs versions into a folder, for `echoline store`.
#include "store/replica.hpp"

#include <algorithm>
#include <set>

#include "base/files.hpp"
#include "base/log.hpp"
#include "delta/in_place.hpp"
#include "delta/mapped_file.hpp"
#include "delta/new_checkpoint.hpp"
#include "delta/pending_file.hpp"

namespace echoline::store {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOperation = "install policy";
constexpr std::size_t kStateBytesMax = 1024, kDigestDigits = 32;

std::string to_text(const HeldVersion& held, const overlay::trust::PublicKey& key) {
  return fmt::format("echoline-replica 1\nkey {}\nversion {}\ndigest {}\n", overlay::trust::to_hex(key),
                     to_text(held.name), held.digest.hex());
}

Result<HeldVersion> read_state(std::string_view text, const overlay::trust::PublicKey& key, std::string_view what) {
  LineReader lines(text, what);
  HeldVersion held;
  ECHO_ASSIGN(const std::uint64_t format, lines.number("echoline-replica"));
  ECHO_ASSIGN(const std::string found, lines.hex("key", 2 * key.bytes.size()));
  if (format != 1 || found != overlay::trust::to_hex(key))
    return fail(Code::kInvalid, kOperation, "{}: the folder holds the policy of another run, with key {}: use another",
                what, found);
  ECHO_ASSIGN(const std::string_view version, lines.value("version"));
  const auto name = parse_version_name(version);
  if (!name) return lines.corrupt("'version' and EPOCH.VERSION");
  held.name = *name;
  ECHO_ASSIGN(const std::string digest, lines.hex("digest", kDigestDigits));
  ECHO_ASSIGN(held.digest, delta::Digest::parse(digest));
  return held;
}

bool is_weights(const fs::path& file) {
  return file.extension() == ".safetensors" || file.filename() == delta::kCheckpointIndexName;
}

Status rename_file(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) return fail(Code::kIo, kOperation, "{}: {}", to.string(), error.message());
  return ok();
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    files.push_back(entry->path());
  return files;
}

}  // namespace

Result<Replica> Replica::open(fs::path folder, PolicyReader& reader, ReplicaOptions options) {
  Replica replica(std::move(folder), reader, options);
  std::error_code ignored;
  const bool is_replica = fs::exists(replica.state_folder(), ignored);
  const std::vector<fs::path> files = files_of(replica.folder_);
  if (!is_replica && !files.empty())
    return fail(Code::kInvalid, kOperation, "{}: expected an empty folder, or one that `echoline store` made; found {}",
                replica.folder_.string(), files.front().filename().string());
  ECHO_TRY(make_folders(replica.state_folder() / "patches"));
  const fs::path state = replica.state_folder() / "version";
  const auto text = read_file(state, kStateBytesMax);
  if (!text && text.error().code != Code::kNotFound) return text.error();
  if (!text) return replica;
  ECHO_ASSIGN(replica.held_, read_state(*text, reader.run().key, state.string()));
  // A delta may have been applied whose version is not recorded yet. Applying it again changes nothing.
  ECHO_TRY(delta::recover(replica.folder_, {.threads = options.threads}));
  return replica;
}

Status Replica::hold(std::optional<HeldVersion> version) {
  const fs::path state = state_folder() / "version";
  if (version) {
    ECHO_TRY(write_file_atomic(state, to_text(*version, reader_.run().key)));
  } else {
    std::error_code error;
    fs::remove(state, error);
    if (error) return fail(Code::kIo, kOperation, "{}: {}", state.string(), error.message());
    ECHO_TRY(delta::sync_folder(state_folder()));
  }
  held_ = version;
  return ok();
}

Result<ReplicaStep> Replica::follow() {
  ECHO_ASSIGN(const Latest latest, reader_.latest());
  if (held_ && latest.newest.name < held_->name)  // the service gave an old answer
    return ReplicaStep{.name = held_->name, .digest = held_->digest};
  return install(latest.newest, latest.anchor);
}

Result<ReplicaStep> Replica::install(const Manifest& target, const std::optional<Manifest>& anchor) {
  ReplicaStep step{.name = target.name, .digest = target.digest};
  std::optional<HeldVersion> usable = held_;
  std::set<VersionName> avoided;
  for (;;) {
    ECHO_ASSIGN(const std::vector<Manifest> path, reader_.path_to(target, usable, anchor, avoided));
    Status applied;
    for (const Manifest& manifest : path) {
      applied = apply(manifest);
      if (!applied) break;
      ++(manifest.is_snapshot() ? step.snapshots : step.deltas);
      step.patch_bytes += manifest.patch_bytes;
    }
    if (applied) break;
    const Code code = applied.error().code;
    // The stored patch or the held weights are wrong: a snapshot replaces them, or an earlier snapshot.
    const bool is_mismatch = code == Code::kStale || code == Code::kCorrupt || code == Code::kInvalid;
    if (!is_mismatch || path.empty()) return applied.error();
    log::warn("version {}: {}. Trying an earlier snapshot", target.name.version, applied.error().message());
    if (path.front().is_snapshot())
      avoided.insert(path.front().name);
    else
      usable.reset();
  }
  if (step.snapshots + step.deltas > 0) ECHO_TRY(write_files());
  std::error_code ignored;
  for (const fs::path& file : files_of(state_folder() / "patches")) fs::remove(file, ignored);
  return step;
}

Status Replica::apply(const Manifest& manifest) {
  std::string name = manifest.patch_key();
  std::replace(name.begin(), name.end(), '/', '-');
  const fs::path patch_file = state_folder() / "patches" / name;
  ECHO_TRY(reader_.download(manifest, patch_file));
  if (manifest.is_snapshot()) {
    ECHO_TRY(hold(std::nullopt));
    ECHO_TRY(apply_snapshot(patch_file));
  } else {
    ECHO_ASSIGN(const auto patch, delta::MappedFile::open(patch_file, kOperation));
    ECHO_TRY(delta::apply_in_place(folder_, patch.bytes(), {.threads = options_.threads, .stop = options_.stop}));
  }
  ECHO_TRY(hold(HeldVersion{.name = manifest.name, .digest = manifest.digest}));
  std::error_code ignored;
  fs::remove(patch_file, ignored);
  return ok();
}

Status Replica::apply_snapshot(const fs::path& patch_file) {
  const fs::path fresh = state_folder() / "new";
  std::error_code error;
  fs::remove_all(fresh, error);
  {
    ECHO_ASSIGN(const auto patch, delta::MappedFile::open(patch_file, kOperation));
    ECHO_TRY(delta::unpack_snapshot(patch.bytes(), /*like=*/nullptr, fresh,
                                    {.threads = options_.threads, .stop = options_.stop}));
  }
  for (const fs::path& old : files_of(folder_))
    if (is_weights(old) || delta::is_journal_name(old.filename().string())) {
      fs::remove(old, error);
      if (error) return fail(Code::kIo, kOperation, "{}: {}", old.string(), error.message());
    }
  for (const fs::path& file : files_of(fresh)) ECHO_TRY(rename_file(file, folder_ / file.filename()));
  ECHO_TRY(delta::sync_folder(folder_));
  fs::remove_all(fresh, error);
  return ok();
}

Status Replica::write_files() {
  ECHO_ASSIGN(const std::vector<StoredFile> files, reader_.files());
  for (const StoredFile& file : files) {
    const fs::path path = folder_ / file.name;
    std::error_code error;
    if (fs::file_size(path, error) == file.bytes && !error) continue;
    ECHO_ASSIGN(const std::string content, reader_.file(file));
    ECHO_TRY(write_file_atomic(path, content));
  }
  return ok();
}

}  // namespace echoline::store
