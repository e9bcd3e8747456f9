// The keys of a policy store, relative to its prefix (docs/store.md).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/ids.hpp"
#include "base/names.hpp"
#include "delta/patch.hpp"
#include "store/object_store.hpp"

namespace echoline::store {

inline Status check_key(std::string_view key) {
  const auto refuse = [&] {
    return fail(Code::kInvalid, "key of an object",
                "expected 1 to {} letters, digits, '-', '_', '.' and '/', found '{}'", ObjectStore::kKeyBytesMax, key);
  };
  if (key.empty() || key.size() > ObjectStore::kKeyBytesMax) return refuse();
  for (std::size_t begin = 0; begin <= key.size();) {
    const std::size_t end = std::min(key.find('/', begin), key.size());
    const std::string_view part = key.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || !has_only_name_characters(part)) return refuse();
    begin = end + 1;
  }
  return ok();
}

// Names one stored version; a version that was published again in a later epoch has another name.
struct VersionName {
  std::uint64_t epoch = 0;
  Version version = {};
  friend auto operator<=>(const VersionName&, const VersionName&) = default;
};
// "00000001.000000000042"
inline std::string to_text(const VersionName& name) { return fmt::format("{:08}.{:012}", name.epoch, name.version); }
std::optional<VersionName> parse_version_name(std::string_view text);

inline constexpr std::string_view kRunKey = "run", kLatestKey = "latest", kFilesKey = "model/files";
inline std::string folder_key(delta::PatchKind kind, const VersionName& name) {
  return fmt::format("{}/{}", kind == delta::PatchKind::kSnapshot ? "snapshots" : "deltas", to_text(name));
}
inline std::string manifest_key(delta::PatchKind kind, const VersionName& name) {
  return folder_key(kind, name) + "/manifest";
}
inline std::string ready_key(delta::PatchKind kind, const VersionName& name) {
  return folder_key(kind, name) + "/ready";
}
inline std::string patch_key(delta::PatchKind kind, const VersionName& name, std::uint64_t term) {
  return fmt::format("{}/{:012}.patch", folder_key(kind, name), term);
}
inline std::string lease_key(std::uint64_t term) { return fmt::format("lease/{:012}", term); }
inline std::string file_key(std::string_view sha256) { return fmt::format("model/{}", sha256); }

// A key below snapshots/ or deltas/, taken apart.
struct PublicationKey {
  delta::PatchKind kind = delta::PatchKind::kDelta;
  VersionName name;
  std::string_view file;  // "manifest", "ready", or the name of a patch
};
std::optional<PublicationKey> parse_publication_key(std::string_view key);
std::optional<std::uint64_t> parse_lease_key(std::string_view key);  // the term

}  // namespace echoline::store
