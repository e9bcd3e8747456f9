// Objects as files, for open_object_store().
#include "store/directory_store.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/files.hpp"
#include "base/os_code.hpp"
#include "delta/pending_file.hpp"
#include "store/keys.hpp"

namespace echoline::store {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kReadBlockBytes = 1u << 20;
constexpr std::string_view kTemporary = ".new.";
constexpr mode_t kMode = 0644;

}  // namespace

Result<fs::path> DirectoryStore::path_of(const std::string& key) const {
  ECHO_TRY(check_key(key));
  return root_ / key;
}

Status DirectoryStore::put(const std::string& key, std::span<const std::byte> bytes) {
  return write(key, bytes, /*replaces=*/true);
}
Status DirectoryStore::put_if_absent(const std::string& key, std::span<const std::byte> bytes) {
  return write(key, bytes, /*replaces=*/false);
}

Status DirectoryStore::write(const std::string& key, std::span<const std::byte> bytes, bool replaces) {
  constexpr std::string_view kOperation = "store object";
  ++requests_;
  ECHO_ASSIGN(const fs::path path, path_of(key));
  ECHO_TRY(make_folders(path.parent_path()));
  std::string temporary = path.string() + std::string(kTemporary) + "XXXXXX";
  const Descriptor file(::mkostemp(temporary.data(), O_CLOEXEC));
  if (file.get() < 0) return os_error(kOperation, path);
  const auto named = [&]() -> Status {
    ECHO_TRY(delta::write_all(file.get(), bytes, kOperation, path));
    // mkostemp() makes the file readable by its owner only.
    if (::fchmod(file.get(), kMode) != 0 || ::fsync(file.get()) != 0) return os_error(kOperation, path);
    if (replaces) return ::rename(temporary.c_str(), path.c_str()) == 0 ? ok() : Status(os_error(kOperation, path));
    if (::link(temporary.c_str(), path.c_str()) == 0) return ok();
    if (errno != EEXIST) return os_error(kOperation, path);
    return fail(Code::kStale, kOperation, "{}: exists already", path.string());
  };
  const Status status = named();
  if (!status || !replaces) ::unlink(temporary.c_str());
  ECHO_TRY(status);
  bytes_sent_ += bytes.size();
  return delta::sync_folder(path.parent_path());
}

Result<std::uint64_t> DirectoryStore::get(const std::string& key, std::uint64_t first, const ByteSink& sink) {
  constexpr std::string_view kOperation = "read object";
  ++requests_;
  ECHO_ASSIGN(const fs::path path, path_of(key));
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return os_error(kOperation, path);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return os_error(kOperation, path);
  if (!S_ISREG(info.st_mode)) return fail(Code::kNotFound, kOperation, "{}: no file", path.string());
  std::vector<std::byte> block(kReadBlockBytes);
  for (std::uint64_t at = first;;) {
    const ssize_t count = ::pread(file.get(), block.data(), block.size(), static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return os_error(kOperation, path);
    if (count == 0) return static_cast<std::uint64_t>(info.st_size);
    bytes_received_ += static_cast<std::uint64_t>(count);
    ECHO_TRY(sink(std::span(block).first(static_cast<std::size_t>(count))));
    at += static_cast<std::uint64_t>(count);
  }
}

Result<std::vector<ObjectInfo>> DirectoryStore::list(const std::string& prefix) {
  constexpr std::string_view kOperation = "list objects";
  ++requests_;
  std::vector<ObjectInfo> objects;
  const fs::path folder = root_ / fs::path(prefix).parent_path();  // a prefix may end within a name
  std::error_code error;
  fs::recursive_directory_iterator file(folder, error);
  if (error) {
    if (error == std::errc::no_such_file_or_directory) return objects;
    return fail(os_code(error.value()), kOperation, "{}: {}", folder.string(), error.message());
  }
  for (; file != fs::recursive_directory_iterator(); file.increment(error)) {
    if (error) break;
    std::error_code gone;  // another process may remove the file now
    if (!file->is_regular_file(gone) || gone) continue;
    const std::string key = file->path().lexically_relative(root_).generic_string();
    if (!key.starts_with(prefix) || key.find(kTemporary) != std::string::npos) continue;
    const std::uintmax_t bytes = file->file_size(gone);
    if (gone) continue;
    if (objects.size() >= kListedMax)
      return fail(Code::kExhausted, kOperation, "{}: more than {} files", folder.string(), kListedMax);
    objects.push_back({.key = key, .bytes = bytes});
  }
  if (error && error != std::errc::no_such_file_or_directory)
    return fail(os_code(error.value()), kOperation, "{}: {}", folder.string(), error.message());
  std::sort(objects.begin(), objects.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  return objects;
}

Status DirectoryStore::remove(const std::string& key) {
  ++requests_;
  ECHO_ASSIGN(const fs::path path, path_of(key));
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return os_error("remove object", path);
  return ok();
}

Traffic DirectoryStore::traffic() const {
  return {.requests = requests_, .bytes_sent = bytes_sent_, .bytes_received = bytes_received_};
}

}  // namespace echoline::store
