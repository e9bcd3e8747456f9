// The signed description of a stored snapshot or delta, and of the other objects of a store (docs/store.md).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/keys.hpp"
#include "store/signed_text.hpp"

namespace echoline::store {

inline constexpr std::size_t kManifestBytesMax = 4096;

struct Manifest {
  std::string run_id = {};
  delta::PatchKind kind = delta::PatchKind::kSnapshot;
  VersionName name = {};
  std::optional<VersionName> base = {};  // of a delta
  delta::Digest base_digest = {};        // of a delta
  delta::Digest digest = {};             // of the policy
  std::uint64_t state_bytes = 0;         // of the policy's tensors
  std::uint64_t patch_bytes = 0;
  std::string sha256 = {};  // of the patch
  std::uint64_t term = 0;   // of the publisher's lease; part of the patch's key
  std::uint64_t published_unix_ms = 0;

  std::string patch_key() const { return store::patch_key(kind, name, term); }
  std::string key() const { return manifest_key(kind, name); }
  bool is_snapshot() const { return kind == delta::PatchKind::kSnapshot; }
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

std::string sign(const Manifest& manifest, const overlay::trust::SigningKey& key);
// kCorrupt: not a manifest of this form that the key has signed. `what`: its key, for messages.
Result<Manifest> read_manifest(std::string_view text, const overlay::trust::Verifier& verifier, std::string_view what);

// The newest version, and the newest snapshot of its history.
struct Latest {
  Manifest newest;
  Manifest anchor;
};
// The texts of both manifests, one after the other.
Result<Latest> read_latest(std::string_view text, const overlay::trust::Verifier& verifier);

// The object at kRunKey: whose store this is.
struct RunDescription {
  std::string run_id;
  overlay::trust::PublicKey key;
};
std::string sign(const RunDescription& run, const overlay::trust::SigningKey& key);
// kInvalid: a later format. kCorrupt: anything else that is wrong. Whether the key is the right one, the caller
// decides.
Result<RunDescription> read_run_description(std::string_view text);

// A file of the model's directory that is not weights.
struct StoredFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::string sha256;  // its object is file_key(sha256)
};
inline constexpr std::size_t kFilesMax = 100, kFileListBytesMax = 64u << 10;
inline constexpr std::size_t kFileBytesMax = 64u << 20;
std::string sign(const std::vector<StoredFile>& files, const overlay::trust::SigningKey& key);
Result<std::vector<StoredFile>> read_file_list(std::string_view text, const overlay::trust::Verifier& verifier);

}  // namespace echoline::store
