// Writes and syncs files: those of PendingFile, journals, and checkpoints that are changed in place.
#include "delta/pending_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace echoline::delta {
namespace {

constexpr std::size_t kCallBytesMax = 1u << 30;  // Linux writes less than 2 GiB per call

}  // namespace

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

Status sync_folder(const std::filesystem::path& folder) {
  const Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || ::fsync(directory.get()) != 0) return os_error("sync folder", folder);
  return ok();
}

Status write_all(int fd, std::span<const std::byte> bytes, std::string_view operation,
                 const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written_bytes = ::write(fd, bytes.data(), std::min(bytes.size(), kCallBytesMax));
    if (written_bytes < 0 && errno == EINTR) continue;
    if (written_bytes < 0) return os_error(operation, path);
    bytes = bytes.subspan(static_cast<std::size_t>(written_bytes));
  }
  return ok();
}

Status write_all_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset, std::string_view operation,
                    const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t written_bytes =
        ::pwrite(fd, bytes.data(), std::min(bytes.size(), kCallBytesMax), static_cast<off_t>(offset));
    if (written_bytes < 0 && errno == EINTR) continue;
    if (written_bytes < 0) return os_error(operation, path);
    bytes = bytes.subspan(static_cast<std::size_t>(written_bytes));
    offset += static_cast<std::uint64_t>(written_bytes);
  }
  return ok();
}

PendingFile::PendingFile(const std::filesystem::path& path, std::string_view operation)
    : path_(path),
      operation_(operation),
      temporary_path_((folder_of(path) / ("." + path.filename().string() + ".XXXXXX")).string()),
      fd_(::mkostemp(temporary_path_.data(), O_CLOEXEC)) {  // replaces the X in the path
  if (fd_.get() < 0) create_error_ = os_error(operation, path);
}

PendingFile::~PendingFile() {
  if (fd_.get() >= 0 && !committed_) ::unlink(temporary_path_.c_str());
}

Status PendingFile::write(std::span<const std::byte> bytes) {
  if (create_error_) return *create_error_;
  return write_all(fd_.get(), bytes, operation_, path_);
}

Status PendingFile::commit() {
  if (create_error_) return *create_error_;
  // mkostemp() made a file that only the owner can read.
  if (::fchmod(fd_.get(), 0644) != 0 || ::fsync(fd_.get()) != 0 ||
      ::rename(temporary_path_.c_str(), path_.c_str()) != 0)
    return os_error(operation_, path_);
  committed_ = true;
  return sync_folder(folder_of(path_));
}

}  // namespace echoline::delta
