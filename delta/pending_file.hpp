// Writes files atomically, with the system calls for it.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/files.hpp"
#include "base/result.hpp"

namespace echoline::delta {

// The folder of a path; "." for a bare name.
std::filesystem::path folder_of(const std::filesystem::path& path);
// Makes changes of a folder's names durable.
Status sync_folder(const std::filesystem::path& folder);
// Writes all of `bytes`, in as many calls as needed; errors name `path`.
Status write_all(int fd, std::span<const std::byte> bytes, std::string_view operation,
                 const std::filesystem::path& path);
// The same, from `offset` of the file on.
Status write_all_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset, std::string_view operation,
                    const std::filesystem::path& path);

// A file under a temporary name beside its final one, which commit() gives it; removed without commit().
class PendingFile {
 public:
  PendingFile(const std::filesystem::path& path, std::string_view operation);
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  ~PendingFile();

  Status write(std::span<const std::byte> bytes);
  // Path of the file until commit(), for reading it back.
  std::filesystem::path temporary() const { return temporary_path_; }
  // Replaces the file: fsync, rename, fsync of the folder. If only the last fails, the file is replaced, but may not
  // survive a crash.
  Status commit();

 private:
  std::filesystem::path path_;
  std::string operation_;
  std::string temporary_path_;
  Descriptor fd_;
  std::optional<Error> create_error_;
  bool committed_ = false;
};

}  // namespace echoline::delta
