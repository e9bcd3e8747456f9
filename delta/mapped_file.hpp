// A file as bytes: mapped into memory.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "base/result.hpp"

namespace echoline::delta {

// The bytes are valid while this object, or what it was moved into, lives. They follow what others write to the file,
// which must not be truncated meanwhile; replacing it by rename is fine.
class MappedFile {
 public:
  // kNotFound or kIo when the file cannot be opened, kInvalid when it is a folder or a device.
  static Result<MappedFile> open(const std::filesystem::path& path, std::string_view operation = "open file") {
    return open(path, operation, false);
  }
  // What is put into mutable_bytes() is in the file. Where a file system has to find room for that and has none, the
  // process gets a SIGBUS: not in memory (tmpfs), nor where blocks are written where they are.
  static Result<MappedFile> open_to_write(const std::filesystem::path& path, std::string_view operation) {
    return open(path, operation, true);
  }
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  std::span<std::byte> mutable_bytes() { return bytes_; }  // of one that was opened to be written

 private:
  static Result<MappedFile> open(const std::filesystem::path& path, std::string_view operation, bool write);
  std::span<std::byte> bytes_;
};

}  // namespace echoline::delta
