// A file's bytes, mapped into memory.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "base/result.hpp"

namespace echoline::delta {

// The bytes are valid while this object, or the one it was moved into, lives. Writes of other processes to the file are
// visible in them. The file must not be truncated meanwhile; replacing it by rename is fine.
class MappedFile {
 public:
  // kNotFound or kIo if the file cannot be opened, kInvalid if it is a folder or a device.
  static Result<MappedFile> open(const std::filesystem::path& path, std::string_view operation = "open file") {
    return open(path, operation, Access::kRead);
  }
  // Bytes written to mutable_bytes() go to the file. If the file system must allocate space for a write and has none,
  // the process gets a SIGBUS. This cannot happen on file systems that overwrite blocks in place.
  static Result<MappedFile> open_to_write(const std::filesystem::path& path, std::string_view operation) {
    return open(path, operation, Access::kReadWrite);
  }
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  std::span<std::byte> mutable_bytes() { return bytes_; }  // after open_to_write()

 private:
  enum class Access { kRead, kReadWrite };
  static Result<MappedFile> open(const std::filesystem::path& path, std::string_view operation, Access access);
  std::span<std::byte> bytes_;
};

}  // namespace echoline::delta
