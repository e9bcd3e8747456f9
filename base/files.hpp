// Files: reading whole files, crash-safe writing of whole files, and an owned descriptor.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline {

// An open file descriptor, closed with the object; negative: none.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The error for the current errno about `path`, with the code of os_code().
Error os_error(std::string_view operation, const std::filesystem::path& path);

// Reads a file of at most `bytes_max`; kNotFound, kIo or kExhausted with the path in the message.
Result<std::string> read_file(const std::filesystem::path& path, std::uint64_t bytes_max = 1ull << 30);

// Replaces `path` atomically: temporary file in the same folder, fsync, rename, fsync of the folder. After a crash at
// any point the file has the old or the new content.
Status write_file_atomic(const std::filesystem::path& path, std::string_view content);
// The same for a file with secrets, which only its owner may read, at any time.
Status write_private_file_atomic(const std::filesystem::path& path, std::string_view content);

// Creates a folder and its parents; no error if it exists.
Status make_folders(const std::filesystem::path& path);

}  // namespace echoline
