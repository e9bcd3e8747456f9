// The texts of a store's small objects, line by line as docs/store.md describes them.
#include "store/manifest.hpp"

#include "base/text.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::store {
namespace {

constexpr std::string_view kOperation = "read store";
constexpr std::string_view kManifestContext = "store manifest", kRunContext = "store run",
                           kFilesContext = "store files";
constexpr std::uint64_t kFormat = 1;
constexpr std::size_t kSha256Digits = 64, kDigestDigits = 32;
constexpr std::string_view kNone = "none";

Result<VersionName> read_name(LineReader& lines, std::string_view word) {
  ECHO_ASSIGN(const std::string_view text, lines.value(word));
  const auto name = parse_version_name(text);
  if (!name) return lines.corrupt(fmt::format("'{}' and EPOCH.VERSION", word));
  return *name;
}

Status read_format(LineReader& lines, std::string_view word, std::string_view what) {
  ECHO_ASSIGN(const std::uint64_t format, lines.number(word));
  if (format != kFormat)
    return fail(Code::kInvalid, kOperation, "{}: format {}; this program reads format {}", what, format, kFormat);
  return ok();
}

Result<std::string> read_run_id(LineReader& lines) {
  ECHO_ASSIGN(const std::string_view id, lines.value("run"));
  if (id.size() > overlay::trust::kRunIdBytesMax || !is_printable(id)) return lines.corrupt("the name of a run");
  return std::string(id);
}

}  // namespace

std::string sign(const Manifest& manifest, const overlay::trust::SigningKey& key) {
  std::string body = fmt::format("echoline-manifest {}\nrun {}\nkind {}\nversion {}\n", kFormat, manifest.run_id,
                                 manifest.is_snapshot() ? "snapshot" : "delta", to_text(manifest.name));
  body += manifest.base ? fmt::format("base {}\nbase-digest {}\n", to_text(*manifest.base), manifest.base_digest.hex())
                        : fmt::format("base {}\nbase-digest {}\n", kNone, kNone);
  body += fmt::format("digest {}\nstate-bytes {}\npatch-bytes {}\npatch-sha256 {}\nterm {}\npublished-unix-ms {}\n",
                      manifest.digest.hex(), manifest.state_bytes, manifest.patch_bytes, manifest.sha256, manifest.term,
                      manifest.published_unix_ms);
  return sign_text(kManifestContext, body, key);
}

Result<Manifest> read_manifest(std::string_view text, const overlay::trust::Verifier& verifier, std::string_view what) {
  ECHO_ASSIGN(const std::string body, check_signed_text(kManifestContext, text, verifier, what));
  LineReader lines(body, what);
  ECHO_TRY(read_format(lines, "echoline-manifest", what));
  Manifest manifest;
  ECHO_ASSIGN(manifest.run_id, read_run_id(lines));
  ECHO_ASSIGN(const std::string_view kind, lines.value("kind"));
  if (kind != "snapshot" && kind != "delta") return lines.corrupt("'kind snapshot' or 'kind delta'");
  manifest.kind = kind == "delta" ? delta::PatchKind::kDelta : delta::PatchKind::kSnapshot;
  ECHO_ASSIGN(manifest.name, read_name(lines, "version"));
  if (manifest.is_snapshot()) {
    ECHO_ASSIGN(const std::string_view base, lines.value("base"));
    ECHO_ASSIGN(const std::string_view digest, lines.value("base-digest"));
    if (base != kNone || digest != kNone) return lines.corrupt("no base, because this is a snapshot");
  } else {
    ECHO_ASSIGN(manifest.base, read_name(lines, "base"));
    if (!(*manifest.base < manifest.name)) return lines.corrupt("a base before the version itself");
    ECHO_ASSIGN(const std::string digest, lines.hex("base-digest", kDigestDigits));
    ECHO_ASSIGN(manifest.base_digest, delta::Digest::parse(digest));
  }
  ECHO_ASSIGN(const std::string digest, lines.hex("digest", kDigestDigits));
  ECHO_ASSIGN(manifest.digest, delta::Digest::parse(digest));
  ECHO_ASSIGN(manifest.state_bytes, lines.number("state-bytes"));
  ECHO_ASSIGN(manifest.patch_bytes, lines.number("patch-bytes"));
  ECHO_ASSIGN(manifest.sha256, lines.hex("patch-sha256", kSha256Digits));
  ECHO_ASSIGN(manifest.term, lines.number("term"));
  ECHO_ASSIGN(manifest.published_unix_ms, lines.number("published-unix-ms"));
  if (!lines.at_end()) return lines.corrupt("the signature next");
  return manifest;
}

Result<Latest> read_latest(std::string_view text, const overlay::trust::Verifier& verifier) {
  const auto begin = text.find("signature ");
  const auto end = begin == text.npos ? text.npos : text.find('\n', begin);
  if (end == text.npos) return fail(Code::kCorrupt, kOperation, "{}: expected two manifests, found none", kLatestKey);
  Latest latest;
  ECHO_ASSIGN(latest.newest, read_manifest(text.substr(0, end + 1), verifier, kLatestKey));
  ECHO_ASSIGN(latest.anchor, read_manifest(text.substr(end + 1), verifier, kLatestKey));
  if (!latest.anchor.is_snapshot() || latest.newest.name < latest.anchor.name)
    return fail(Code::kCorrupt, kOperation, "{}: expected a snapshot as the second manifest", kLatestKey);
  return latest;
}

std::string sign(const RunDescription& run, const overlay::trust::SigningKey& key) {
  return sign_text(
      kRunContext,
      fmt::format("echoline-store {}\nrun {}\nkey {}\n", kFormat, run.run_id, overlay::trust::to_hex(run.key)), key);
}

Result<RunDescription> read_run_description(std::string_view text) {
  LineReader lines(text, kRunKey);
  ECHO_TRY(read_format(lines, "echoline-store", kRunKey));
  RunDescription run;
  ECHO_ASSIGN(run.run_id, read_run_id(lines));
  ECHO_ASSIGN(const std::string key, lines.hex("key", 2 * run.key.bytes.size()));
  ECHO_ASSIGN(run.key, parse_public_key(key));
  ECHO_TRY(check_signed_text(kRunContext, text, overlay::trust::Verifier(run.key), kRunKey));
  ECHO_TRY(lines.value("signature"));
  if (!lines.at_end()) return lines.corrupt("no line after the signature");
  return run;
}

std::string sign(const std::vector<StoredFile>& files, const overlay::trust::SigningKey& key) {
  std::string body = fmt::format("echoline-files {}\n", kFormat);
  for (const StoredFile& file : files) body += fmt::format("file {} {} {}\n", file.name, file.bytes, file.sha256);
  return sign_text(kFilesContext, body, key);
}

Result<std::vector<StoredFile>> read_file_list(std::string_view text, const overlay::trust::Verifier& verifier) {
  ECHO_ASSIGN(const std::string body, check_signed_text(kFilesContext, text, verifier, kFilesKey));
  LineReader lines(body, kFilesKey);
  ECHO_TRY(read_format(lines, "echoline-files", kFilesKey));
  std::vector<StoredFile> files;
  while (!lines.at_end()) {
    if (files.size() >= kFilesMax) return lines.corrupt(fmt::format("at most {} files", kFilesMax));
    ECHO_ASSIGN(const std::string_view line, lines.value("file"));
    const auto first = line.find(' '), second = line.rfind(' ');
    StoredFile file;
    file.name = line.substr(0, first);
    if (first == line.npos || first == second || file.name.empty() || file.name.front() == '.' ||
        !has_only_name_characters(file.name) || file.name.ends_with(".safetensors"))
      return lines.corrupt("the name of a file that is not weights, its size and its SHA-256");
    ECHO_ASSIGN(file.bytes, parse_number(line.substr(first + 1, second - first - 1), kFilesKey));
    file.sha256 = line.substr(second + 1);
    if (!is_hex(file.sha256, kSha256Digits) || file.bytes > kFileBytesMax)
      return lines.corrupt(fmt::format("a size of at most {} and a SHA-256", kFileBytesMax));
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace echoline::store
