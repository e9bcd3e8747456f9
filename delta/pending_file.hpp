// Writing files that appear whole or not at all, and the system calls behind it.
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

// The folder a path lies in; "." for a bare name.
std::filesystem::path folder_of(const std::filesystem::path& path);
// Makes what happened to the names in a folder durable.
Status sync_folder(const std::filesystem::path& folder);
// All of `bytes`, however many calls that takes; errors name `path`.
Status write_all(int fd, std::span<const std::byte> bytes, std::string_view operation,
                 const std::filesystem::path& path);
Status write_all_at(int fd, std::span<const std::byte> bytes, std::uint64_t offset, std::string_view operation,
                    const std::filesystem::path& path);

// A file under a temporary name beside its own, which it takes in commit(); without that it goes away.
class PendingFile {
 public:
  PendingFile(const std::filesystem::path& path, std::string_view operation);
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  ~PendingFile();

  Status write(std::span<const std::byte> bytes);
  // Where the bytes are until commit(), to be read back.
  std::filesystem::path temporary() const { return temporary_; }
  // Replaces the file: fsync, rename, fsync of the folder.
  Status commit();

 private:
  std::filesystem::path path_;
  std::string operation_;
  std::string temporary_;
  Descriptor fd_;
  std::optional<Error> failed_;  // of the creation
  bool committed_ = false;
};

}  // namespace echoline::delta
