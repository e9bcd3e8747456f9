// A file as bytes: mapped into memory, read-only.
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
  static Result<MappedFile> open(const std::filesystem::path& path, std::string_view operation = "open file");
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace echoline::delta
